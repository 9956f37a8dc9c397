"""The order of modules: from the tree, learned, and learned anew."""

from __future__ import annotations

import threading

from accelerate.offload.route import Route


def made(length: int) -> Route:
    route = Route()
    for number in range(length):
        assert route.extend() == number
    return route


def ahead(route: Route, most: int = 100) -> list[int]:
    """Return the stops that are asked for newly."""
    asked: list[int] = []

    def wanted(stop: int) -> bool:
        if len(asked) == most:
            return False
        asked.append(stop)
        return True

    route.look_ahead(wanted)
    return asked


def test_the_tree_gives_the_first_order_and_a_pass_follows_a_pass() -> None:
    route = made(4)
    assert ahead(route) == []  # nothing runs yet
    route.visit(0)
    assert ahead(route) == [1, 2, 3, 0]
    assert route.visit(1)
    assert ahead(route) == [1]


def test_another_order_is_learned() -> None:
    route = made(4)
    for stop in (2, 0, 3, 1, 2):
        route.visit(stop)
    assert ahead(route) == [0, 3, 1, 2]


def test_a_module_that_is_used_twice_is_foreseen_both_times() -> None:
    route = made(4)
    for stop in (0, 1, 2, 1, 3, 0):
        route.visit(stop)
    assert ahead(route, 5)[:4] == [1, 2, 1, 3]


def test_what_was_asked_for_is_not_asked_for_again_until_the_guess_was_wrong() -> None:
    route = made(5)
    route.visit(0)
    assert ahead(route, 2) == [1, 2]
    assert route.ahead == 2
    assert route.visit(1)
    assert ahead(route, 1) == [3]
    assert not route.visit(4)
    assert route.ahead == 0
    assert ahead(route, 2) == [0, 1]


def test_threads_do_not_mix_their_orders() -> None:
    route = made(6)
    route.visit(0)
    other = threading.Thread(target=lambda: [route.visit(stop) for stop in (3, 5)])
    other.start()
    other.join()
    route.visit(1)
    assert ahead(route, 1) == [2]
    route.visit(3)
    assert ahead(route, 1) == [5]
