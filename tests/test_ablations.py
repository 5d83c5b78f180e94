"""The ablations: each row changes what it says, other trainers' slots by hand, and the figures of the document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose
from tiny_targets import tiny_llama
from torch import Tensor

from benchmarks import ablations
from benchmarks.ablation_data import Corpus, answered, own_features, own_ids
from benchmarks.ablation_rows import ROWS, SERVED, SHIFTED, slots_by_mask, slots_of, targets_by_mask
from benchmarks.ablation_table import document, latest, read
from eagle3_ray.config import Config
from eagle3_ray.conversations import BadRecord
from eagle3_ray.drafter.loss import Targets, targets
from eagle3_ray.drafter.model import Drafter, valid_slots
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.engines.transformers import TransformersEngine
from eagle3_ray.extract import Extractor
from eagle3_ray.prepare import prepare
from eagle3_ray.run import open_run
from eagle3_ray.store.shards import Features, target_rows
from eagle3_ray.train import loop
from eagle3_ray.train.features import batches, heldout

H, V, ALL = 16, 64, (2, 3, 15, 16, 27, 28)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sample(name: str, mask: list[int]) -> Features:
    """Boundary b of every token is b in all its numbers, give or take a little."""
    generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    loss_mask, tokens = torch.tensor(mask).bool(), len(mask)
    rows = target_rows(loss_mask)
    aux = torch.tensor(ALL).repeat_interleave(H) + 0.01 * torch.randn(tokens, len(ALL) * H, generator=generator)
    last = torch.randn(len(rows), H, generator=generator)
    return Features(name, torch.randint(3, V, (tokens,), generator=generator).int(), loss_mask, aux, last, rows)


def corpus(name: str = "demo") -> Corpus:
    shards = [[sample(f"{name}{shard}{i}", [0] * 4 + [1] * (6 + i)) for i in range(6)] for shard in range(2)]
    return Corpus(shards, ALL, {"features": f"features/{name}", "samples": 12, "tokens": 150})


# ---------------------------------------------------------------- other trainers' slots

# Sample one answers at 3..7, so its target rows are 3..6; sample two, behind it, at 9..11 and 14..16: 9, 10, 14 and 15
MASKS = [[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 1, 1, 1]]
BY_MASK = {
    0: [[3, 4, 5, 9, 14], [2, 3, 4, 8, 13], [1, 2, 3, 12]],
    1: [[2, 3, 4, 5, 8, 9, 13, 14], [1, 2, 3, 4, 8, 12, 13], [0, 1, 2, 3, 11, 12]],
}


def packed() -> Any:
    (batch,) = batches([sample("a", MASKS[0]), sample("b", MASKS[1])], 100, torch.float32)
    return batch


def small_drafter() -> Drafter:
    shape = {"hidden_size": H, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": V}
    return Drafter(drafter_config(replace(compose().drafter), shape, 3, 32), torch.arange(32))


@pytest.mark.parametrize("shift", [0, 1])
def test_other_trainers_slots_by_hand(shift: int):
    assert [slots.tolist() for slots in slots_by_mask(packed(), 3, shift)] == BY_MASK[shift]
    assert [slots.tolist() for slots in valid_slots(packed(), 3)] == [
        [2, 3, 4, 5, 8, 9, 13, 14],
        [2, 3, 4, 8, 13],
        [2, 3],
    ]


def taught(goal: Targets) -> list[dict[int, int]]:
    """Slot -> target row, at each step, of what has a loss."""
    kept = [goal.draft[rows] >= 0 for rows in goal.rows]
    return [
        dict(zip(slots[mask].tolist(), rows[mask].tolist(), strict=True))
        for slots, rows, mask in zip(goal.slots, goal.rows, kept, strict=True)
    ]


@pytest.mark.parametrize("shift", [0, 1])
def test_those_slots_and_no_others_have_a_loss_and_learn_their_own_row(shift: int):
    batch, drafter = packed(), small_drafter()
    argmax = torch.zeros(8, dtype=torch.int64)  # in the draft vocabulary, all
    goal = targets_by_mask(shift)(batch, argmax, drafter, 3)
    row_at = {token: row for row, token in enumerate([3, 4, 5, 6, 9, 10, 14, 15])}
    assert taught(goal) == [{slot: row_at[slot + 1 + k] for slot in BY_MASK[shift][k]} for k in range(3)]
    assert goal.count().tolist() == [len(slots) for slots in BY_MASK[shift]]
    for before, after in zip(goal.slots, goal.slots[1:], strict=False):  # as the drafter wants them
        assert set(after.tolist()) <= set(before.tolist())


def test_only_the_training_within_takes_a_rows_slots():
    for row in (ROWS["mask_i"], ROWS["base"]):
        with slots_of(row):
            assert (loop.targets is targets) == (row.mask is None)
        assert loop.targets is targets


# ---------------------------------------------------------------- what a row trains on


def test_the_rows_are_those_of_the_study():
    changed = [(row.train | row.drafter) for row in ROWS.values()]
    for wanted in (
        *({"ttt_steps": steps} for steps in (1, 3, 4, 7)),
        *({"draft_vocab_size": size} for size in (2048, 8192, 16384)),
        *({"loss": loss} for loss in ("lk_alpha", "lk_lambda")),
        *({"initial_fc": fc} for fc in ("average", "random")),
        {"vocabulary": "probability"},
        {"initial_lm_head": "random"},
    ):
        assert changed.count(wanted) == 1
    assert {row.mask for row in ROWS.values()} == {None, 0, 1}
    assert {(row.trained, row.served) for row in ROWS.values()} == {
        (SERVED, SERVED),
        (SHIFTED, SERVED),
        (SHIFTED, SHIFTED),
    }
    assert [name for name, row in ROWS.items() if row.fp8] == ["fp8"]
    assert ROWS["own_answers"].own and ROWS["own_answers"].against == "regenerated"
    config = compose()
    for row in ROWS.values():  # no row is the base again, and all settings exist
        for group in ("train", "drafter"):
            for key, value in getattr(row, group).items():
                assert getattr(getattr(config, group), key) != value


def boundaries_of(sample: Features) -> Tensor:
    return sample.aux.unflatten(1, (-1, H)).mean((0, 2)).round()


def test_a_row_trains_on_its_own_boundaries_and_is_walked_on_the_served_ones():
    data, pair = corpus(), (1, 2)
    for name, trained, served in (
        ("base", SERVED, SERVED),
        ("shifted_in_training", SHIFTED, SERVED),
        ("shifted_in_both", SHIFTED, SHIFTED),
    ):
        assert boundaries_of(data.trained(ROWS[name], pair)).tolist() == [*trained]
        assert boundaries_of(data.served(ROWS[name], pair)).tolist() == [*served]


def test_the_fp8_row_trains_on_rounded_states_and_is_walked_on_whole_ones():
    data, pair = corpus(), (0, 1)
    whole, rounded = data.trained(ROWS["base"], pair), data.trained(ROWS["fp8"], pair)
    assert not torch.equal(whole.aux, rounded.aux)
    torch.testing.assert_close(rounded.aux, whole.aux, rtol=1 / 16 + 2**-8, atol=1e-4)
    assert torch.equal(rounded.last_hidden, whole.last_hidden.bfloat16().float())
    assert torch.equal(data.served(ROWS["fp8"], pair).aux, whole.aux)


def test_the_own_answers_row_trains_on_them_and_is_walked_on_the_targets():
    data, pair = corpus(), (0, 1)
    theirs = data.answered[0][1]
    data.own[theirs.id] = sample("another", [0, 0, 1, 1, 1])
    row = replace(ROWS["own_answers"], corpus="demo")
    assert torch.equal(data.trained(row, pair).input_ids, data.own[theirs.id].input_ids)
    assert torch.equal(data.served(row, pair).input_ids, theirs.input_ids)
    assert torch.equal(data.trained(ROWS["base"], pair).input_ids, theirs.input_ids)


# ---------------------------------------------------------------- own answers


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_own_answers_stand_where_the_template_puts_them(smollm2_tokenizer: Any):
    messages = [{"role": "system", "content": "Be brief."}, *turns("Hi", "Hello there.", "And now?", "We say goodbye.")]
    made = own_ids({"id": "x", "messages": messages}, smollm2_tokenizer, {}, limit=80)
    text = smollm2_tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == smollm2_tokenizer.decode(made.input_ids) + "\n"  # what the template has behind the last end token
    assert smollm2_tokenizer.decode(made.input_ids[made.loss_mask]) == "Hello there.<|im_end|>We say goodbye.<|im_end|>"
    cut = own_ids({"id": "x", "messages": messages}, smollm2_tokenizer, {}, limit=2)
    assert smollm2_tokenizer.decode(cut.input_ids[cut.loss_mask]) == "Hello thereWe say"
    with pytest.raises(BadRecord, match="--own-answers: y"):
        own_ids({"id": "y", "messages": turns("Hi")}, smollm2_tokenizer, {}, limit=80)


def test_the_corpora_are_what_the_engine_says(tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    records = [{"id": f"p{i}", "messages": turns("Hello " * (i + 1), "Good day " * (i + 1))} for i in range(3)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    overrides = ["engine=transformers", f"target.path={tiny_llama_folder}", f"store.root={tmp_path}/store"]
    overrides += [f"prompts.source={prompts}", "sampling.max_new_tokens=5", "capture.boundaries=[1,4]"]
    run = open_run(compose(*overrides, "capture.dtype=float32"))
    ready = prepare(run, run.config.prompts)
    for units, description in (run.responses(ready.fingerprint), run.features(ready.fingerprint)):
        units.describe(description)
    Extractor(run, ready)({"unit": ["000000"]})  # what Ray would do
    engine = TransformersEngine(run.config, run.folder, run.spec)
    data = answered(run)
    own = own_features(run, records, tmp_path / "own.safetensors")
    samples = {s.id: s for shard in data.answered for s in shard}
    assert samples.keys() == own.keys() == {"p0", "p1", "p2"}
    assert data.boundaries == (1, 4) and data.facts["samples"] == 3
    for one in (*samples.values(), *own.values()):
        (wanted,) = engine.capture([one.input_ids.tolist()])
        assert torch.equal(one.aux, wanted.aux)
        assert torch.equal(one.last_hidden, wanted.last_hidden[target_rows(one.loss_mask)])
    assert not any(torch.equal(samples[name].input_ids, own[name].input_ids) for name in own)
    monkeypatch.setattr("benchmarks.ablation_data.start_engine", None)
    assert own_features(run, records, tmp_path / "own.safetensors").keys() == own.keys()  # captured once


# ---------------------------------------------------------------- runs, and what is written


def small(tmp_path: Path) -> Config:
    config = compose("train.steps=2", "train.heldout=64", "drafter.draft_vocab_size=32")
    config.target.path = str(tiny_llama(tmp_path / "target", vocab=V, hidden=H, layers=2))
    return config


def test_two_rows_are_run_once_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, results, data = small(tmp_path), tmp_path / "ablations.jsonl", {"demo": corpus()}
    held = heldout(0, [6, 6], 64)
    trained: list[set[str]] = []
    step = loop.Training.step

    def watched(self: Any, samples: list[Features]) -> Any:
        trained.append({s.id for s in samples})
        return step(self, samples)

    monkeypatch.setattr(loop.Training, "step", watched)
    ablations.study(data, config, ["mask_i", "base"], 2, results)
    lines = read(results)
    assert [(line["row"], line["seed"]) for line in lines] == [("mask_i", 0), ("base", 0), ("mask_i", 1), ("base", 1)]
    assert len(trained) == 8 and trained[:2] == trained[2:4] != trained[4:6]  # two steps, the same ones of each row
    assert not any(name in share for name in (f"demo{shard}{i}" for shard, i in held) for share in trained[:4])
    answers = sum(int(data["demo"].answered[shard][i].loss_mask.sum()) for shard, i in held)
    for line in lines[:2]:
        assert line["heldout"] == len(held) == 3 and line["completion_tokens"] == answers
        assert line["accept_length"] == answers / line["verify_steps"]
    ablations.study(data, config, ["mask_i", "base"], 2, results)
    assert read(results) == lines  # nothing is run again
    data["demo"].facts["tokens"] += 1
    ablations.study(data, config, ["base"], 1, results)
    assert len(read(results)) == 5  # another corpus is another study
    assert latest(read(results)) == read(results)[4:]


def result(row: str, seed: int, length: float, base: dict[str, Any], file: str | None = None) -> dict[str, Any]:
    facts: dict[str, Any] = {"features": "features/f", "samples": 480, "tokens": 76114}
    if file:
        facts |= {"file": file, "sha256": "0", "sources": {"maths": 300, "letters": 180}}
    return {"row": row, "seed": seed, "accept_length": length, "heldout": 64, "corpus": facts, "base": base}


def test_the_documents_figures_by_hand(tmp_path: Path):
    base = ablations.base_of(compose("train.steps=400"))
    lengths = {"base": [1.50, 1.60, 1.40], "ttt_7": [1.53, 1.61, 1.45], "lk_alpha": [1.51, 1.58, 1.39]}
    lines = [result("base", 0, 9.0, ablations.base_of(compose("train.steps=3")))]  # of another study
    lines += [result(row, seed, length, base) for row, of in lengths.items() for seed, length in enumerate(of)]
    lines += [result("regenerated", 0, 1.7, base, "own.jsonl"), result("own_answers", 0, 1.4, base, "own.jsonl")]
    text = document(lines)
    assert "| base |  |  | 1.500 (1.400 to 1.600) |  | 3 |" in text
    assert "| train.ttt_steps | 7 | 2 | 1.530 (1.450 to 1.610) | +0.030 (+0.010 to +0.050) | 3 |" in text
    assert "| train.loss | lk_alpha | soft_ce | 1.493 (1.390 to 1.580) | -0.007 (-0.020 to +0.010) | 3 |" in text
    assert (
        "| answers | the other corpus's own | the target's | 1.400 (1.400 to 1.400) | -0.300 (-0.300 to -0.300) | 1 |"
        in text
    )
    assert "Above what they are compared with, in every seed: train.ttt_steps 7." in text
    assert "Below what they are compared with, in every seed: answers the other corpus's own." in text
    assert "480 conversations, 76114 tokens, from `own.jsonl`: maths 300, letters 180." in text
    assert "batch_size=2" in text and "lr=0.0012" in text and "draft_vocab_size=4096" in text
    assert "--steps 400 --seeds 3 \\\n        --own-answers own.jsonl\n" in text


def test_the_document_is_written_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    base = ablations.base_of(compose())
    lines = [result("base", 0, 1.5, base), result("base", 1, 1.6, base), result("fp8", 0, 1.4, base)]
    (tmp_path / "ablations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["ablations", "--store", str(tmp_path), "--seeds", "0", "--write", str(tmp_path / "doc.md")]
    monkeypatch.setattr("sys.argv", arguments)
    ablations.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"base": 1.55, "fp8": 1.4}
    assert (tmp_path / "doc.md").read_text() == document(lines)
    monkeypatch.setattr("sys.argv", ["ablations", "--store", str(tmp_path), "--rows", "own_answers"])
    with pytest.raises(SystemExit):
        ablations.main()
    assert "own_answers needs --own-answers" in capsys.readouterr().err
