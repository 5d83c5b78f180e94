"""Simulated serving against a plain serving loop: one drafter, the same answers, the same counts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose
from test_train import V, counting, pieces, training
from tiny_targets import tiny_llama

from eagle3_ray.config import DrafterConfig, Drafting
from eagle3_ray.drafter.checkpoint import export
from eagle3_ray.drafter.loss import target_argmax
from eagle3_ray.drafter.model import Batch, Drafter
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.drafter.target import initialise, load_pieces
from eagle3_ray.engines.base import Captured
from eagle3_ray.evaluate import walk_answers
from eagle3_ray.run import open_run
from eagle3_ray.store.shards import Features, target_rows
from eagle3_ray.train.features import positions
from eagle3_ray.train.simulate import Walked, simulate, totals

CHAIN = Drafting(3, 1, 4)


@torch.no_grad()
def drafts(drafter: Drafter, ids: list[int], aux: torch.Tensor, steps: int) -> list[int]:
    """What serving drafts behind `ids`, whose last has no state yet: each draft is fed back, no answer is known."""
    slot, said = len(ids) - 2, list[int]()
    for step in range(1, steps + 1):
        tokens = torch.tensor(ids + said)
        rows = torch.cat([aux[: slot + 1], torch.zeros(len(tokens) - slot - 1, aux.shape[1])])  # the rest is unknown
        nothing = torch.empty(0)
        batch = Batch(("a",), (len(tokens),), tokens, torch.zeros_like(tokens).bool(), rows, nothing, nothing)
        state = drafter(batch, [torch.tensor([slot])] * step)[-1]  # [1, H]
        said.append(int(drafter.draft_ids[drafter.lm_head(state).argmax()]))
    return said


def serve(drafter: Drafter, sample: Features, steps: int) -> tuple[int, int]:
    """Completion tokens and verify steps of the sample's answers, served token by token."""
    ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
    tokens = verified = at = 0
    for answered, run in groupby(mask):
        start, at = at, at + len(list(run))
        if not answered:
            continue
        tokens, last = tokens + at - start, start  # the first comes from prefill
        while last + 1 < at:
            proposed = drafts(drafter, ids[: last + 1], sample.aux, steps)
            right = [draft == truth for draft, truth in zip(proposed, ids[last + 1 : at], strict=False)] + [False]
            last += right.index(False) + 1  # and the target's own token behind them
            verified += 1
    return tokens, verified


def conversation(number: int) -> Features:
    """A counting sample of two answers."""
    made = counting(number)
    middle = int(made.loss_mask.nonzero()[0]) + 3
    made.loss_mask[middle : middle + 2] = False
    made.last_rows = target_rows(made.loss_mask)
    made.last_hidden = pieces().head[made.input_ids[made.last_rows + 1].long()]  # [R, H]
    return made


def sampled(number: int) -> Features:
    """A counting sample in whose answer one token is not the likeliest."""
    made = counting(number)
    said = made.loss_mask.nonzero().flatten()
    at = said[len(said) // 2]
    made.input_ids[at] = (made.input_ids[at] + V // 2) % V
    return made


def greedy(sample: Features) -> bool:
    """The answers are what the target finds likeliest, as a greedy target's are."""
    return target_argmax(sample.last_hidden, pieces().head).tolist() == sample.input_ids[sample.last_rows + 1].tolist()


@pytest.mark.parametrize("shape", [DrafterConfig(), DrafterConfig(norm_output=True, fc_norm=True)], ids=["3", "3.1"])
def test_the_walk_takes_the_steps_that_serving_takes(shape: DrafterConfig) -> None:
    trainer = training(shape, steps=25)
    for share in islice(positions(trainer.config, [24], 0, 1, 0), 25):
        trainer.step([counting(i) for _, i in share])
    samples = [counting(number) for number in range(24, 44) if number % 7 != 3]
    samples += [conversation(number) for number in range(64, 84) if number % 7 != 3]
    assert sum(map(greedy, samples)) >= 6
    samples += [sampled(number) for number in range(24, 44) if number % 7 != 3]
    for steps in (1, 3):
        walked = simulate(trainer.drafter, iter(samples), pieces().head, Drafting(steps, 1, steps + 1))
        assert [(w.completion_tokens, w.verify_steps) for w in walked] == [
            serve(trainer.drafter, sample, steps) for sample in samples
        ]
        tokens, verified = sum(w.completion_tokens for w in walked), sum(w.verify_steps for w in walked)
        assert 1.2 < tokens / verified < 1 + 0.9 * steps  # neither never right nor always
        assert trainer.accept_length(samples, steps) == totals(walked)


def test_samples_without_an_answer_are_left_out_and_long_ones_cut() -> None:
    trainer = training(steps=0)
    silent = next(counting(n) for n in range(20) if not counting(n).loss_mask.any())
    spoken = next(counting(n) for n in range(20) if counting(n).loss_mask.sum() > 8)
    first = int(spoken.loss_mask.nonzero()[0])
    (whole,) = simulate(trainer.drafter, [silent, spoken], pieces().head, CHAIN)
    (cut,) = simulate(trainer.drafter, [spoken], pieces().head, CHAIN, max_length=first + 5)
    assert (whole.id, whole.completion_tokens) == (spoken.id, int(spoken.loss_mask.sum()))
    assert cut.completion_tokens == 5


def test_totals_are_of_all_samples_together() -> None:
    # 30 tokens in 12 steps; a drafter without a hit takes one step a token but the first of each of two answers: 28
    walked = [Walked("a", 20, 6, 19), Walked("b", 10, 6, 9)]
    assert totals(walked) == {
        "completion_tokens": 30,
        "verify_steps": 12,
        "accept_length": 2.5,
        "never_right": 30 / 28,
    }
    assert totals([])["accept_length"] == 0


def test_an_engines_own_answers_are_walked_with_the_trained_drafter(tmp_path: Path) -> None:
    """Against a plain serving loop, with a target that is real and an engine that only hands out its states."""
    from transformers import AutoModelForCausalLM

    folder = tiny_llama(tmp_path / "target", layers=8)
    settings = ["capture.boundaries=[2,4,7]", "drafter.draft_vocab_size=384"]
    run = open_run(compose(f"target.path={folder}", f"store.root={tmp_path}/store", *settings))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def states(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([hidden[b][0] for b in (2, 4, 7)], dim=-1), hidden[-1][0]  # [T, 3H], [T, H]

    class Engine:
        def capture(self, sequences: list[list[int]]) -> list[Captured]:
            return [Captured(*states(ids)) for ids in sequences]

    drafter = Drafter(drafter_config(DrafterConfig(), run.model, 3, 384), torch.arange(384))
    initialise(drafter, load_pieces(run.config.target, torch.float32), seed=0)  # right now and then
    left = tmp_path / "store" / "d" / "weights"  # by training
    export(left, drafter, [1, 3, 6], "float32", embedding=False)
    rows: list[dict[str, Any]] = []
    for seed in range(6):
        prompt = torch.randint(3, 384, (1, 5), generator=torch.Generator().manual_seed(seed))
        said = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
        rows.append({"id": str(seed), "token_ids": said, "loss_mask": [False] * 5 + [True] * 20})

    def samples() -> Iterator[Features]:
        for row in rows:
            aux, last = states(row["token_ids"])
            mask = torch.tensor(row["loss_mask"])
            kept = target_rows(mask)
            yield Features(row["id"], torch.tensor(row["token_ids"]), mask, aux, last[kept], kept)

    engine: Any = Engine()
    found = walk_answers(run, engine, "d", rows, CHAIN)
    counts = [serve(drafter, sample, 3) for sample in samples()]
    assert found["completion_tokens"] == sum(tokens for tokens, _ in counts) == 120
    assert found["verify_steps"] == sum(steps for _, steps in counts)
    assert found["accept_length"] > found["never_right"] == 120 / 114
