"""Verdicts on figures made by hand: each cause is named, and noise is not a cause."""

from __future__ import annotations

import copy
import json
from math import nan
from typing import Any

import pytest
import torch

from eagle3_ray.alignment import judge, matrix, relative_errors, shifted, spread
from eagle3_ray.strict_json import without_nan

CLEAN: dict[str, Any] = {
    "samples": 4,
    "trained": [2, 15, 27],
    "hidden_size": 8,
    "width": 24,
    "facts": {
        "algorithm": "EAGLE3",
        "layers_to_capture": [2, 15, 27],
        "target_dtype": "float32",
        "drafter_dtype": "float32",
    },
    "precision": "float32",
    "target_dtype": "float32",
    "drafter_dtype": "float32",
    "settings": {},
    "drafter_faults": [],
    "in_force_faults": [],
    "sample_faults": [],
    "beside": {
        "prompt": {"rows": 100, "wrong_tokens": 0, "shifts": {"0": 100}},
        "verify": {"rows": 40, "wrong_tokens": 0, "shifts": {"0": 40}},
        "draft": {"rows": 60, "wrong_tokens": 0, "shifts": {"0": 60}},
    },
    "rows": {"prompt": 100, "verify": 40},
    "errors": {
        "prompt": {"median": [2e-7] * 3, "p95": [8e-7] * 3},
        "verify": {"median": [2e-7] * 3, "p95": [8e-7] * 3},
    },
    "floor": {"prompt": {"median": [1e-7] * 3, "p95": [3e-7] * 3}, "verify": {}},
    "matrix": [[2e-7, 0.9, 1.4], [0.8, 2e-7, 0.9], [1.2, 0.7, 2e-7]],
    "shifts": {"-1": 1.1, "0": 2e-7, "1": 1.2},
    "last_hidden": {"rows": 50, "same_token": 1.0, "logprob_error": 1e-6, "logprob_error_normed": 0.4},
    "drafts": {"compared": 90, "same": 1.0, "logits": [1e-6, 2e-6, 1e-6]},
    "by_sample": [{"id": "a", "error": 2e-7}, {"id": "b", "error": 2e-7}],
}


def changed(**changes: Any) -> dict[str, Any]:
    measured = copy.deepcopy(CLEAN)
    for name, value in changes.items():
        measured[name] = {**measured[name], **value} if isinstance(value, dict) else value
    return measured


def test_what_agrees_within_its_noise_is_aligned() -> None:
    assert judge(CLEAN) == []


CASES = [
    ({"facts": {"layers_to_capture": [3, 16, 28]}}, "off by one: boundary 3 where 2 was trained, 16 where 15"),
    ({"facts": {"layers_to_capture": [1, 14, 26]}}, "off by one: boundary 1 where 2 was trained"),
    ({"facts": {"layers_to_capture": [2, 16, 27]}}, "other layer ids: boundary 16 where 15 was trained"),
    ({"facts": {"layers_to_capture": [15, 2, 27]}}, "permuted: boundary 15 where 2 was trained"),
    ({"facts": {"layers_to_capture": [2, 15]}}, "boundaries [2, 15] are served, [2, 15, 27] were trained"),
    ({"facts": {"algorithm": "EAGLE"}, "width": 8}, "the drafter gets 8 numbers a token, not 3 boundaries of 8"),
    ({"facts": {"target_dtype": "float16"}}, "the target is served in float16, and float32 is what was trained for"),
    (
        {"beside": {"prompt": {"rows": 100, "wrong_tokens": 7, "shifts": {"0": 100}}}},
        "tokens are shifted: on 7 of 100 prompt rows",
    ),
    (
        {"beside": {"verify": {"rows": 40, "wrong_tokens": 0, "shifts": {"0": 9, "1": 29, "2": 2}}}},
        "positions are shifted: on 31 of 40 verify rows RoPE has not position q for slot q, but mostly q+1",
    ),
    (
        {"beside": {"draft": {"rows": 60, "wrong_tokens": 0, "shifts": {"-1": 60}}}},
        "positions are shifted: on 60 of 60 draft rows RoPE has not position q for slot q, but mostly q-1",
    ),
    (
        {"sample_faults": [{"id": "a", "kind": "the loss mask is shifted", "words": "it begins at 5"}]},
        "the loss mask is shifted: it begins at 5 (sample a; 1 of 4 samples)",
    ),
    ({"matrix": [[0.8, 2e-7, 0.9], [2e-7, 0.9, 1.4], [1.2, 0.7, 2e-7]]}, "2 lies where 15 is said to, 15 lies where 2"),
    (
        {"matrix": [[1.0, 0.9, 1.4], [0.8, 1.0, 0.9], [1.2, 0.7, 1.0]], "shifts": {"0": 1.0, "1": 3e-7}},
        "the state of token q lies in row q+1",
    ),
    ({"matrix": [[1.2, 1.1, 1.4], [0.8, 1.3, 0.9], [1.2, 0.7, 1.5]]}, "boundary 2 are no states of this target there"),
    ({"matrix": [[0.1, 0.2, 1.4], [0.8, 0.1, 0.9], [1.2, 0.7, 0.1]]}, "that of the next boundary 0.2"),
    (
        {"errors": {"prompt": {"median": [2e-7, 4e-6, 2e-7], "p95": [8e-7] * 3}}},
        "15 of prompt rows by 4e-06 (median), 4.0 times the noise of 1e-06 in float32; settings that differ: none",
    ),
    (
        {"errors": {"verify": {"median": [2e-7] * 3, "p95": [8e-7, 8e-7, 5e-6]}}, "settings": {"tp_size": [1, 2]}},
        "27 of verify rows by 5e-06 (p95), 5.0 times the noise of 1e-06 in float32; settings that differ: {'tp_size'",
    ),
    ({"last_hidden": {"logprob_error": 0.4, "logprob_error_normed": 1e-6}}, "lack the target's final norm"),
    ({"last_hidden": {"logprob_error": 0.4}}, "training targets are not the target's"),
    ({"drafts": {"same": 0.5}}, "of 90 served drafts 50.0% are those of the trained drafter"),
    ({"drafts": {"logits": [1e-6, 0.02, 0.01]}}, "the draft logits of step 1 are 0.02 away"),
    ({"drafts": {"logits": [nan]}}, "the draft logits of step 0 are nan away"),
    ({"width": 16}, "the drafter gets 16 numbers a token, not 3 boundaries of 8"),
    ({"matrix": [[nan] * 3] * 3, "shifts": dict.fromkeys(("-1", "0", "1"), nan)}, "are no states of this target there"),
    (
        {"errors": {"verify": {"median": [2e-7] * 3, "p95": [nan, 8e-7, 8e-7]}}},
        "boundary 2 of verify rows by nan (p95)",
    ),
    ({"last_hidden": {"logprob_error": nan, "logprob_error_normed": nan}}, "training targets are not the target's"),
    (
        {"by_sample": [{"id": "a", "error": 2e-7}, {"id": "b", "error": 1.3}, {"id": "c", "error": 4e-6}]},
        "in 2 of 4 samples: the features of sample b by 1.3 (median of its rows), where the noise is 1e-06 (p95)",
    ),
    ({"by_sample": [{"id": "a", "error": nan}]}, "in 1 of 4 samples: the features of sample a by nan"),
    ({"rows": {"prompt": 100, "verify": 0}}, "nothing was compared of the states of verify steps: no proof"),
    ({"rows": {"prompt": 0}}, "nothing was compared of the states of prompts: no proof"),
    ({"last_hidden": None}, "nothing was compared of the last hidden states: no proof"),
    ({"drafts": {"same": None, "logits": []}}, "nothing was compared of the drafts: no proof"),
]


@pytest.mark.parametrize(("changes", "words"), CASES)
def test_every_cause_is_named_and_no_other(changes: dict[str, Any], words: str) -> None:
    causes = judge(changed(**changes))
    assert len(causes) == 1
    assert words in causes[0]
    assert (
        judge(json.loads(json.dumps(without_nan(changed(**changes)), allow_nan=False))) == causes
    )  # as the store keeps it


def test_noise_that_was_measured_is_forgiven_three_times_over() -> None:
    noisy = changed(errors={"prompt": {"median": [2e-5] * 3, "p95": [5e-5] * 3}})
    assert len(judge(noisy)) == 1
    noisy["floor"]["prompt"] = {"median": [1e-5] * 3, "p95": [2e-5] * 3}
    assert judge(noisy) == []
    noisy["floor"]["prompt"]["p95"] = [1e-5] * 3
    assert "5.0 times the noise of 1e-05" in judge(noisy)[0]


def test_verify_steps_have_the_noise_of_chunks_and_their_own() -> None:
    noisy = changed(errors={"verify": {"median": [5e-6] * 3, "p95": [8e-6] * 3}})
    assert "of verify rows" in judge(noisy)[0]
    noisy["floor"]["prompt"] = {"median": [2e-6] * 3, "p95": [3e-6] * 3}
    assert judge(noisy) == []
    noisy["floor"] = {"prompt": {}, "verify": {"median": [2e-6] * 3, "p95": [3e-6] * 3}}
    assert judge(noisy) == []


@pytest.mark.parametrize("drafts", [{"same": None}, {"logits": []}])
def test_trees_have_no_same_drafts_and_graphs_may_have_no_logits(drafts: dict[str, Any]) -> None:
    assert judge(changed(drafts=drafts)) == []


def test_an_engine_that_failed_leaves_what_is_known_without_it() -> None:
    causes = judge({"failed": "the scheduler died", "drafter_faults": ["d2t is wrong"]})
    assert causes == ["d2t is wrong", "the serving engine failed: the scheduler died"]


def test_errors_are_relative_to_the_trained_row() -> None:
    trained = torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]])  # [2, 1, 2]
    served = torch.tensor([[[3.0, 3.0]], [[0.0, 2.0]]])
    assert relative_errors(served, trained).tolist() == [[pytest.approx(0.2)], [0.0]]
    assert spread(torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])) == {
        "median": [1.0, 1.0],
        "p95": [pytest.approx(1.9), 1.0],
    }
    assert spread(torch.empty(0, 2)) == {}


def test_the_matrix_has_served_rows_and_trained_columns() -> None:
    trained = torch.tensor([1.0, 2.0]).view(1, 2, 1).expand(5, 2, 1)  # boundaries of 1 and of 2
    served = torch.tensor([2.0, 4.0]).view(1, 2, 1).expand(5, 2, 1)
    assert matrix(served, trained) == [[1.0, 0.0], [3.0, 1.0]]


def test_a_shift_is_told_with_its_sign() -> None:
    served = torch.arange(1.0, 9.0).view(8, 1, 1)
    trained = served.roll(1, dims=0)  # the state of token q lies in row q + 1
    found = shifted(served, trained)
    assert found[1] == 0.0
    assert min(found[0], found[-1]) > 0.1


def test_what_is_stored_in_bfloat16_may_be_as_far_off_as_that() -> None:
    rough = changed(last_hidden={"logprob_error": 0.02})
    assert "training targets are not the target's" in judge(rough)[0]
    for precision in ("bfloat16", "float8_e4m3"):
        assert judge({**rough, "precision": precision}) == []
