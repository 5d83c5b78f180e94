"""The rows of the ablations: each changes one thing. Here too: the slots that other trainers' loss masks train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3_ray.drafter.loss import Targets, targets
from eagle3_ray.drafter.model import Batch, Drafter
from eagle3_ray.train import loop

SERVED, SHIFTED = (2, 15, 27), (3, 16, 28)  # boundaries: SmolLM2's default ones, and each one too high


@dataclass(frozen=True)
class Row:
    """One thing changed."""

    what: str
    value: str = ""
    default: str = ""  # where no setting says it
    train: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    mask: int | None = None  # another trainer's rule: a slot of step k is trained where loss_mask[i + mask + k] is set
    trained: tuple[int, ...] = SERVED
    served: tuple[int, ...] = SERVED
    fp8: bool = False
    corpus: str = "demo"
    own: bool = False  # trained on the corpus's own answers
    against: str | None = "base"


def setting(name: str, value: Any) -> Row:
    group, key = name.split(".")
    given = {key: value}
    return Row(name, str(value), train=given) if group == "train" else Row(name, str(value), drafter=given)


SLOTS, FILE = "the slots that serving drafts at", "own-answers"
ROWS = {
    "base": Row("base", against=None),
    "mask_i": Row("loss mask", "mask[i]", SLOTS, mask=0),
    "mask_i_plus_1": Row("loss mask", "mask[i+1]", SLOTS, mask=1),
    "vocabulary_probability": setting("drafter.vocabulary", "probability"),
    "vocabulary_2048": setting("drafter.draft_vocab_size", 2048),
    "vocabulary_8192": setting("drafter.draft_vocab_size", 8192),
    "vocabulary_16384": setting("drafter.draft_vocab_size", 16384),
    "fc_norm_off": setting("drafter.fc_norm", False),
    "norm_output": setting("drafter.norm_output", True),
    "norm_before_fc": setting("drafter.norm_before_fc", True),
    "ttt_1": setting("train.ttt_steps", 1),
    "ttt_3": setting("train.ttt_steps", 3),
    "ttt_4": setting("train.ttt_steps", 4),
    "ttt_7": setting("train.ttt_steps", 7),
    "lk_alpha": setting("train.loss", "lk_alpha"),
    "lk_lambda": setting("train.loss", "lk_lambda"),
    "lm_head_random": setting("drafter.initial_lm_head", "random"),
    "fc_average": setting("drafter.initial_fc", "average"),
    "fc_random": setting("drafter.initial_fc", "random"),
    "shifted_in_training": Row(
        "boundaries", f"{[*SHIFTED]} trained, {[*SERVED]} served", str([*SERVED]), trained=SHIFTED
    ),
    "shifted_in_both": Row("boundaries", f"{[*SHIFTED]}", str([*SERVED]), trained=SHIFTED, served=SHIFTED),
    "fp8": Row("states trained on", "float8_e4m3", "float32", fp8=True),
    "regenerated": Row("answers", "the target's, to the other corpus's prompts", corpus=FILE, against=None),
    "own_answers": Row(
        "answers", "the other corpus's own", "the target's", corpus=FILE, own=True, against="regenerated"
    ),
}


def slots_by_mask(batch: Batch, steps: int, shift: int) -> list[Tensor]:
    """For each step k, the slots i with loss_mask[i + shift + k] set, and a target row at i + 1 + k: [n_k]."""
    every = torch.arange(len(batch.input_ids))  # [N]
    has_row = torch.zeros_like(batch.loss_mask)  # [N]
    has_row[batch.last_rows] = True
    return [
        every[batch.ahead(batch.loss_mask, every, shift + k) & batch.ahead(has_row, every, 1 + k)] for k in range(steps)
    ]


def targets_by_mask(shift: int) -> Callable[[Batch, Tensor, Drafter, int], Targets]:
    """`loss.targets` by another trainer's rule (eagle3_ray/layouts.py has both).

    Under these rules a slot may be trained at a late step and at none before. It is computed at those, as the drafter
    wants it, and points there at one row more, which is out of the vocabulary and so has no loss.
    """

    def made(batch: Batch, argmax: Tensor, drafter: Drafter, steps: int) -> Targets:
        draft = targets(batch, argmax, drafter, 1).draft  # [R]
        row_of = torch.full_like(batch.input_ids, -1)  # [N]
        row_of[batch.last_rows] = torch.arange(len(draft))
        slots, rows = [], []
        computed = torch.zeros_like(batch.loss_mask)  # [N]: at this step or a later one
        for k, trained in reversed(list(enumerate(slots_by_mask(batch, steps, shift)))):
            here_too = torch.zeros_like(computed)  # [N]
            here_too[trained] = True
            computed = computed | here_too
            slots.append(computed.nonzero().flatten())  # [n_k]
            rows.append(torch.where(here_too[slots[-1]], row_of[slots[-1] + 1 + k], len(draft)))  # [n_k]
        return Targets(slots[::-1], rows[::-1], torch.cat([draft, draft.new_tensor([-1])]))

    return made


@contextmanager
def slots_of(row: Row) -> Iterator[None]:
    """Training steps within take their slots by the row's rule."""
    ours = loop.targets
    if row.mask is not None:
        loop.targets = targets_by_mask(row.mask)
    try:
        yield
    finally:
        loop.targets = ours
