"""Which sample kills the engine: found by halves, whoever dies, and given up alone."""

from __future__ import annotations

import math

import pytest

from eagle3_ray.attempts import ALONE, DIED, TOGETHER, Attempts
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Filesystem


@pytest.fixture
def units(tmp_path) -> Units:
    return Units(Filesystem(str(tmp_path)), "responses", "f")


def work(units: Units, todo: list[int], poison: set[int], keep_done: bool) -> tuple[set[int], dict[int, str], int]:
    """Go through a unit whose poison samples kill whatever works on them; returns done, given up, deaths.

    Without `keep_done` the actor dies too each time: it starts again and knows only what the store says.
    """
    done: set[int] = set()
    deaths = 0
    attempts = Attempts(units, "u")
    while True:
        given_up = attempts.given_up(todo)
        left = [n for n in todo if n not in done and n not in given_up]
        if not left:
            return done, given_up, deaths
        group, suspected = attempts.next_group(left)
        assert group and set(group) <= set(left)
        key = attempts.begin(group)
        if poison & set(group):
            deaths += 1
            assert deaths < 100, "it never ends"
            if keep_done:
                attempts.crashed(key, group, "the engine failed\nits log")
            else:
                attempts, done = Attempts(units, "u"), set()
        else:
            attempts.ended(key)
            done |= set(group)


@pytest.mark.parametrize("keep_done", [True, False])
@pytest.mark.parametrize(("samples", "poison"), [(1, {0}), (2, {1}), (64, {17}), (64, {0, 63}), (33, set())])
def test_the_poison_is_given_up_and_the_rest_is_done(units, samples: int, poison: set[int], keep_done: bool) -> None:
    todo = list(range(samples))
    done, given_up, deaths = work(units, todo, poison, keep_done)
    assert done == set(todo) - poison
    assert given_up.keys() == poison
    each = TOGETHER + math.ceil(math.log2(samples)) + (1 if keep_done else ALONE)
    assert deaths <= max(ALONE, each) * max(1, len(poison)) and bool(deaths) == bool(poison)


def test_the_reason_has_the_end_of_the_log(units) -> None:
    attempts = Attempts(units, "u")
    for _ in range(ALONE):
        attempts.crashed(attempts.begin([4]), [4], "the engine failed: x\n" + "\n".join(f"line {i}" for i in range(40)))
    (reason,) = attempts.given_up([4]).values()
    assert reason.startswith("quarantined: the engine died 3 times with it: the engine failed: x\nline 35")
    assert reason.endswith("line 39")


def test_one_death_of_the_actor_suspects_nobody(units) -> None:
    Attempts(units, "u").begin([0, 1, 2])  # and the actor dies
    again = Attempts(units, "u")
    assert again.crashes == [{"samples": [0, 1, 2], "error": DIED}]
    assert again.next_group([0, 1, 2]) == ([0, 1, 2], False)


def test_a_job_that_is_stopped_again_and_again_costs_no_sample_of_a_group(units) -> None:
    for _ in range(5):
        attempts = Attempts(units, "u")
        group, _ = attempts.next_group(list(range(64)))
        attempts.begin(group)  # and all is stopped
    attempts = Attempts(units, "u")
    assert attempts.given_up(list(range(64))) == {}
    attempts.begin([0])
    attempts = Attempts(units, "u")
    assert attempts.given_up([0]) == {}  # alone for the first time
    attempts.crashed(attempts.begin([0]), [0], "the engine failed")
    assert list(Attempts(units, "u").given_up([0])) == [0]  # this time it was seen


def test_what_ended_well_leaves_no_trace(units) -> None:
    attempts = Attempts(units, "u")
    attempts.ended(attempts.begin([0, 1]))
    assert Attempts(units, "u").crashes == []
    assert Attempts(units, "other").crashes == []
