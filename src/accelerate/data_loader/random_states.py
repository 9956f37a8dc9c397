"""Random states that files of others hold: checked before a generator has them, because some generators believe them.

A position outside of its numbers makes numpy's and torch's generators read memory that is not theirs.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from accelerate._base.errors import CheckpointError
from accelerate._base.untrusted import first_line, is_whole, shown

_WORDS = 624
"""The numbers of a Mersenne Twister."""
_PHILOX_WORDS = 4
_CPU_BYTES = 5056
"""The size of the state of torch's generator on the CPU: a seed, how many numbers are left, a flag, the next one ..."""
_LEFT, _NEXT = slice(8, 12), slice(16, 24)


def check_random_states(states: Any, origin: str) -> None:
    """Refuse states of python's, numpy's and torch's global generators that these would not take, or should not.

    Args:
        states: A state by the name of each: "python", "numpy" and "torch"; others are of a user's generators.
        origin: What holds them, for the message: "The file 'x'".

    Raises:
        CheckpointError: If one cannot be.
    """
    if not isinstance(states, dict):
        raise CheckpointError(f"{origin} holds {shown(states)} where random states belong. Use another checkpoint.")
    for name, state in states.items():
        try:
            _CHECKS.get(name, check_random_state)(state)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise CheckpointError(
                f"{origin} holds a random state {shown(name)} that is none ({first_line(error)}): it is broken. Use another "
                "checkpoint."
            ) from error


def check_random_state(state: Any) -> None:
    """Refuse a state that lets a generator of numpy or torch read memory that is not its own, whichever it is of.

    Raises:
        ValueError: If it does.
    """
    if isinstance(state, torch.Tensor):
        _check_words_of_torch(state)
    elif isinstance(state, dict):
        _check_dictionary(state)
    elif isinstance(state, tuple | list) and state and isinstance(state[0], str):
        _check_numpy(state)


def _check_python(state: Any) -> None:
    random.Random().setstate(state)
    if not isinstance(state[2], float | None):
        raise ValueError(f"its next number of a normal distribution is {shown(state[2])}")


def _check_numpy(state: Any) -> None:
    if isinstance(state, dict):  # what RandomState has of other algorithms
        _check_dictionary(state)
        return
    if not isinstance(state, tuple) or len(state) != 5 or state[0] != "MT19937":
        raise ValueError("it is not what numpy.random.get_state() returns")
    _, words, position, has_gauss, gauss = state
    _check_words(words, position)
    if not is_whole(has_gauss, most=1) or not isinstance(gauss, float):
        raise ValueError(f"its next number of a normal distribution is {shown(has_gauss)}, {shown(gauss)}")


def _check_words(words: Any, position: Any) -> None:
    if not isinstance(words, numpy.ndarray) or words.dtype != numpy.uint32 or words.shape != (_WORDS,):
        raise ValueError(f"it does not have {_WORDS} numbers of 32 bits")
    if not is_whole(position, most=_WORDS):
        raise ValueError(f"its position is {shown(position)}, and it has {_WORDS} numbers")


def _check_dictionary(state: dict[Any, Any]) -> None:
    """Refuse the state of one of numpy's algorithms that has a position outside of its numbers."""
    inner = state.get("state")
    if not isinstance(inner, dict):
        inner = {}
    if "pos" in inner or state.get("bit_generator") == "MT19937":
        _check_words(inner.get("key"), inner.get("pos"))
    if "buffer_pos" in state and not is_whole(state["buffer_pos"], most=_PHILOX_WORDS):
        raise ValueError(f"its position is {shown(state['buffer_pos'])}, and it has {_PHILOX_WORDS} numbers")


def _check_torch(state: Any) -> None:
    torch.Generator().set_state(state)
    _check_words_of_torch(state)


def _check_words_of_torch(state: torch.Tensor) -> None:
    if state.dtype != torch.uint8:
        raise ValueError(f"it is of {state.dtype} instead of torch.uint8")
    if state.numel() == _CPU_BYTES:
        content = state.reshape(-1).numpy().tobytes()
        left, following = (int.from_bytes(content[place], "little", signed=True) for place in (_LEFT, _NEXT))
        # Torch looks at each of them, and not at both.
        if left < 1 or following < 0 or left + following > _WORDS + 1:
            raise ValueError(f"its position is {following} with {left} numbers left, and it has {_WORDS}")


_CHECKS = {"python": _check_python, "numpy": _check_numpy, "torch": _check_torch}
