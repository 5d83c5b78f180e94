"""What real SGLang drafts with an exported drafter is what our own greedy chain drafts, token by token.

One engine a shape, in fp32, with stock speculative decoding; drafts_plugin.py writes down what it proposed. Our side
takes the target's states from Transformers and runs the exported folder through `checkpoint.load` and `Drafter`.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, compose
from tiny_targets import tiny_deepseek_v3, tiny_llama
from torch import Tensor

from eagle3_ray.config import DrafterConfig, Drafting, SamplingConfig
from eagle3_ray.drafter.checkpoint import export, load
from eagle3_ray.drafter.model import Batch, Drafter
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.drafter.target import initialise, load_pieces
from eagle3_ray.engines.base import Response
from eagle3_ray.engines.sglang import SGLangEngine, ask_layer_ids
from eagle3_ray.engines.transformers import TransformersEngine
from eagle3_ray.run import Run, open_run
from eagle3_ray.store.shards import Features, target_rows
from eagle3_ray.train.features import batches
from eagle3_ray.train.simulate import simulate, totals
from eagle3_ray.train.trees import Grower

STEPS, NOISE = 4, 0.03
CHAIN = Drafting(STEPS, 1, STEPS + 1)
TOLERANCE = 1e-4  # of a logit, where two tokens are as good as equal
PROMPTS = [random.Random(seed).choices(range(3, 500), k=4 + seed) for seed in range(32)]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, embedding left out": {},
    "norm_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "two layers": {"num_hidden_layers": 2},
    "own width": {"hidden_size": 48, "head_dim": 24, "num_key_value_heads": 1},
    "mla": {"attention": "mla"},
    "mla 3.1": {"attention": "mla", "fc_norm": True, "norm_output": True},
}


def open_target(family: str, folder: Path) -> Run:
    """A tiny target of eight layers, with a boundary below the last, so that a drafter can be right now and then."""
    make = tiny_deepseek_v3 if family == "mla" else tiny_llama
    made = make(folder / "target", layers=8)
    settings = ["capture.boundaries=[2,4,7]", "drafter.draft_vocab_size=384"]
    return open_run(compose(f"target.path={made}", f"store.root={folder / 'store'}", *settings))


def reference(run: Run) -> TransformersEngine:
    config = dataclasses.replace(run.config, engine=dataclasses.replace(run.config.engine, name="transformers"))
    config.engine.version = None
    return TransformersEngine(config, run.folder, run.spec)


@torch.no_grad()
def write_drafter(run: Run, settings: dict[str, Any], layer_ids: list[int], folder: Path, embedding: bool) -> None:
    """As it starts, which lets some drafts be right, with noise on every weight, which makes every part matter."""
    config = drafter_config(DrafterConfig(**settings), run.model, len(layer_ids), 384)
    generator = torch.Generator().manual_seed(0)
    drafter = Drafter(config, torch.randperm(512, generator=generator)[:384].sort().values)
    initialise(drafter, load_pieces(run.config.target, torch.float32), seed=0)
    for name, parameter in drafter.named_parameters():
        if name != "embed_tokens.weight" or drafter.own_embedding:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=NOISE)
    export(folder, drafter, layer_ids, "float32", embedding)


def serve(
    run: Run, folder: Path, scratch: Path, drafting: Drafting = CHAIN
) -> tuple[list[Response], list[dict[str, Any]]]:
    """The answers to PROMPTS, and what was drafted on the way."""
    info = scratch / "drafts_plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: drafts-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\ndrafts = drafts_plugin:load\n")
    written = scratch / "drafts.jsonl"
    run.config.hardware.env |= {"PYTHONPATH": f"{ROOT / 'tests'}:{scratch}", "DRAFTS_FILE": str(written)}
    arguments = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(folder),
        "speculative_num_steps": drafting.num_steps,
        "speculative_eagle_topk": drafting.topk,
        "speculative_num_draft_tokens": drafting.num_draft_tokens,
    }
    engine = SGLangEngine(run.config, run.folder, None, arguments)
    try:
        answers = engine.generate(PROMPTS, SamplingConfig(max_new_tokens=16))
    finally:
        engine.close()
    return answers, [json.loads(line) for line in written.read_text().splitlines()]


def chain(drafter: Drafter, ids: list[list[int]], aux: list[Tensor], drafts: list[list[int]]) -> list[Tensor]:
    """Our logits [n, Vd] of each step, at the slot before the last of each `ids`, with `drafts` fed back.

    ids: x_0 .. x_root of each slot; aux [T - 1, A*H]: the states that serving has by then.
    """
    lengths = tuple(len(tokens) + STEPS - 1 for tokens in ids)
    later = [torch.zeros(STEPS, states.shape[-1]) for states in aux]  # never looked at
    batch = Batch(
        ids=tuple(map(str, range(len(ids)))),
        lengths=lengths,
        input_ids=torch.tensor([t for tokens, said in zip(ids, drafts, strict=True) for t in tokens + said[:-1]]),
        loss_mask=torch.empty(0, dtype=torch.bool),
        aux=torch.cat([piece for pair in zip(aux, later, strict=True) for piece in pair]),
        last_hidden=torch.empty(0),
        last_rows=torch.empty(0),
    )
    slots = batch.bounds()[:-1] + torch.tensor([len(tokens) - 2 for tokens in ids])
    return [drafter.lm_head(state) for state in drafter(batch, [slots] * STEPS)]


def told(drafted: list[dict[str, Any]], whole: dict[Any, list[int]]) -> dict[tuple[Any, int], list[int]]:
    """What was drafted behind each root, (prompt, its position): not of a warm-up, nor behind the answer's end."""
    seen: dict[tuple[Any, int], list[int]] = {}
    for row in drafted:
        key, length, tokens = tuple(row["prompt"]), row["length"], row["tokens"]
        if key in whole and length < len(whole[key]):
            assert whole[key][length] == tokens[0]
            seen[key, length] = tokens[1:]
    assert {key for key, _ in seen} == set(whole)
    return seen


@torch.no_grad()
def compare(run: Run, folder: Path, answers: list[Response], drafted: list[dict[str, Any]]) -> dict[str, int]:
    """Assert that every draft is our own; count the slots, the drafts, and those that only the tolerance made equal."""
    drafter = load(folder, load_pieces(run.config.target, torch.float32).embedding)
    whole = {tuple(p): p + a.token_ids for p, a in zip(PROMPTS, answers, strict=True)}
    captured = reference(run).capture(list(whole.values()))
    states = {key: of.aux for key, of in zip(whole, captured, strict=True)}  # of [T, A*H]
    place = {token: i for i, token in enumerate(drafter.draft_ids.tolist())}
    seen = told(drafted, whole)
    ids = [whole[key][: length + 1] for key, length in seen]
    aux = [states[key][:length] for key, length in seen]
    close = 0
    for step, logits in enumerate(chain(drafter, ids, aux, list(seen.values()))):
        said = torch.tensor([place[tokens[step]] for tokens in seen.values()])  # [n]
        short = logits.max(-1).values - logits[torch.arange(len(said)), said]  # [n]
        assert short.max() <= TOLERANCE, (step, short.max(), (short > TOLERANCE).sum(), len(short))
        close += int((short > 0).sum())
    return {"slots": len(seen), "drafts": STEPS * len(seen), "close": close}


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES)
def test_sglang_drafts_what_our_own_greedy_chain_drafts(name: str, tmp_path: Path):
    run = open_target(SHAPES[name].get("attention", "gqa"), tmp_path)
    layer_ids = ask_layer_ids(run.config, run.spec.boundaries)
    write_drafter(run, SHAPES[name], layer_ids, tmp_path / "drafter", embedding="left out" not in name)
    answers, drafted = serve(run, tmp_path / "drafter", tmp_path)
    found = compare(run, tmp_path / "drafter", answers, drafted)
    accepted = sum(sum(a.speculation["spec_correct_drafts_histogram"][1:]) for a in answers)
    print(name, found, {"steps with an accepted draft": accepted})
    assert found["slots"] > 200
    assert found["close"] <= found["drafts"] // 500
    if name != "own width":  # which has nothing to start from
        assert accepted > 10


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize(("name", "drafting"), [("plain", Drafting(4, 3, 8)), ("norm_output", Drafting(3, 4, 21))])
@torch.no_grad()
def test_sglang_grows_our_own_trees_and_accepts_as_much_of_them(name: str, drafting: Drafting, tmp_path: Path):
    """Every verified draft of every step, and the accept length of the walk over the same answers."""
    run = open_target("gqa", tmp_path)
    write_drafter(run, SHAPES[name], ask_layer_ids(run.config, run.spec.boundaries), tmp_path / "drafter", True)
    answers, drafted = serve(run, tmp_path / "drafter", tmp_path, drafting)
    pieces = load_pieces(run.config.target, torch.float32)
    drafter = load(tmp_path / "drafter", pieces.embedding)
    whole = {tuple(p): p + a.token_ids for p, a in zip(PROMPTS, answers, strict=True)}
    seen, same, samples = told(drafted, whole), 0, []
    for key, states in zip(whole, reference(run).capture(list(whole.values())), strict=True):
        mask = torch.arange(len(whole[key])) >= len(key)  # [T]
        rows = target_rows(mask)
        ids = torch.tensor(whole[key], dtype=torch.int32)
        samples.append(Features(str(key), ids, mask, states.aux, states.last_hidden[rows], rows))
        (batch,) = batches(samples[-1:], 10**6, torch.float32)
        lengths = sorted(length for prompt, length in seen if prompt == key)
        trees = Grower(drafter, batch).grow(torch.tensor(lengths) - 1, drafting)
        same += sum(ours == seen[key, at] for ours, at in zip(trees.verified().tolist(), lengths, strict=True))
    walked = totals(simulate(drafter, samples, pieces.head, drafting))
    steps = sum(answer.speculation["spec_verify_ct"] for answer in answers)
    print(name, drafting, {"trees": len(seen), "same": same, "served": walked["completion_tokens"] / steps}, walked)
    assert len(seen) > 150 and same >= 0.98 * len(seen)  # but where two candidates are as good as equal
    assert walked["completion_tokens"] == sum(len(answer.token_ids) for answer in answers)
    assert walked["completion_tokens"] / steps == pytest.approx(walked["accept_length"], abs=0.01)
    assert walked["accept_length"] > 1.05 * walked["never_right"]
