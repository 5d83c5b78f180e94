"""The draft vocabulary: the tokens a drafter can propose.

It holds the target's end tokens, the tokenizer's special tokens that the target said, and the tokens of the highest
count, ties broken by id, in ascending order. A count is how often the target said a token (drafter.vocabulary=tokens),
or the probability that it gave to it where the drafter will be taught (probability). Ids that are padding of the
target's head, behind the tokenizer's last one, come in only where nothing else is left. d2t and t2d, which carry the
vocabulary in a checkpoint, are made from these ids by `Drafter`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_ray.capture import target_config, text_config
from eagle3_ray.config import ConfigError
from eagle3_ray.store.filesystem import Damaged
from eagle3_ray.store.shards import Response

LIKELIEST = 64  # tokens of a row whose probability is counted; what is left of it is spread too thin to matter
CHUNK_ELEMENTS = 2**24  # of the logits that exist at a time


def draft_vocabulary(counts: Tensor, size: int, always: Iterable[int] = (), known: int | None = None) -> Tensor:
    """The `size` target ids, ascending: `always`, then the highest of `counts` [V]. [Vd] int64

    Ids from `known` (the tokenizer's size) on are no tokens, whatever their count.
    """
    kept = sorted(set(always))
    if not len(kept) <= size <= len(counts) or size < 1:
        raise ConfigError(
            f"drafter.draft_vocab_size: {size} is not between the {max(1, len(kept))} end and special tokens "
            f"and the target's {len(counts)} tokens"
        )
    ranked = counts.clone()
    ranked[known:] = -1 if known is not None else ranked[known:]
    ranked[torch.tensor(kept, dtype=torch.int64)] = counts.max() + 1
    return ranked.argsort(descending=True, stable=True)[:size].sort().values


def count_tokens(responses: Iterable[Response], vocab_size: int) -> Tensor:
    """How often the target said each token: [V] int64. Damaged where one is none of its tokens."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for response in responses:
        said = response.input_ids[response.loss_mask].long()  # [n]
        if len(said) and said.max() >= vocab_size:
            raise Damaged(f"response {response.id} has token {int(said.max())}; the target has {vocab_size} tokens")
        counts += torch.bincount(said, minlength=vocab_size)
    return counts


@torch.no_grad()
def count_probability(rows: Iterable[Tensor], head: Tensor) -> Tensor:
    """The probability that the target gave to each token, summed over rows: [V] float64.

    `rows` are last hidden states, [R, H] at a time; of each the LIKELIEST tokens under softmax(head x state) count,
    with their share of the whole vocabulary's probability.
    """
    mass = torch.zeros(len(head), dtype=torch.float64, device=head.device)
    for some in rows:
        for chunk in some.to(head).split(max(1, CHUNK_ELEMENTS // len(head))):
            shares = (chunk @ head.T).float().softmax(-1)  # [c, V]
            highest, ids = shares.topk(min(LIKELIEST, len(head)))  # [c, k]
            mass.index_add_(0, ids.flatten(), highest.flatten().double())
    return mass.cpu()


def coverage(counts: Tensor, draft_ids: Tensor) -> float:
    """The share of the target's tokens that the draft vocabulary holds."""
    return (counts[draft_ids].sum() / counts.sum().clamp(min=1)).item()


def names_tokens(ids: Tensor, vocab_size: int, t2d: Tensor | None) -> bool:
    """Whether `ids` [Vd] are different tokens of the target, and, where there is a t2d [V], those that it marks."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        return False
    seen = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)  # [V]
    return int(seen.sum()) == len(ids) and (t2d is None or torch.equal(seen, t2d.bool()))


def end_tokens(folder: Path) -> list[int]:
    """The ids that end an answer, of the target's config.json and generation_config.json."""
    configs = [target_config(folder)]
    configs.append(text_config(configs[0]))
    configs.append(_json(folder / "generation_config.json"))
    found: set[int] = set()
    for config in configs:
        ids = config.get("eos_token_id")
        found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(found)


def tokenizer_ids(folder: Path) -> tuple[int | None, list[int]]:
    """The tokenizer's size (its last id + 1; None if it is kept in neither JSON nor tiktoken's format), and its special
    ids."""
    whole = _json(folder / "tokenizer.json")
    added = {int(token["id"]): token for token in whole.get("added_tokens", [])}
    decoder = _json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    added |= {int(number): token for number, token in decoder.items()}
    words = whole.get("model", {}).get("vocab", [])  # BPE's {token: id}, or Unigram's list
    ids = [len(words) - 1, *(words.values() if isinstance(words, dict) else []), *added]
    ranks = folder / "tiktoken.model"
    if ranks.is_file():
        ids.append(sum(1 for line in ranks.read_bytes().splitlines() if line) - 1)
    size = max(ids) + 1 if words or ranks.is_file() else None
    return size, sorted(number for number, token in added.items() if token.get("special"))


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
