"""The figures of an evaluation, from counts worked out by hand, and its settings' part in them."""

from __future__ import annotations

import dataclasses
import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, compose
from test_cli import command

from eagle3_ray import evaluate as evaluation
from eagle3_ray.acceptance import agreement, different, distinct_bigrams, interval, measure
from eagle3_ray.capture import fingerprint
from eagle3_ray.config import (
    ConfigError,
    DrafterConfig,
    Drafting,
    EvaluateConfig,
    PromptsConfig,
    SamplingConfig,
    SuiteConfig,
    draftings,
    suites,
)
from eagle3_ray.drafter.checkpoint import export
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.drafter.target import initialise, load_pieces
from eagle3_ray.engines.base import Answered, Captured, Response
from eagle3_ray.evaluate import SETTINGS, _captured, _row, heldout, summarised
from eagle3_ray.prepare import Prompt
from eagle3_ray.run import Run, check_values, open_run


def row(
    name: str, histogram: list[int], tokens: int, steps: int, *answers: list[int], suite: str = "heldout"
) -> dict[str, Any]:
    return {
        "id": name, "domain": "d", "suite": suite, "histogram": histogram, "completion_tokens": tokens,
        "verify_steps": steps, "answers": list(answers),
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
    **settings: Any,
) -> dict[str, Any]:
    """The summary of two draftings, of another drafter and of the target alone, with counts made up."""
    training = {"heldout": {"samples": 4, "draft_steps": 3, "after": {"accept_length": 1.9, "completion_tokens": 40}}}
    run: Any = SimpleNamespace(
        read_json=lambda key: training if key == "d/summary.json" else None,
        files=SimpleNamespace(url=lambda key: f"/store/{key}"),
        config=SimpleNamespace(
            evaluate=EvaluateConfig(source="x", **settings),
            hardware=SimpleNamespace(device=device),
            drafter=DrafterConfig(),
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
    assert {broken[name] for name in evaluation.COMPARED} == {None}


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
    simulated = figures(tmp_path)["simulated"]
    assert simulated["heldout"]["served_minus_simulated"] == pytest.approx(0.2)
    assert simulated["answers"]["served_minus_simulated"] == pytest.approx(-0.005)


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


# ---------------------------------------------------------------- settings


def test_the_demo_serves_in_the_precision_that_it_captures() -> None:
    config = compose()
    assert (config.engine.dtype, config.evaluate.dtype) == ("float32", None)


def test_suites_have_their_own_limits_or_those_of_all() -> None:
    config = compose("evaluate=suites", "evaluate.limit=4", "evaluate.suites.gsm8k.limit=2")
    check_values(config)
    asked = suites(config.evaluate)
    assert [(name, one.limit, one.max_new_tokens) for name, one in asked.items()] == [
        ("mt_bench", 4, 1024), ("gsm8k", 2, 512), ("humaneval", 4, 512), ("math500", 4, 2048),
    ]  # fmt: skip
    assert asked["gsm8k"].subset == "main"
    added = compose("evaluate=file", "+evaluate.suites={mine: {source: p.jsonl}}", "evaluate.max_new_tokens=7")
    assert suites(added.evaluate) == {"mine": SuiteConfig("p.jsonl", max_new_tokens=7)}
    assert suites(compose("evaluate=gsm8k").evaluate)["heldout"] == dataclasses.replace(asked["gsm8k"], limit=None)


@pytest.mark.parametrize("suite", ["mt_bench", "gsm8k", "humaneval", "math500"])
def test_a_suite_is_whole_and_cites_its_source(suite: str) -> None:
    config = compose(f"evaluate={suite}")
    check_values(config)
    assert config.evaluate.source.count("/") == 1  # a name on the hub
    assert "arXiv:" in (ROOT / "conf" / "evaluate" / f"{suite}.yaml").read_text()


def drafted(*sweep: list[int], **settings: Any) -> list[Drafting]:
    return draftings(EvaluateConfig(source="x", sweep=list(sweep), **settings))


def test_each_drafting_is_served_once_the_settings_own_first() -> None:
    assert compose("evaluate.sweep=[[5,1,6],[5,4,16]]").evaluate.sweep == [[5, 1, 6], [5, 4, 16]]
    assert drafted([5, 1, 6], [3, 1, 4], [5, 4, 16]) == [(3, 1, 4), (5, 1, 6), (5, 4, 16)]
    assert drafted(num_steps=2, topk=2, num_draft_tokens=5) == [(2, 2, 5)]


@pytest.mark.parametrize(("steps", "topk", "most"), [(1, 4, 5), (2, 2, 7), (3, 4, 37)])
def test_a_tree_verifies_at_most_what_it_drafts(steps: int, topk: int, most: int) -> None:
    # topk tokens at first, then topk behind each of the topk paths that are kept; and the one before them all
    assert drafted([steps, topk, most])[1] == (steps, topk, most)
    with pytest.raises(ConfigError, match=rf"topk {topk} draft {most - 1} tokens"):
        drafted([steps, topk, most + 1])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([3, 1, 5], "a chain .* of 3 steps verifies 4 tokens, not 5"),
        ([3, 2, 3], "num_draft_tokens: 3, the first of them no draft, so that 3 steps can never all be accepted"),
        ([0, 1, 2], "num_steps: 0 is less than 1"),
        ([1, 0, 2], "topk: 0 is less than 1"),
        ([1, 1], r"evaluate.sweep \[1, 1\]: not \[num_steps, topk, num_draft_tokens\]"),
    ],
)
def test_a_drafting_that_cannot_work_is_named(values: list[int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        drafted(values)
    if len(values) == 3:
        with pytest.raises(ConfigError, match="evaluate.*" + reason):
            drafted(**dict(zip(Drafting._fields, values, strict=True)))


def test_what_sglang_or_the_walk_cannot_do_is_refused_before_any_engine_starts() -> None:
    config = compose()

    def refusal(**settings: Any) -> str:
        evaluate = dataclasses.replace(config.evaluate, **settings)
        with pytest.raises(ConfigError) as refused:
            check_values(dataclasses.replace(config, evaluate=evaluate))
        return str(refused.value)

    assert refusal(temperature=-1.0) == "evaluate.temperature: -1.0 is less than 0"
    assert refusal(temperature=0.7).startswith("evaluate.temperature: 0.7, but with hardware.device=cpu")
    assert refusal(sweep=[[2, 9000, 10]]) == "evaluate.topk: 9000 is more than drafter.draft_vocab_size=4096"
    assert refusal(simulate=True, baseline=False).endswith("not with evaluate.baseline=False")
    assert refusal(sweep=[[3, 2, 8]], source=None).startswith("evaluate.source: None with evaluate.suites=[]")
    several = {"a": SuiteConfig("a.jsonl"), "b": SuiteConfig("b.jsonl", max_new_tokens=0)}
    assert refusal(suites=several).startswith(f"evaluate.source: {config.evaluate.source!r} with evaluate.suites=['a',")
    assert refusal(source=None, suites=several) == "evaluate.suites.b.max_new_tokens: 0 is less than 1"
    tree = dataclasses.replace(config.evaluate, simulate=True, num_steps=3, topk=2, num_draft_tokens=8)
    check_values(dataclasses.replace(config, evaluate=tree))  # trees are walked too


def test_what_decides_an_evaluation_is_in_its_fingerprint() -> None:
    """All settings but those of the prompts and drafters, of which more than the names is in it, and the dtype, which
    is named."""
    of_the_prompts = {"source", "split", "subset", "limit", "suites", "max_new_tokens", "chat_template_kwargs"}
    named = {"dtype", "drafters"}
    assert set(SETTINGS) == {f.name for f in dataclasses.fields(EvaluateConfig)} - of_the_prompts - named


def test_suites_and_other_drafters_decide_an_evaluation(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PromptsConfig] = []

    def prepared(_: Run, source: PromptsConfig) -> Any:
        asked.append(source)
        return SimpleNamespace(fingerprint=str(source))

    monkeypatch.setattr(evaluation, "prepare", prepared)
    monkeypatch.setattr(evaluation, "exported", lambda run, key: run.config.drafter.path or key)
    for name in ("one", "two"):
        export(tmp_path / name, small_drafter(), [1, 3, 5], "float32")

    def described(*overrides: str) -> str:
        run = open_run(compose(f"target.path={smollm2}", f"store.root={tmp_path}/store", *overrides))
        return fingerprint(evaluation.described(run, heldout(run), "drafters/d"))

    suite = "source: a.jsonl, split: train, subset: main, limit: 3, max_new_tokens: 7"
    variants = [
        ["evaluate.source=a.jsonl"],
        ["evaluate.source=b.jsonl"],
        ["evaluate.source=a.jsonl", "evaluate.max_new_tokens=9"],
        ["evaluate.source=a.jsonl", "evaluate.split=train"],
        ["evaluate=file", f"+evaluate.suites={{s: {{{suite}}}}}", "evaluate.source=null"],
        ["evaluate=file", f"+evaluate.suites={{other: {{{suite}}}}}", "evaluate.source=null"],
        ["evaluate.source=a.jsonl", f"evaluate.drafters=[{tmp_path}/one]"],
        ["evaluate.source=a.jsonl", f"evaluate.drafters=[{tmp_path}/one,{tmp_path}/two]"],
    ]
    assert len({described(*overrides) for overrides in variants}) == len(variants)
    assert (asked[4].source, asked[4].split, asked[4].subset, asked[4].limit) == ("a.jsonl", "train", "main", 3)
    once = described("evaluate.source=a.jsonl", f"evaluate.drafters=[{tmp_path}/one/,{tmp_path}/one]")
    assert once == described(*variants[6])


def small_drafter() -> Drafter:
    target = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 16}
    config = drafter_config(DrafterConfig(), target | {"vocab_size": 49152}, 3, 16)
    return Drafter(config, torch.arange(16))


def test_thinking_can_be_switched_for_the_evaluation_alone(smollm2: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for path in smollm2.iterdir():
        (target / path.name).symlink_to(path)
    template = target / "chat_template.jinja"
    template.unlink(missing_ok=True)
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n{% if thinking %}<think>{% endif %}"
    )
    config = json.loads((smollm2 / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (target / "tokenizer_config.json").unlink()
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    settings = [f"target.path={target}", f"store.root={tmp_path}/store", "evaluate.limit=1"]
    settings += ["+target.chat_template_kwargs.thinking=true"]

    def prompt(*overrides: str) -> list[int]:
        (corpus,) = heldout(open_run(compose(*settings, *overrides))).values()
        return corpus.read(corpus.units[0])[0].segments[0]

    thinking, without = prompt(), prompt("+evaluate.chat_template_kwargs.thinking=false")
    assert thinking[: len(without)] == without and len(thinking) > len(without)
    assert prompt("+evaluate.chat_template_kwargs.other=1") == thinking  # the target's own stay


def test_an_engine_answers_every_suite_each_up_to_its_own_length(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": "x", "prompt": f"Say {name}"}))
    both = (
        f"+evaluate.suites={{a: {{source: {tmp_path}/a.jsonl}}, b: {{source: {tmp_path}/b.jsonl, max_new_tokens: 3}}}}"
    )
    run = open_run(compose(f"target.path={smollm2}", f"store.root={tmp_path}/store", "evaluate=file", both))

    class Engine:
        info = {"engine": "none"}

        def generate(self, prompts: list[list[int]], sampling: SamplingConfig) -> list[Response]:
            return [Response([7] * sampling.max_new_tokens, "length", {"spec_verify_ct": 5}) for _ in prompts]

    monkeypatch.setattr(evaluation, "serving", lambda *_: nullcontext((Engine(), tmp_path)))
    monkeypatch.setattr(evaluation, "check_folder", lambda *_: ["a fault"])
    corpora = heldout(run)
    got = evaluation.serve(run, corpora, "d", Drafting(3, 1, 4))
    assert [(row["suite"], row["id"], row["completion_tokens"]) for row in got["answers"]] == [
        ("a", "a/x", 512), ("b", "b/x", 3),
    ]  # fmt: skip
    assert (got["faults"], got["refused"], got["walked"]) == (["a fault"], [], None)
    alone = evaluation.serve(run, {"a": corpora["a"]}, "d", None)
    assert ([row["id"] for row in alone["answers"]], alone["faults"]) == (["x"], [])


def test_other_drafters_are_looked_at_before_any_engine_starts(smollm2: Path, tmp_path: Path) -> None:
    def refusal(**config: Any) -> str:
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError) as refused:
            open_run(compose(*settings))
        return str(refused.value)

    settings = [f"target.path={smollm2}", f"store.root={tmp_path}/store", f"evaluate.drafters=[{tmp_path}/other]"]
    with pytest.raises(ConfigError, match=f"evaluate.drafters: no drafter at '{tmp_path}/other'"):
        open_run(compose(*settings))
    assert "evaluate.drafters: no safetensors in" in refusal(vocab_size=49152, hidden_size=576)
    (tmp_path / "other" / "model.safetensors").write_bytes(b"")
    assert refusal(vocab_size=1, hidden_size=576).endswith("its vocab_size is 1, this one's 49152")
    assert refusal(vocab_size=49152, hidden_size=64).endswith("its hidden_size is 64, this one's 576")
    own_width = {"vocab_size": 49152, "hidden_size": 64, "target_hidden_size": 576, "draft_vocab_size": 6}
    (tmp_path / "other" / "config.json").write_text(json.dumps(own_width))
    open_run(compose(*settings))
    with pytest.raises(ConfigError, match="evaluate.topk: 7 is more than the draft vocabulary of .*, 6 tokens"):
        open_run(compose(*settings, "evaluate.sweep=[[2,7,10]]"))
    path = f"drafter.path={tmp_path}/other"
    with pytest.raises(ConfigError, match="drafter.path: .*model.safetensors is no safetensors file"):
        open_run(compose(*settings[:2], path, "evaluate.simulate=true"))
    (tmp_path / "other" / "below").mkdir()
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "other" / "below" / "model.safetensors")
    with pytest.raises(ConfigError, match="drafter.path: no safetensors in"):  # SGLang would unpickle a .bin
        open_run(compose(*settings[:2], path))


# ---------------------------------------------------------------- on real SGLang


@pytest.mark.engine
@pytest.mark.full
def test_served_walked_and_plain_answers_agree_on_sglang(smollm2: Path, tmp_path: Path) -> None:
    """The whole line with a little training: what the walk says of the very answers is what was served, trees too."""
    settings = ["prompts.limit=60", "train.steps=120", "run=agree", "evaluate.limit=16", "evaluate.simulate=true"]
    ended = command("pipeline", *settings, "evaluate.sweep=[[2,1,3],[3,4,12]]", home=tmp_path)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    summary = json.loads((tmp_path / "runs" / "agree" / "summary.json").read_text())
    print(json.dumps({name: summary[name] for name in ("accept_length", "simulated", "by_drafting", "best_drafting")}))
    assert summary["accept_length"] > 1.1
    walked = summary["simulated"]["answers"]
    assert walked["completion_tokens"] == summary["completion_tokens"]
    assert abs(walked["served_minus_simulated"]) <= 0.01
    assert math.isfinite(summary["simulated"]["heldout"]["served_minus_simulated"])
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
    settings += ["evaluate.num_steps=3", "evaluate.topk=3", "evaluate.num_draft_tokens=10", "evaluate.simulate=true"]
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
