"""The figures of an evaluation, from counts worked out by hand."""

from __future__ import annotations

from conftest import compose

from eagle3_ray.engines.base import Answered, Response
from eagle3_ray.evaluate import _row, different, measure
from eagle3_ray.prepare import Prompt


def row(name: str, histogram: list[int], tokens: int, steps: int, ids: list[int]) -> dict:
    return {
        "id": name, "domain": "d", "histogram": histogram, "completion_tokens": tokens, "verify_steps": steps,
        "token_ids": ids,
    }  # fmt: skip


def test_accept_length_is_completion_tokens_over_verify_steps_of_all_answers_together() -> None:
    # 10 steps: 5 accept nothing, 3 one draft, 0 two, 2 three; of them 5 pass position 1, 2 of those 5 position 2
    figures = measure([row("a", [4, 2, 0, 1], 13, 7, []), row("b", [1, 1, 0, 1], 8, 3, [])], 3)
    assert figures == {
        "conversations": 2,
        "completion_tokens": 21,
        "verify_steps": 10,
        "accept_length": 2.1,
        "accept_length_by_step": [0.5, 0.4, 1.0],
    }


def test_a_position_that_was_never_reached_has_no_share() -> None:
    assert measure([row("a", [6], 7, 6, [])], 2)["accept_length_by_step"] == [0.0, None]
    assert measure([], 2)["accept_length"] is None


def test_the_turns_of_a_conversation_are_added_up() -> None:
    responses = [
        Response([1, 2, 3], "stop", {"spec_verify_ct": 2, "spec_correct_drafts_histogram": [1, 1]}),
        Response([4, 5], "length", {"spec_verify_ct": 1, "spec_correct_drafts_histogram": [0, 0, 1]}),
    ]
    answered = Answered([9, 1, 2, 3, 9, 4, 5], [False] * 7, ["stop", "length"], responses)
    got = _row(Prompt("p", "d", [[9]]), answered)
    assert (got["completion_tokens"], got["verify_steps"], got["histogram"]) == (5, 3, [1, 1, 1])


def test_different_answers_are_found_with_their_first_different_token() -> None:
    one = [row("a", [], 0, 0, [1, 2, 3]), row("b", [], 0, 0, [1, 2])]
    other = [row("a", [], 0, 0, [1, 2, 4]), row("b", [], 0, 0, [1, 2, 3])]
    assert different(one, one) == []
    assert different(one, one[:1]) == [{"id": "b", "first_different_token": 0}]
    assert different(one, other) == [
        {"id": "a", "first_different_token": 2},
        {"id": "b", "first_different_token": 2},
    ]


def test_the_demo_serves_in_the_precision_that_it_captures() -> None:
    config = compose()
    assert (config.engine.dtype, config.evaluate.dtype) == ("float32", None)
