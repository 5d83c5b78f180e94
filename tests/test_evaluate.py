"""The figures of an evaluation, from counts worked out by hand, and its settings' part in them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import compose
from test_cli import command

from eagle3_ray import evaluate as evaluation
from eagle3_ray.acceptance import agreement, different, distinct_bigrams, interval, measure
from eagle3_ray.config import (
    DrafterConfig,
    Drafting,
    EngineConfig,
    EvaluateConfig,
    SamplingConfig,
)
from eagle3_ray.drafter.checkpoint import export
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.drafter.target import initialise, load_pieces
from eagle3_ray.engines.base import Answered, Captured, Response, answer
from eagle3_ray.evaluate import _captured, _row
from eagle3_ray.figures import COMPARED, summarised
from eagle3_ray.prepare import Prompt
from eagle3_ray.run import open_run


def row(
    name: str, histogram: list[int], tokens: int, steps: int, *answers: list[int], suite: str = "heldout"
) -> dict[str, Any]:
    return {
        "id": name, "domain": "d", "suite": suite, "histogram": histogram, "completion_tokens": tokens,
        "verify_steps": steps, "answers": list(answers), "turns": len(answers),
    }  # fmt: skip


# ---------------------------------------------------------------- arithmetic


def test_accept_length_is_completion_tokens_over_verify_steps_of_all_answers_together() -> None:
    # 10 steps: 5 accept nothing, 3 one draft, 0 two, 2 three; of them 5 pass position 1, 2 of those 5 position 2.
    # Three answers, whose first tokens took no step: 21 - 3 tokens in 10 steps.
    # Bigrams: 12 23 31 12 23, three of five; 44 44 44, one of three; none in an answer of one token.
    rows = [row("a", [4, 2, 0, 1], 13, 7, [1, 2, 3, 1, 2, 3], [9]), row("b", [1, 1, 0, 1], 8, 3, [4, 4, 4, 4])]
    figures = measure(rows, 3)
    assert figures.pop("accept_length_ci95") == [pytest.approx(13 / 7, abs=1e-4), pytest.approx(8 / 3, abs=1e-4)]
    assert figures == {
        "conversations": 2,
        "turns_asked": 3,
        "turns_answered": 3,
        "completion_tokens": 21,
        "verify_steps": 10,
        "accept_length": 2.1,
        "tokens_per_verify_step": 1.8,
        "accept_length_by_step": [0.5, 0.4, 1.0],
        "distinct_bigram_share": round((3 / 5 + 1 / 3) / 2, 4),
        "looping_answers": 1,
    }


def test_what_was_never_reached_has_no_figure() -> None:
    assert measure([row("a", [6], 7, 6)], 2)["accept_length_by_step"] == [0.0, None]
    nothing = measure([], 2)
    assert {name for name, value in nothing.items() if value is None} == {
        "accept_length", "accept_length_ci95", "tokens_per_verify_step", "distinct_bigram_share",
    }  # fmt: skip


def test_a_loop_has_few_distinct_bigrams() -> None:
    assert distinct_bigrams(list(range(100))) == 1.0
    assert distinct_bigrams([1, 2] * 50) == 2 / 99
    assert distinct_bigrams([1]) is None


def test_the_interval_is_that_of_the_conversations() -> None:
    assert interval([row("a", [], 10, 10)]) is None
    assert interval([row(str(i), [], 6, 4) for i in range(9)]) == [1.5, 1.5]
    # Of two conversations a quarter of the draws has twice the first, a quarter twice the second
    assert interval([row("a", [], 10, 10), row("b", [], 30, 10)]) == [1.0, 3.0]
    # With equal steps it is the interval of a mean: 1.5 +- 1.96 * 0.5 / sqrt(400), to two digits
    low, high = interval([row(str(i), [], 10 + 10 * (i % 2), 10) for i in range(400)])
    assert (low, high) == (pytest.approx(1.5 - 0.049, abs=0.006), pytest.approx(1.5 + 0.049, abs=0.006))
    # A long conversation counts as much as it has steps: not the mean of 2.0 and 1.0
    low, high = interval([row("a", [], 2, 1), *(row(str(i), [], 100, 100) for i in range(50))])
    assert high < 1.01


def test_the_turns_of_a_conversation_are_added_up() -> None:
    responses = [
        Response([1, 2, 3], "stop", {"spec_verify_ct": 2, "spec_correct_drafts_histogram": [1, 1]}),
        Response([4, 5], "length", {"spec_verify_ct": 1, "spec_correct_drafts_histogram": [0, 0, 1]}),
    ]
    mask = [False, True, True, True, False, True, True]
    answered = Answered([9, 1, 2, 3, 9, 4, 5], mask, ["stop", "length"], responses)
    got = _row(Prompt("p", "d", [[9]]), answered)
    assert (got["completion_tokens"], got["verify_steps"], got["histogram"]) == (5, 3, [1, 1, 1])
    assert got["answers"] == [[1, 2, 3], [4, 5]]


def test_a_turn_without_an_answer_is_counted_as_asked() -> None:
    class Engine:
        def generate(self, prompts: list[list[int]], sampling: SamplingConfig) -> list[Response]:
            return [Response([7] * 4, "length") for _ in prompts]

    engine: Any = Engine()
    prompts = [Prompt("long", "d", [[1] * 5, [2] * 6, [3]]), Prompt("short", "d", [[1], [2]])]
    asked = SamplingConfig(max_new_tokens=4)
    rows = [_row(prompt, answer(engine, prompt.segments, asked, context_length=14)) for prompt in prompts]
    assert [(row["turns"], len(row["answers"])) for row in rows] == [(3, 1), (2, 2)]  # 5 + 4 + 6 + 4 are more than 14
    figures = measure(rows, 3)
    assert (figures["turns_asked"], figures["turns_answered"]) == (5, 3)


def test_different_answers_are_found_with_their_first_different_token() -> None:
    one = [row("a", [], 0, 0, [1], [2, 3]), row("b", [], 0, 0, [1, 2])]
    other = [row("a", [], 0, 0, [1], [2, 4]), row("b", [], 0, 0, [1, 2, 3])]
    assert different(one, one) == []
    assert different(one, one[:1]) == [{"id": "b", "first_different_token": 0}]
    assert different(one, other) == [
        {"id": "a", "first_different_token": 2},
        {"id": "b", "first_different_token": 2},
    ]


def test_agreement_is_a_share_and_where_the_others_part() -> None:
    same = [row(f"s{i}", [], 0, 0, [1, 2]) for i in range(5)]
    plain = [row(f"d{i}", [], 0, 0, [7] * 20) for i in range(4)]
    parted = [row(f"d{i}", [], 0, 0, [7] * at + [8] * (20 - at)) for i, at in enumerate((0, 3, 5, 11))]
    assert agreement(same, same)["greedy_identical"] is True
    assert (agreement(same, same)["identical_share"], agreement(same, same)["first_divergence"]) == (1.0, None)
    found = agreement(same + parted, same + plain + [row("unanswered", [], 0, 0, [1])])
    assert (found["greedy_identical"], found["identical_share"], len(found["different_answers"])) == (False, 0.5, 5)
    assert found["first_divergence"] == {"10%": 0, "50%": 3, "90%": 5}  # of 0, 3, 5, 11: what was not answered is none


# ---------------------------------------------------------------- the summary


def served(*rows: dict[str, Any], seconds: float, walked: dict[str, Any] | None = None) -> dict[str, Any]:
    engine = {"engine": "sglang"}
    return {
        "answers": list(rows), "seconds": seconds, "walked": walked, "refused": [], "engine": engine, "faults": []
    }  # fmt: skip


def figures(
    tmp_path: Path,
    device: str = "cuda",
    differing: bool = False,
    rivals: dict[str, Any] | None = None,
    dtype: str = "bfloat16",
    trained_at: float = 0.0,
    path: str | None = None,
    heldout: int = 4,
    **settings: Any,
) -> dict[str, Any]:
    """The summary of two draftings, of another drafter and of the target alone, with counts made up."""
    training = {
        "heldout": {"samples": heldout, "draft_steps": 3, "after": {"accept_length": 1.9, "completion_tokens": 40}}
    }
    run: Any = SimpleNamespace(
        read_json=lambda key: training if key == "d/summary.json" else None,
        files=SimpleNamespace(url=lambda key: f"/store/{key}"),
        config=SimpleNamespace(
            evaluate=EvaluateConfig(source="x", **settings),
            hardware=SimpleNamespace(device=device),
            drafter=DrafterConfig(path=path),
            engine=EngineConfig(dtype=dtype),
            sampling=SamplingConfig(temperature=trained_at),
        ),
    )
    chain = served(
        row("a", [1, 1], 20, 10, [1, 2, 3], suite="maths"), row("b", [1], 22, 10, [4, 5], suite="code"), seconds=2.0
    )
    tree = served(row("a", [1, 1], 20, 9, [1, 2, 3]), row("b", [1], 22, 9, [4, 6]), seconds=3.0)
    plain = served(
        row("a", [], 20, 0, [1, 2, 3], suite="maths"),
        row("b", [], 22, 0, [4, 7] if differing else [4, 5], suite="code"),
        seconds=4.2,
        walked={"accept_length": 2.105},
    )
    other = served(row("a", [1, 1], 20, 8, [1, 2, 3]), row("b", [1], 22, 8, [4, 6]), seconds=2.1)
    rivals = {"s3://b/other": other | {"faults": ["d2t is odd"]}, **(rivals or {})}
    return summarised(run, "d", {Drafting(3, 1, 4): chain, Drafting(3, 2, 8): tree}, plain, rivals)


def test_speed_is_tokens_over_seconds_and_names_the_best_drafting(tmp_path: Path) -> None:
    summary = figures(tmp_path)
    assert (summary["output_tokens_per_s"], summary["output_tokens_per_s_plain"]) == (21.0, 10.0)
    assert summary["speedup"] == 2.1
    assert [line["speedup"] for line in summary["by_drafting"]] == [2.1, 1.4]
    assert [line["accept_length"] for line in summary["by_drafting"]] == [2.1, 2.3333]
    assert [line["identical_share"] for line in summary["by_drafting"]] == [1.0, 0.5]
    best = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4, "by": "output_tokens_per_s"}
    assert summary["best_drafting"] == best


def test_drafters_stand_side_by_side_and_the_best_is_named(tmp_path: Path) -> None:
    summary = figures(tmp_path)
    own, other = summary["by_drafter"]
    assert (own["drafter"], own["accept_length"], own["speedup"], own["faults"]) == ("/store/d/export", 2.1, 2.1, [])
    assert (other["drafter"], other["accept_length"], other["speedup"]) == ("s3://b/other", 2.625, 2.0)
    assert (own["identical_share"], other["identical_share"], other["faults"]) == (1.0, 0.5, ["d2t is odd"])
    assert summary["best_drafter"] == {"drafter": "/store/d/export", "by": "output_tokens_per_s"}
    assert figures(tmp_path, device="cpu")["best_drafter"] == {"drafter": "s3://b/other", "by": "accept_length"}


def test_one_that_sglang_does_not_serve_costs_the_others_nothing(tmp_path: Path) -> None:
    failed = {"s3://b/broken": {"failed": "the serving engine failed: no"}}
    own, other, broken = figures(tmp_path, rivals=failed)["by_drafter"]
    assert (own["accept_length"], other["accept_length"]) == (2.1, 2.625)
    assert (broken["drafter"], broken["faults"]) == ("s3://b/broken", ["the serving engine failed: no"])
    assert {broken[name] for name in COMPARED} == {None}
    assert figures(tmp_path, rivals=failed)["failed"] == ["s3://b/broken"]
    assert figures(tmp_path)["failed"] == []


def test_no_suite_vanishes_in_silence() -> None:
    run: Any = SimpleNamespace(config=compose("evaluate=file", "+evaluate.suites={a: {source: a}, b: {source: b}}"))
    run.config.evaluate.source = None
    answers = [{"suite": suite} for suite in "a" * 3 + "b" * 97]
    evaluation._check_refused(run, {"answers": answers, "refused": [{"suite": "b", "id": "x", "reason": "long"}]})
    with pytest.raises(evaluation.EvaluateError, match="1 of 4 conversations of a were refused"):
        evaluation._check_refused(run, {"answers": answers, "refused": [{"suite": "a", "id": "x", "reason": "long"}]})
    with pytest.raises(evaluation.EvaluateError, match="0 of 0 conversations of b"):
        evaluation._check_refused(run, {"answers": answers[:3], "refused": []})


def test_each_suite_has_its_figures(tmp_path: Path) -> None:
    by_suite = figures(tmp_path, differing=True)["by_suite"]
    assert list(by_suite) == ["maths", "code"]
    assert [row["accept_length"] for row in by_suite.values()] == [2.0, 2.2]
    assert [row["tokens_per_verify_step"] for row in by_suite.values()] == [1.9, 2.1]
    assert [row["identical_share"] for row in by_suite.values()] == [1.0, 0.0]
    assert [row["distinct_bigram_share"] for row in by_suite.values()] == [1.0, 1.0]
    alone = figures(tmp_path, temperature=0.5)["by_suite"]
    assert [row["identical_share"] for row in alone.values()] == [None, None]


def test_speed_is_never_told_of_a_cpu(tmp_path: Path) -> None:
    summary = figures(tmp_path, device="cpu")
    for told in (summary, *summary["by_drafting"]):
        assert (told["output_tokens_per_s"], told["output_tokens_per_s_plain"], told["speedup"]) == (None, None, None)
    best = {"num_steps": 3, "topk": 2, "num_draft_tokens": 8, "by": "accept_length"}
    assert summary["best_drafting"] == best


def test_an_engine_that_also_captures_is_no_measure_of_speed(tmp_path: Path) -> None:
    summary = figures(tmp_path, simulate=True)
    assert (summary["output_tokens_per_s"], summary["output_tokens_per_s_plain"], summary["speedup"]) == (
        21,
        None,
        None,
    )


def test_the_simulated_accept_lengths_stand_beside_the_served_one(tmp_path: Path) -> None:
    summary = figures(tmp_path, simulate=True)
    assert summary["simulated"]["heldout"]["served_minus_simulated"] == pytest.approx(0.2)
    assert summary["simulated"]["answers"]["served_minus_simulated"] == pytest.approx(-0.005)
    assert summary["not_simulated"] == {}


@pytest.mark.parametrize(
    ("settings", "missing", "reason"),
    [
        ({}, "answers", "evaluate.simulate is false, which leaves"),
        ({"device": "cpu"}, "answers", "evaluate.simulate is false"),
        ({"path": "/theirs"}, "heldout", "drafter.path"),
        ({"heldout": 0}, "heldout", "train.heldout"),
        ({"temperature": 0.7}, "heldout", "evaluate.temperature is 0.7"),
        ({"trained_at": 0.6}, "heldout", "sampling.temperature is 0.6"),
    ],
)
def test_where_nothing_simulated_can_be_compared_it_is_said_why(
    tmp_path: Path, settings: dict[str, Any], missing: str, reason: str
) -> None:
    summary = figures(tmp_path, **settings)
    assert summary["simulated"][missing] is None
    assert reason in summary["not_simulated"][missing]


def test_trainings_walk_is_compared_only_with_a_drafting_like_its_own(tmp_path: Path) -> None:
    training = {"samples": 4, "draft_steps": 3, "after": {"accept_length": 1.9}}
    one = served(row("a", [1, 1], 20, 10, [1, 2]), seconds=1.0)
    run: Any = SimpleNamespace(
        read_json=lambda _: {"heldout": training},
        files=SimpleNamespace(url=str),
        config=compose("evaluate.simulate=false"),
    )
    for drafting in (Drafting(2, 1, 3), Drafting(3, 2, 8)):
        summary = summarised(run, "d", {drafting: one}, None, {})
        steps, topk, _ = drafting
        assert summary["simulated"] == {"answers": None, "heldout": None}
        told = f"training walks chains of 3 drafts; here evaluate.num_steps is {steps} and evaluate.topk {topk}"
        assert summary["not_simulated"]["heldout"] == told


def test_float32_answers_must_be_the_targets_own(tmp_path: Path) -> None:
    told = figures(tmp_path, dtype="float32", differing=True)["disagreement"]
    assert told.startswith("greedy answers in float32 are not those without speculation, as they must be: ")
    assert "1 of 2 conversations of [3, 1, 4], the earliest at generated token 1" in told
    # The tree and the other drafter say 6 where the target alone says 5
    told = figures(tmp_path, dtype="float32")["disagreement"]
    assert "[3, 1, 4]" not in told and "of [3, 2, 8], the" in told and "of s3://b/other, the" in told
    assert figures(tmp_path, dtype="bfloat16", differing=True)["disagreement"] is None
    assert figures(tmp_path, dtype="float32", differing=True, temperature=0.7)["disagreement"] is None
    run: Any = SimpleNamespace(
        read_json=lambda _: None, files=SimpleNamespace(url=str), config=compose("evaluate.dtype=bfloat16")
    )
    same, other = (served(row("a", [1], 9, 5, ids), seconds=1.0) for ids in ([1, 2], [1, 3]))
    assert summarised(run, "d", {Drafting(3, 1, 4): same}, other, {})["disagreement"] is None
    run.config.evaluate.dtype = "float32"
    assert "1 of 1 conversations" in summarised(run, "d", {Drafting(3, 1, 4): same}, other, {})["disagreement"]
    assert summarised(run, "d", {Drafting(3, 1, 4): same}, same, {})["disagreement"] is None
    assert summarised(run, "d", {Drafting(3, 1, 4): same}, None, {})["disagreement"] is None


def test_sampled_answers_are_not_compared(tmp_path: Path) -> None:
    summary = figures(tmp_path, temperature=0.7)
    assert (summary["greedy_identical"], summary["identical_share"], summary["different_answers"]) == (None, None, [])
    assert summary["speedup"] == 2.1  # the target alone is still what speed is compared with


def test_the_states_that_are_walked_are_those_of_the_answers() -> None:
    ids, mask = [5, 6, 7, 8, 9], [False, True, True, False, True]
    aux, last = torch.arange(10.0).view(5, 2), torch.arange(5.0).view(5, 1)
    engine: Any = SimpleNamespace(capture=lambda asked: [Captured(aux, last)] if asked == [ids] else [])
    sample = _captured(engine, {"id": "a", "token_ids": ids, "loss_mask": mask})
    assert sample.last_rows.tolist() == [1]  # x_1 and x_2 alone follow each other in an answer
    assert sample.last_hidden.tolist() == [[1.0]]
    assert torch.equal(sample.aux, aux) and sample.aux.data_ptr() != aux.data_ptr()  # the engine's memory is free again


# ---------------------------------------------------------------- on real SGLang


@pytest.mark.engine
@pytest.mark.full
def test_served_walked_and_plain_answers_agree_on_sglang(smollm2: Path, tmp_path: Path) -> None:
    """The whole line with a little training: what the walk says of the very answers is what was served, trees too."""
    settings = ["prompts.limit=60", "train.steps=120", "run=agree", "evaluate.limit=16"]
    ended = command("pipeline", *settings, "evaluate.sweep=[[2,1,3],[3,4,12]]", home=tmp_path)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    summary = json.loads((tmp_path / "runs" / "agree" / "summary.json").read_text())
    print(json.dumps({name: summary[name] for name in ("accept_length", "simulated", "by_drafting", "best_drafting")}))
    assert summary["accept_length"] > 1.1
    walked = summary["simulated"]["answers"]
    assert walked["completion_tokens"] == summary["completion_tokens"]
    assert abs(walked["served_minus_simulated"]) <= 0.01
    assert math.isfinite(summary["simulated"]["heldout"]["served_minus_simulated"])
    assert f"served minus simulated {walked['served_minus_simulated']:+.4f}" in ended.stdout
    chain, short, tree = summary["by_drafting"]
    assert [line["identical_share"] for line in (chain, short, tree)] == [1.0, 1.0, 1.0]
    assert short["accept_length"] <= chain["accept_length"] < tree["accept_length"]
    assert summary["best_drafting"] == {"num_steps": 3, "topk": 4, "num_draft_tokens": 12, "by": "accept_length"}
    assert (summary["output_tokens_per_s"], summary["speedup"]) == (None, None)
    page = (tmp_path / "runs" / "agree" / "report.html").read_text()
    assert "Chains and trees" in page and "served minus simulated" in page


@pytest.mark.engine
@pytest.mark.full
def test_drafters_and_suites_side_by_side_on_sglang(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """Two drafters, trees, two suites with the same ids, and one target alone whose answers are walked."""
    settings = [f"target.path={tiny_llama_folder}", "capture.boundaries=[2,4,7]", "drafter.draft_vocab_size=2048"]
    config = compose(*settings, f"store.root={tmp_path}/store")
    run = open_run(config)
    pieces = load_pieces(run.config.target, torch.float32)
    for name, noise in (("good", 0.0), ("noisy", 0.5)):
        generator = torch.Generator().manual_seed(0)
        vocabulary = torch.arange(2048) * 24
        drafter = Drafter(drafter_config(DrafterConfig(), run.model, 3, 2048), vocabulary)
        initialise(drafter, pieces, seed=0)
        for parameter in drafter.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
        export(tmp_path / name, drafter, [1, 3, 6], "float32")
    for name, count in (("a", 3), ("b", 5)):
        lines = [json.dumps({"id": str(i), "prompt": f"{name} {i} " * (i + 1), "domain": "d"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    both = (
        f"+evaluate.suites={{a: {{source: {tmp_path}/a.jsonl}}, b: {{source: {tmp_path}/b.jsonl, max_new_tokens: 9}}}}"
    )
    settings += [f"drafter.path={tmp_path}/good", f"evaluate.drafters=[{tmp_path}/noisy]", "evaluate=file", both]
    settings += ["evaluate.num_steps=3", "evaluate.topk=3", "evaluate.num_draft_tokens=10"]
    ended = command("evaluate", *settings, "evaluate.max_new_tokens=30", home=tmp_path / "home")
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    (path,) = (tmp_path / "home").glob("drafters/*/evaluations/*/summary.json")
    summary = json.loads(path.read_text())
    print(json.dumps({name: summary[name] for name in ("by_suite", "by_drafter", "best_drafter", "simulated")}))
    assert {name: row["conversations"] for name, row in summary["by_suite"].items()} == {"a": 3, "b": 5}
    assert [row["identical_share"] for row in summary["by_suite"].values()] == [1.0, 1.0]
    assert sum(row["completion_tokens"] for row in summary["by_suite"].values()) == summary["completion_tokens"] <= 135
    good, noisy = summary["by_drafter"]
    assert (good["drafter"], noisy["drafter"]) == (f"{tmp_path}/good", f"{tmp_path}/noisy")
    assert (good["identical_share"], noisy["identical_share"]) == (1.0, 1.0)
    assert good["accept_length"] > noisy["accept_length"]
    assert summary["best_drafter"] == {"drafter": f"{tmp_path}/good", "by": "accept_length"}
    walked = summary["simulated"]["answers"]
    assert walked["completion_tokens"] == summary["completion_tokens"]
    assert abs(walked["served_minus_simulated"]) <= 0.01
    assert f"b: {summary['by_suite']['b']['accept_length']}" in ended.stdout
    assert f"served minus simulated {walked['served_minus_simulated']:+.4f}" in ended.stdout
    assert "identical to the target's own greedy answers: 100.00% of the conversations" in ended.stdout
    assert (summary["turns_asked"], summary["turns_answered"], summary["disagreement"]) == (8, 8, None)
