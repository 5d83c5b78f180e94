"""What the commands say at the end and exit with, from summaries alone: no stage runs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3_ray.engines.base import EngineError
from ray_jobs import evaluate as evaluate_job
from ray_jobs import pipeline


def evaluated(**told: Any) -> dict[str, Any]:
    suite = {"accept_length": 1.5, "turns_asked": 160, "turns_answered": 160}
    return {
        "accept_length": 1.5,
        "verify_steps": 60,
        "by_suite": {"mt_bench": suite},
        "by_drafter": [{"drafter": "own", "accept_length": 1.5, "faults": []}],
        "failed": [],
        "refused": [],
        "simulated": {"answers": {"accept_length": 1.4972, "served_minus_simulated": 0.0028}, "heldout": None},
        "not_simulated": {"heldout": "evaluate.num_steps is 5"},
        "identical_share": 1.0,
        "first_divergence": None,
        "disagreement": None,
        **told,
    }


def test_what_was_served_is_told_beside_what_it_must_agree_with(capsys: pytest.CaptureFixture[str]) -> None:
    evaluate_job.say(evaluated())
    told = capsys.readouterr().out
    assert "simulated (answers): accept length 1.4972; served minus simulated +0.0028" in told
    assert "simulated (heldout): not compared, since evaluate.num_steps is 5" in told
    assert "identical to the target's own greedy answers: 100.00%" in told
    assert "turns" not in told and "refused" not in told and "part at" not in told


def test_what_is_missing_or_differs_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"drafter": "own"}, {"drafter": "s3://b/c", "accept_length": None, "faults": ["it failed"]}]
    found = evaluated(
        by_suite={"mt_bench": {"accept_length": 1.5, "turns_asked": 160, "turns_answered": 153}},
        by_drafter=rows,
        failed=["s3://b/c"],
        refused=[{"id": "x", "reason": "too long"}],
        identical_share=0.75,
        first_divergence={"10%": 3, "50%": 12, "90%": 40},
        disagreement="greedy answers in float32 are not those",
    )
    evaluate_job.say(found)
    told = capsys.readouterr().out
    assert "only 153 of 160 turns were answered" in told
    assert "1 conversations were refused, the first for: too long" in told
    assert "s3://b/c: it failed; run again to retry" in told
    assert "75.00% of the conversations" in told
    assert "the others part at generated token 3 (10%), 12 (50%), 40 (90%)" in told
    assert told.splitlines()[-1] == "  greedy answers in float32 are not those"
    evaluate_job.say(evaluated(identical_share=None))  # sampled, or no target alone
    assert "identical" not in capsys.readouterr().out


@pytest.mark.parametrize(("disagreement", "code"), [(None, False), ("greedy answers in float32 are not those", True)])
def test_float32_answers_that_differ_end_the_evaluation_with_one(
    monkeypatch: pytest.MonkeyPatch, disagreement: str | None, code: bool
) -> None:
    written = []
    for name in ("prepare", "heldout", "exported"):
        monkeypatch.setattr(evaluate_job, name, lambda *_: SimpleNamespace(fingerprint="f"))
    monkeypatch.setattr(evaluate_job, "cluster", lambda _: nullcontext())
    monkeypatch.setattr(evaluate_job, "evaluate", lambda *_: evaluated(disagreement=disagreement))
    monkeypatch.setattr(evaluate_job, "publish_card", lambda *_: written.append("card"))
    with pytest.raises(SystemExit) as ended:
        evaluate_job.main(a_run())
    assert (ended.value.code, written) == (code, ["card"])  # sys.exit(True) is exit code 1


def a_run() -> Any:
    engine, drafter = SimpleNamespace(name="sglang"), SimpleNamespace(path=None)
    config = SimpleNamespace(engine=engine, drafter=drafter, prompts=None, cluster=None, train=None)
    config.verify, config.features = SimpleNamespace(samples=2), SimpleNamespace(folder=None)
    return SimpleNamespace(config=config, features=lambda _: ("features", {}), drafter=lambda _: "drafters/d")


def piped(monkeypatch: pytest.MonkeyPatch, verdict: str, **told: Any) -> None:
    """The pipeline with every stage made up."""
    for name in ("prepare", "heldout", "extract", "train_drafter", "export", "publish_card", "report"):
        monkeypatch.setattr(pipeline, name, lambda *_: None)
    monkeypatch.setattr(pipeline, "watching", lambda *_: lambda *_: None)
    features = SimpleNamespace(description=lambda: {})
    causes = [] if verdict == "aligned" else ["layer ids are off by one"]
    monkeypatch.setattr(pipeline, "cluster", lambda _: nullcontext())
    monkeypatch.setattr(pipeline, "extracted", lambda *_: (features, {}))
    monkeypatch.setattr(pipeline, "evaluate", lambda *_: evaluated(**told))
    monkeypatch.setattr(pipeline, "verify", lambda *_: {"verdict": verdict, "causes": causes})
    paths = {"accept_length": 1.5, "drafter_path": "d", "report_path": "r"}
    monkeypatch.setattr(pipeline, "summarise", lambda *_: paths)


@pytest.mark.parametrize(
    ("verdict", "disagreement", "code"),
    [("aligned", None, False), ("misaligned", None, True), ("aligned", "in float32", True)],
)
def test_the_pipeline_ends_with_one_where_the_proof_or_the_answers_fail(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verdict: str,
    disagreement: str | None,
    code: bool,
) -> None:
    piped(monkeypatch, verdict, disagreement=disagreement)
    with pytest.raises(SystemExit) as ended:
        pipeline.main(a_run())
    told = capsys.readouterr().out
    assert ended.value.code == code
    assert f"verify: {verdict}" in told and "served minus simulated +0.0028" in told
    assert "accept length  1.5\n" in told


def test_a_report_that_fails_does_not_hide_the_causes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, "misaligned")

    def fails(*_: Any) -> None:
        raise RuntimeError("a page that cannot be written")

    monkeypatch.setattr(pipeline, "report", fails)
    with pytest.raises(RuntimeError, match="a page"):
        pipeline.main(a_run())
    assert "verify: misaligned\n  layer ids are off by one" in capsys.readouterr().out


def test_a_drafter_that_cannot_be_served_is_verified_none_the_less(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, "misaligned")

    def dies(*_: Any) -> None:
        raise EngineError("the engine did not start")

    monkeypatch.setattr(pipeline, "evaluate", dies)
    with pytest.raises(EngineError, match="did not start"):
        pipeline.main(a_run())
    assert "verify: misaligned\n  layer ids are off by one" in capsys.readouterr().out
