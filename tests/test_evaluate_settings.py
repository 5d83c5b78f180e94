"""An evaluation's settings: what they refuse, what they decide, and what reaches an engine of them."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, compose

from eagle3_ray import evaluate as evaluation
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
from eagle3_ray.engines.base import Response
from eagle3_ray.evaluate import SETTINGS, heldout
from eagle3_ray.run import Run, check_values, open_run
from eagle3_ray.strict_json import fingerprint


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
    told = refusal(baseline=False)  # of the demo, which simulates
    assert told.endswith("not with evaluate.baseline=False; evaluate.simulate=false leaves it out")
    assert refusal(sweep=[[3, 2, 8]], source=None).startswith("evaluate.source: None with evaluate.suites=[]")
    several = {"a": SuiteConfig("a.jsonl"), "b": SuiteConfig("b.jsonl")}
    assert refusal(suites=several).startswith(f"evaluate.source: {config.evaluate.source!r} with evaluate.suites=['a',")
    several["b"] = SuiteConfig("b.jsonl", max_new_tokens=0)
    assert refusal(source=None, suites=several) == "evaluate.suites.b.max_new_tokens: 0 is less than 1"
    tree = dataclasses.replace(config.evaluate, simulate=True, num_steps=3, topk=2, num_draft_tokens=8)
    check_values(dataclasses.replace(config, evaluate=tree))  # trees are walked too


def test_what_is_served_is_simulated_where_that_costs_no_speed_up() -> None:
    assert compose().evaluate.simulate and compose("evaluate=file").evaluate.simulate
    assert compose("evaluate=suites", "hardware=cpu").evaluate.simulate
    assert not compose("evaluate.simulate=false").evaluate.simulate
    assert not compose("hardware=gpu1").evaluate.simulate
    assert compose("hardware=gpu1", "evaluate.simulate=true").evaluate.simulate


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


def test_another_target_is_another_evaluation(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one drafter (drafter.path) on the same prompts, since both targets have one tokenizer."""
    corpora: Any = {"heldout": SimpleNamespace(fingerprint="same")}
    other = tmp_path / "other"
    other.mkdir()
    for path in smollm2.iterdir():
        (other / path.name).symlink_to(path)
    export(tmp_path / "theirs", small_drafter(), [1, 3, 5], "float32")

    def described(target: Path) -> str:
        settings = [f"target.path={target}", f"store.root={tmp_path}/store", f"drafter.path={tmp_path}/theirs"]
        return fingerprint(evaluation.described(open_run(compose(*settings)), corpora, "drafters/d"))

    assert described(other) == described(smollm2)  # by content, wherever it lies
    config = json.loads((smollm2 / "config.json").read_text())
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 1e6}))
    assert described(other) != described(smollm2)


def test_an_evaluation_is_kept_but_for_one_in_which_a_drafter_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    store: dict[str, Any] = {}
    config = compose("evaluate.simulate=false", "evaluate.baseline=false", "evaluate.drafters=[/a,/b]")
    files: Any = SimpleNamespace(url=str)
    run = Run(config, files, {}, {"chat_template_kwargs": {}}, None)  # type: ignore[arg-type]
    monkeypatch.setattr(Run, "read_json", lambda _, key: store.get(key))
    monkeypatch.setattr(Run, "write_json", lambda _, key, value: store.__setitem__(key, value))
    monkeypatch.setattr(evaluation, "described", lambda *_: {"all": "that decides"})
    monkeypatch.setattr(evaluation, "_check_refused", lambda *_: None)
    served: list[str | None] = []
    fails = {"/b"}

    def serve(given: Run, *_: Any) -> dict[str, Any]:
        served.append(given.config.drafter.path)
        if given.config.drafter.path in fails:
            raise evaluation.ray.exceptions.RayError("no such layer")
        answer = {"id": "x", "domain": "d", "suite": "heldout", "turns": 1, "answers": [[1, 2]], "histogram": [1]}
        answer |= {"completion_tokens": 2, "verify_steps": 1}
        return {"answers": [answer], "seconds": 1.0, "faults": [], "refused": [], "engine": {}, "walked": None}

    class Task:
        def __init__(self, function: Any) -> None:
            self.remote = lambda *args: lambda: function(*args)

    monkeypatch.setattr(evaluation, "serve", serve)
    monkeypatch.setattr(evaluation.ray, "remote", lambda **_: Task)
    monkeypatch.setattr(
        evaluation.ray, "get", lambda asked: [a() for a in asked] if isinstance(asked, list) else asked()
    )
    corpora: Any = {"heldout": SimpleNamespace(fingerprint="prompts")}
    first = evaluation.evaluate(run, corpora, "d")
    assert (first["failed"], served) == (["/b"], [None, "/a", "/b"])
    assert "no such layer" in first["by_drafter"][2]["faults"][0]
    fails.clear()
    second = evaluation.evaluate(run, corpora, "d")
    assert (second["failed"], second["by_drafter"][2]["accept_length"], len(served)) == ([], 2.0, 6)
    assert evaluation.evaluate(run, corpora, "d") == second and len(served) == 6  # kept now


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
    settings = [f"target.path={smollm2}", f"store.root={tmp_path}/store", "evaluate=file", "evaluate.simulate=false"]
    run = open_run(compose(*settings, both))

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
        open_run(compose(*settings[:2], path))
    (tmp_path / "other" / "below").mkdir()
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "other" / "below" / "model.safetensors")
    with pytest.raises(ConfigError, match="drafter.path: no safetensors in"):  # SGLang would unpickle a .bin
        open_run(compose(*settings[:2], path))
    export(tmp_path / "good", small_drafter(), [1, 3, 5], "float32")  # of 16 draft tokens, and the settings of 32000
    good = [*settings[:2], f"drafter.path={tmp_path}/good"]
    open_run(compose(*good))
    with pytest.raises(ConfigError, match="drafter.path: .*look at capture.boundaries"):
        open_run(compose(*good, "capture.boundaries=[2,27]"))
