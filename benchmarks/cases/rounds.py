"""Time competing loops in alternating rounds, and print the result for the runner."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping

Loop = Callable[[], object]


def alternate(
    loops: Mapping[str, Loop], rounds: int, warmup: int = 2, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Run each loop once a round, in turning order, and return the seconds of every round.

    A busy machine slows whole stretches of time: alternating loops meet the same quiet and busy stretches.

    Args:
        clock: `time.process_time` for loops that never wait, so that other programs on the machine do not count.
    """
    names = list(loops)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(-warmup, rounds):
        shift = round_index % len(names)
        for name in names[shift:] + names[:shift]:
            # A collection of garbage belongs to no loop in particular, so none may happen inside a measured one.
            gc.collect()
            gc.disable()
            started = clock()
            loops[name]()
            elapsed = clock() - started
            gc.enable()
            if round_index >= 0:
                seconds[name].append(elapsed)
    return seconds


def report(series: Mapping[str, list[float]], **facts: object) -> None:
    """Print the result as the one line that the runner reads."""
    print("RESULT " + json.dumps({"series": dict(series), **facts}), flush=True)
