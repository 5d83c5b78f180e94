"""The draft vocabulary: the tokens a drafter can propose, counted on what the target said.

It holds the target's end tokens and its most frequent response tokens, ties broken by id, in ascending order. d2t and
t2d, which carry it in a checkpoint, are made from these ids by `Drafter`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from eagle3_ray.capture import target_config, text_config
from eagle3_ray.config import ConfigError
from eagle3_ray.store.shards import Response


def draft_vocabulary(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The `size` target ids, ascending: `always`, then the most frequent of `counts` [V]. [Vd] int64"""
    kept = sorted(set(always))
    if not len(kept) <= size <= len(counts) or size < 1:
        raise ConfigError(
            f"drafter.draft_vocab_size: {size} is not between the {max(1, len(kept))} end tokens "
            f"and the target's {len(counts)} tokens"
        )
    ranked = counts.clone()
    ranked[torch.tensor(kept, dtype=torch.int64)] = counts.max() + 1
    return ranked.argsort(descending=True, stable=True)[:size].sort().values


def count_tokens(responses: Iterable[Response], vocab_size: int) -> Tensor:
    """How often the target said each token: [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for response in responses:
        said = response.input_ids[response.loss_mask].long()  # [n]
        counts += torch.bincount(said, minlength=vocab_size)
    return counts


def coverage(counts: Tensor, draft_ids: Tensor) -> float:
    """The share of the target's tokens that the draft vocabulary holds."""
    return (counts[draft_ids].sum() / counts.sum().clamp(min=1)).item()


def end_tokens(folder: Path) -> list[int]:
    """The ids that end an answer, of the target's config.json and generation_config.json."""
    configs = [target_config(folder)]
    configs.append(text_config(configs[0]))
    generation = folder / "generation_config.json"
    if generation.is_file():
        configs.append(json.loads(generation.read_text()))
    found: set[int] = set()
    for config in configs:
        ids = config.get("eos_token_id")
        found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(found)
