"""The report page, from a summary alone."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eagle3_ray.acceptance import SPEED
from eagle3_ray.config import EvaluateConfig
from eagle3_ray.report import report
from eagle3_ray.store.filesystem import Filesystem


def walked(accept_length: float) -> dict[str, Any]:
    return {"completion_tokens": 90, "verify_steps": 60, "accept_length": accept_length, "never_right": 1.03}


def evaluation() -> dict[str, Any]:
    """Of a CPU, without the target alone."""
    row = {"conversations": 7, "completion_tokens": 90, "accept_length": 1.5, "accept_length_ci95": [1.4, 1.61]}
    row |= {
        "turns_asked": 12,
        "turns_answered": 12,
        "tokens_per_verify_step": 1.25,
        "distinct_bigram_share": 0.876,
        "looping_answers": 0,
    }
    chosen = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
    speed: dict[str, Any] = dict.fromkeys(SPEED)
    return {
        **row,
        **speed,
        "accept_length_by_step": [0.5],
        "greedy_identical": None,
        "by_domain": {"code": row, "chat": row | {"distinct_bigram_share": None, "accept_length_ci95": None}},
        "by_suite": {"heldout": row | {"identical_share": None}},
        "by_drafter": [{**row, **speed, "drafter": "d", "faults": [], "identical_share": None}],
        "best_drafter": {"drafter": "d", "by": "accept_length"},
        "by_drafting": [{**row, **speed, **chosen, "identical_share": None}],
        "best_drafting": {**chosen, "by": "accept_length"},
        "simulated": {"heldout": None, "answers": None},
        "not_simulated": {"heldout": "no sample was held out", "answers": "evaluate.simulate is false"},
        "disagreement": None,
    }


def page(
    tmp_path: Path, heldout: int, settings: dict[str, Any] | None = None, skipped: list[int] | None = None, **told: Any
) -> str:
    """The report's text, without tags and line breaks."""
    training = {
        "steps": 40,
        "skipped": skipped or [],
        "draft_vocab_size": 8192,
        "coverage": 0.98765,
        "coverage_by_domain": {"code": 0.9912, "maths": 0.5},
        "heldout": {"samples": heldout, "draft_steps": 3, "before": walked(1.1), "after": walked(1.5)},
    }
    empty = {"seconds": {}, "versions": {}, "boundaries": [2, 4], "layer_ids": [1, 3]}
    numbers = dict.fromkeys(
        ["completion_tokens", "verify_steps", "heldout", "samples", "prompts", "tokens_captured", "tokens_generated"], 7
    )
    paths = {"drafter": "drafters/d", "drafter_path": "d", "features_path": "f", "bytes_stored": 10}
    summary = {"run": "r", "target": "t", **evaluation()}
    files, evaluate = Filesystem(str(tmp_path)), EvaluateConfig(source="x", **(settings or {}))
    run: Any = SimpleNamespace(files=files, config=SimpleNamespace(run="r", evaluate=evaluate))
    report(run, {**summary, **empty, **numbers, **paths, "training": training, "verification": None, **told})
    return " ".join(re.sub(r"<[^>]+>", " ", files.read("runs/r/report.html").decode()).split())


def test_the_vocabulary_is_told_by_domain_and_the_accept_length_before_and_after(tmp_path: Path):
    told = page(tmp_path, heldout=16)
    assert "8192 tokens, 98.77% of what the target said (code 99.12%, maths 50.00%)" in told
    assert "over 16 samples that were not trained on: accept length 1.100 before the first step, 1.500 after" in told
    assert "not trained on" not in page(tmp_path, heldout=0)


def test_the_matrix_and_the_causes_are_told(tmp_path: Path):
    assert "Not verified: verify.samples is 0." in page(tmp_path, heldout=0)
    spread = {"median": [1e-7, 2e-7], "p95": [3e-7, 4e-7]}
    found = {
        "verdict": "misaligned",
        "causes": ["layer ids are off by one"],
        "warnings": ["embed_tokens.weight is odd"],
        "matrix": [[0.5, 1.25], [2e-7, 0.75]],
        "trained": [2, 4],
        "facts": {"layers_to_capture": [3, 5]},
        "rows": {"prompt": 99, "verify": 0},
        "samples": 4,
        "errors": {"prompt": spread, "verify": {}},
        "floor": {"prompt": spread, "verify": {}},
    }
    told = page(tmp_path, heldout=0, verification=found)
    assert "misaligned layer ids are off by one warning: embed_tokens.weight is odd" in told
    assert "served boundary trained 2 trained 4 3 0.5 1.2 5 2e-07 0.75" in told
    assert "prompts 99 2e-07 4e-07 2e-07 4e-07" in told
    assert "verify steps" not in told.split("states of")[1].split("Training")[0]
    found |= {"matrix": [[None, 1.25], [2e-7, None]], "floor": {"prompt": spread | {"p95": [None, 1e-7]}, "verify": {}}}
    told = page(tmp_path, heldout=0, verification=found)
    assert "3 no number 1.2 5 2e-07 no number" in told
    assert "prompts 99 2e-07 4e-07 2e-07 no number" in told


def test_skipped_steps_are_told(tmp_path: Path):
    assert "Skipped:" not in page(tmp_path, heldout=0)
    assert "Skipped: 2 of 40 steps made no update" in (told := page(tmp_path, heldout=0, skipped=[7, 9]))
    assert "the first is step 7" in told and "drafters/d/nonfinite" in told


def test_a_verification_without_a_matrix_is_told(tmp_path: Path):
    """Of a drafter served without its states (EAGLE), and of one whose engine failed: `verify` leaves them so."""
    narrow = {
        "verdict": "misaligned",
        "causes": ["the algorithm in force is EAGLE"],
        "samples": 2,
        "trained": [2, 4],
        "facts": {"layers_to_capture": []},
        "warnings": [],
        "rows": {"prompt": 10, "verify": 0},
        "width": 64,
    }
    failed = {"verdict": "misaligned", "causes": ["the serving engine failed"], "failed": "no", "drafter_faults": []}
    for found in (narrow, failed):
        told = page(tmp_path, heldout=0, verification=found)
        assert f"misaligned {found['causes'][0]}" in told  # type: ignore[index]
        assert "served boundary" not in told and "states of" not in told


def test_the_evaluation_is_told_with_its_interval_and_by_domain(tmp_path: Path):
    told = page(tmp_path, heldout=16)
    assert "between 1.400 and 1.610 with 95% confidence" in told
    assert "A verify step gave 1.250 tokens." in told
    assert "code 7 12 of 12 90 1.500 1.40 to 1.61 1.250 88% 0" in told
    assert "chat 7 12 of 12 90 1.500 – – 1.250 – 0".replace("– – ", "– ") in told
    assert "Speed is not told of a CPU" in told
    assert "as the target answered them alone: not compared, since evaluate.simulate is false." in told
    assert "which are other prompts: not compared, since no sample was held out." in told
    for missing in (
        "Loops:",
        "Chains and trees",
        "By suite",
        "Drafters side by side",
        "Turns without",
        "must not differ",
    ):
        assert missing not in told


def test_turns_without_an_answer_are_warned_of(tmp_path: Path):
    told = page(tmp_path, heldout=16, turns_answered=11)
    assert "Turns without an answer: of 12 that these conversations ask, 11 were answered" in told


def test_float32_answers_that_differ_are_warned_of(tmp_path: Path):
    differing = {"greedy_identical": False, "identical_share": 0.75, "first_divergence": None, "disagreement": "1 of 4"}
    assert "are the same. In float32 they must not differ: 1 of 4." in page(tmp_path, heldout=16, **differing)


def test_loops_are_warned_of(tmp_path: Path):
    assert "Loops: in 2 answers" in page(tmp_path, heldout=16, looping_answers=2)


def test_speed_agreement_drafting_and_simulation_are_told(tmp_path: Path):
    speed = {"output_tokens_per_s": 210.5, "output_tokens_per_s_plain": 100.0, "speedup": 2.11}
    (chain,) = evaluation()["by_drafting"]
    best = {"num_steps": 5, "topk": 4, "num_draft_tokens": 16}
    tree = chain | speed | best | {"accept_length": 1.75, "identical_share": 0.75}
    differing: dict[str, Any] = {"greedy_identical": False, "identical_share": 0.75}
    differing["first_divergence"] = {"10%": 3, "50%": 12, "90%": 40}
    walks = {
        "heldout": {"accept_length": 1.4, "served_minus_simulated": 0.1},
        "answers": {"accept_length": 1.512, "served_minus_simulated": -0.012},
    }
    several = {"by_drafting": [chain, tree], "best_drafting": best | {"by": "output_tokens_per_s"}, "simulated": walks}
    told = page(tmp_path, heldout=16, **speed, **differing, **several)
    captured = {"output_tokens_per_s": 210.5}
    assert "not measured without speculation." in page(tmp_path, heldout=16, **captured)
    assert "not measured without speculation, since that engine also captured its answers" in page(
        tmp_path, heldout=16, settings={"simulate": True}, **captured
    )
    assert "210.5 output tokens a second, 100.0 without speculation, 2.11 times as many" in told
    assert "75.0% of the conversations are the same; the others first differ at generated token 12" in told
    assert "5 4 16 1.750 1.40 to 1.61 210.5 2.11 75.0%" in told
    assert "Best by output tokens a second: 5 steps, top-k 4, 16 tokens" in told
    assert "as the target answered them alone: accept length 1.512; served minus simulated -0.012" in told
    assert "which are other prompts: accept length 1.400; served minus simulated +0.100" in told


def test_suites_and_drafters_are_told_side_by_side(tmp_path: Path):
    (one,) = evaluation()["by_suite"].values()
    (own,) = evaluation()["by_drafter"]
    suites = {"gsm8k": one | {"identical_share": 0.975}, "mine": one | {"accept_length": 1.25}}
    other = own | {"drafter": "s3://b/other", "accept_length": 1.75, "identical_share": 0.5, "faults": ["d2t is odd"]}
    several = {"by_suite": suites, "by_drafter": [own, other], "best_drafter": {**other, "by": "accept_length"}}
    told = page(tmp_path, heldout=16, **several)
    assert "By suite suite conversations" in told
    assert "gsm8k 7 12 of 12 90 1.500 1.40 to 1.61 1.250 88% 0 97.5%" in told
    assert "mine 7 12 of 12 90 1.250 1.40 to 1.61 1.250 88% 0 –" in told
    assert "s3://b/other d2t is odd 1.750 1.40 to 1.61 – – 50.0%" in told
    assert "Best by accept length: s3://b/other ." in told
