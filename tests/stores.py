"""Small stores as an extraction leaves them, without an engine: random states, true indexes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.shards import Features, Response, target_rows, write_features, write_responses
from eagle3_ray.strict_json import fingerprint

HIDDEN = 8
TARGET = {"weights": {"model.safetensors": "ab" * 32}, "files": {}, "chat_template_kwargs": {}}


def fill(
    files: Filesystem,
    folder: Path,
    units: int = 2,
    samples: int = 3,
    target: dict[str, Any] = TARGET,
    norm: torch.Tensor | None = None,
) -> tuple[Units, Units]:
    """Responses and the features taken from them, a capture unit each; shards are written in `folder` first."""
    description = {"target": target, "prompts": "0123456789abcdef", "sampling": {"seed": 0}, "context_length": None}
    responses = Units(files, "responses", fingerprint(description))
    responses.describe(description)
    about = {
        "target": target,
        "responses": fingerprint(description),
        "engine": "sglang",
        "engine_version": "0.5.23",
        "engine_dtype": "bfloat16",
        "boundaries": [2, 4, 6],
        "dtype": "bfloat16",
    }
    features = Units(files, "features", fingerprint(about))
    features.describe(about | {"shard_bytes": 2**29})
    features.record("engine", {"attention": "triton"})
    for number in range(units):
        made = [sample(f"{number}-{i}", 4 + number + 2 * i, norm) for i in range(samples)]
        index = [
            {
                "id": f.id,
                "domain": ["maths", "code"][i % 2],
                "tokens": len(f.input_ids),
                "generated": int(f.loss_mask.sum()),
                "finish_reasons": ["stop"] if i else ["length"],
            }
            for i, f in enumerate(made)
        ]
        answers = [
            Response(f.id, f.input_ids, f.loss_mask, listed["finish_reasons"], listed["domain"], 0)
            for f, listed in zip(made, index, strict=True)
        ]
        shard = folder / "shard"
        write_responses(shard, answers, responses.folder.rpartition("/")[2])
        failed = [{"id": f"{number}-x", "reason": "too long\nfor the context"}]
        responses.commit(f"{number:06d}", shard, index, failed=failed)
        write_features(shard, made, features.folder.rpartition("/")[2])
        captured = [listed | {"targets": len(f.last_rows)} for f, listed in zip(made, index, strict=True)]
        features.commit(f"{number:06d}-0000", shard, captured, failed=[], engine={})
    return responses, features


def listed(samples: Sequence[Features | Response], domain: str | None = None) -> list[dict[str, Any]]:
    """The index that a commit has of these samples."""
    return [
        {
            "id": s.id,
            "domain": getattr(s, "domain", domain),
            "tokens": len(s.input_ids),
            "generated": int(s.loss_mask.sum()),
            "finish_reasons": getattr(s, "finish_reasons", ["stop"]),
        }
        | ({"targets": len(s.last_rows)} if isinstance(s, Features) else {})
        for s in samples
    ]


def sample(name: str, tokens: int, norm: torch.Tensor | None = None) -> Features:
    """Two answers, the first of which the user's next turn follows; the last hidden state is as `norm` leaves it."""
    mask = torch.zeros(tokens, dtype=torch.bool)  # [T]
    mask[1:3] = mask[4:] = True
    rows = target_rows(mask)  # [R]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    last = torch.randn(len(rows), HIDDEN, generator=generator)  # [R, H]
    if norm is not None:
        last = torch.nn.functional.rms_norm(10 * last, [HIDDEN], norm, 1e-6)
    return Features(
        id=name,
        input_ids=torch.randint(0, 100, (tokens,), generator=generator).int(),  # [T]
        loss_mask=mask,
        aux=torch.randn(tokens, 3 * HIDDEN, generator=generator).bfloat16(),  # [T, 3H]
        last_hidden=last.bfloat16(),  # [R, H]
        last_rows=rows,
    )
