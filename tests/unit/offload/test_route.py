"""The order of calls: from the model, learned, and learned anew."""

from __future__ import annotations

import threading

from accelerate.offload.read_ahead import CallOrder


def made(length: int) -> CallOrder:
    order = CallOrder()
    for number in range(length):
        assert order.add() == number
    return order


def ahead(order: CallOrder, most: int = 100) -> list[int]:
    """Return the stops that are asked for newly."""
    asked: list[int] = []

    def wanted(module: int) -> bool:
        if len(asked) == most:
            return False
        asked.append(module)
        return True

    order.predict(wanted)
    return asked


def test_the_tree_gives_the_first_order_and_a_pass_follows_a_pass() -> None:
    order = made(4)
    assert ahead(order) == []  # nothing runs yet
    order.record(0)
    assert ahead(order) == [1, 2, 3, 0]
    assert order.record(1)
    assert ahead(order) == [1]


def test_another_order_is_learned() -> None:
    order = made(4)
    for module in (2, 0, 3, 1, 2):
        order.record(module)
    assert ahead(order) == [0, 3, 1, 2]


def test_a_module_that_is_used_twice_is_foreseen_both_times() -> None:
    order = made(4)
    for module in (0, 1, 2, 1, 3, 0):
        order.record(module)
    assert ahead(order, 5)[:4] == [1, 2, 1, 3]


def test_what_was_asked_for_is_not_asked_for_again_until_the_guess_was_wrong() -> None:
    order = made(5)
    order.record(0)
    assert ahead(order, 2) == [1, 2]
    assert order.num_ahead == 2
    assert order.record(1)
    assert ahead(order, 1) == [3]
    assert not order.record(4)
    assert order.num_ahead == 0
    assert ahead(order, 2) == [0, 1]


def test_threads_do_not_mix_their_orders() -> None:
    order = made(6)
    order.record(0)
    other = threading.Thread(target=lambda: [order.record(module) for module in (3, 5)])
    other.start()
    other.join()
    order.record(1)
    assert ahead(order, 1) == [2]
    order.record(3)
    assert ahead(order, 1) == [5]
