"""What megatron-core's datasets ask of a tokenizer, answered by one of Transformers."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from accelerate._base.errors import ConfigurationError


def tokenizer_for(given: Any, family: str, *, finds_ends: bool) -> Any:
    """Return a tokenizer of Transformers or of Megatron as megatron-core asks for it.

    Args:
        family: Which samples are made: "gpt", "bert" or "t5".
        finds_ends: Whether samples of GPT must know where documents end; if not, they need no tokenizer.

    Raises:
        ConfigurationError: There is none, or it lacks a token that the samples need.
    """
    if given is None and family == "gpt" and not finds_ends:
        return SimpleNamespace(unique_identifiers={"class": "none"}, vocab_size=None, eod=None)
    if isinstance(given, (str, os.PathLike)) or not (
        hasattr(given, "unique_identifiers") or hasattr(given, "get_vocab")
    ):
        raise ConfigurationError(
            f"tokenizer={given!r} was given, but these samples of a {family.upper()} model need to know special tokens. "
            "Write tokenizer=AutoTokenizer.from_pretrained(...), or one of Megatron's tokenizers."
        )
    tokenizer = given if hasattr(given, "unique_identifiers") else _adapted(given)
    needed = {
        "gpt": ("eod",) if finds_ends else (),
        "bert": ("cls", "sep", "mask", "pad"),
        "t5": ("bos", "eos"),
    }
    lacking = [name for name in needed[family] if getattr(tokenizer, name, None) is None]
    if family == "t5" and not tokenizer.additional_special_tokens_ids:
        lacking.append("additional special (<extra_id_0>, ...)")
    if lacking:
        raise ConfigurationError(
            f"tokenizer={type(given).__name__} has no {' and no '.join(lacking)} token, which the samples of a "
            f"{family.upper()} model need. Add it with tokenizer.add_special_tokens."
        )
    if family == "bert" and tokenizer.pad != 0:
        raise ConfigurationError(
            f"tokenizer={type(given).__name__} pads with token {tokenizer.pad}, but megatron-core writes that number into "
            "the masks of BERT, where padding must be 0. Use a vocabulary that begins with the padding token."
        )
    return tokenizer


def _adapted(tokenizer: Any) -> SimpleNamespace:
    """Return what megatron-core asks of a tokenizer, answered by one of Transformers."""
    ids = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "cls", "sep", "mask", "pad")}
    pad = ids.pop("pad")
    ids["bos"] = ids["cls"] if ids["bos"] is None else ids["bos"]
    ids["eos"] = ids["sep"] if ids["eos"] is None else ids["eos"]
    # Transformers 5 has a new name for them.
    extra = getattr(tokenizer, "additional_special_tokens", None) or getattr(tokenizer, "extra_special_tokens", None)
    sentinels = [tokenizer.convert_tokens_to_ids(str(token)) for token in extra or ()]
    adapted = SimpleNamespace(
        **ids,
        eod=ids["eos"],
        vocab_size=len(tokenizer),
        additional_special_tokens_ids=sentinels,
        # In one order on all ranks: random words are drawn from it, and that of a fast tokenizer changes.
        inv_vocab={number: token for token, number in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])},
    )
    if pad is not None and pad not in (ids["bos"], ids["eos"], ids["cls"], ids["sep"], ids["mask"]):
        # One that also ends documents says nothing: megatron-core then pads with a number of its own.
        adapted.pad = pad
    adapted.unique_identifiers = {"class": type(tokenizer).__name__, "vocab_size": len(tokenizer), "pad": pad, **ids}
    return adapted
