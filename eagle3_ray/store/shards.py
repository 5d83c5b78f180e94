"""A shard: one safetensors file that holds the samples of one unit, end to end.

Sample s owns the tokens offsets[s]:offsets[s+1] of every per-token tensor. The last hidden state is kept only where it
can be a training target; `last_rows` says which tokens those are. The file is written straight from the samples'
memory, since the states of a unit are large and joining them first would hold them twice; it is read by memory map, so
that one sample costs its own bytes and no more. What is not a tensor (ids, finish reasons) is JSON in the metadata.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3_ray.store.filesystem import StoreError

FORMAT = "1"
# As safetensors names them.
DTYPES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


@dataclass
class Response:
    """One conversation with the answers that the target gave."""

    id: str
    input_ids: Tensor  # [T] int32
    loss_mask: Tensor  # [T] bool: the tokens that the target generated
    finish_reasons: list[str]  # one an answer
    domain: str | None = None
    seed: int | None = None  # that the answers were sampled with


@dataclass
class Features:
    """One conversation with the target's hidden states."""

    id: str
    input_ids: Tensor  # [T] int32
    loss_mask: Tensor  # [T] bool
    aux: Tensor  # [T, A*H]
    last_hidden: Tensor  # [R, H]
    last_rows: Tensor  # [R] int64: the tokens, of 0..T, that last_hidden belongs to, ascending


def target_rows(loss_mask: Tensor) -> Tensor:
    """The rows whose last hidden state is a training target: at p, with x_p and x_{p+1} both of the response."""
    mask = loss_mask.bool()  # [T]
    return (mask[:-1] & mask[1:]).nonzero().flatten()  # [R]


def write_responses(path: str | Path, responses: Sequence[Response], fingerprint: str) -> None:
    index = [{"id": r.id, "finish_reasons": r.finish_reasons, "domain": r.domain, "seed": r.seed} for r in responses]
    _write(path, _tokens(responses), index, fingerprint)


def write_features(path: str | Path, features: Sequence[Features], fingerprint: str) -> None:
    for sample in features:
        _check(sample)
    tensors = _tokens(features)
    starts = tensors["offsets"][0].tolist()
    tensors |= {
        "aux": [f.aux for f in features],  # [N, A*H]
        "last_hidden": [f.last_hidden for f in features],  # [R, H]
        "last_rows": [f.last_rows.long() + start for f, start in zip(features, starts, strict=False)],  # [R] of 0..N
    }
    _write(path, tensors, [{"id": f.id} for f in features], fingerprint)


class ShardReader:
    """A local shard, open for reading any sample. The tensors it gives are views of the file."""

    def __init__(self, path: str | Path, fingerprint: str):
        try:
            self._file = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise StoreError(f"shard {path} cannot be opened: {error}") from error
        metadata = self._file.metadata() or {}
        for name, expected in (("format", FORMAT), ("fingerprint", fingerprint)):
            if metadata.get(name) != expected:
                raise StoreError(f"shard {path} has the {name} {metadata.get(name)!r}, this run reads {expected!r}")
        self._samples: list[dict[str, Any]] = json.loads(metadata["samples"])
        names = list(self._file.keys())
        self._offsets: Tensor = self._file.get_tensor("offsets")  # [S+1]
        self._last_rows = self._file.get_tensor("last_rows") if "last_rows" in names else None  # [R]

    def __len__(self) -> int:
        return len(self._samples)

    def response(self, i: int) -> Response:
        begin, end = self._span(i)
        return Response(**self._samples[i], **self._tokens(begin, end))

    def features(self, i: int) -> Features:
        if self._last_rows is None:
            raise StoreError("a shard of responses holds no features")
        begin, end = self._span(i)
        first, last = torch.searchsorted(self._last_rows, torch.tensor([begin, end])).tolist()
        return Features(
            **self._samples[i],
            **self._tokens(begin, end),
            aux=self._slice("aux", begin, end),  # [T, A*H]
            last_hidden=self._slice("last_hidden", first, last),  # [R, H]
            last_rows=self._last_rows[first:last] - begin,  # [R]
        )

    def _span(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return int(self._offsets[i]), int(self._offsets[i + 1])

    def _tokens(self, begin: int, end: int) -> dict[str, Any]:
        mask = self._slice("loss_mask", begin, end).bool()  # [T]
        return {"input_ids": self._slice("input_ids", begin, end), "loss_mask": mask}

    def _slice(self, name: str, begin: int, end: int) -> Tensor:
        return self._file.get_slice(name)[begin:end]


def _tokens(samples: Sequence[Response] | Sequence[Features]) -> dict[str, list[Tensor]]:
    for s in samples:
        if len(s.loss_mask) != len(s.input_ids):
            raise StoreError(f"sample {s.id}: {len(s.input_ids)} tokens, but {len(s.loss_mask)} rows of loss_mask")
    lengths = torch.tensor([0, *(len(s.input_ids) for s in samples)])
    return {
        "offsets": [lengths.cumsum(0)],  # [S+1]
        "input_ids": [s.input_ids.to(torch.int32) for s in samples],  # [N]
        "loss_mask": [s.loss_mask.to(torch.uint8) for s in samples],  # [N]
    }


def _check(sample: Features) -> None:
    """One row a token, always: a short record would train on the wrong states."""
    rows, tokens = sample.last_rows, len(sample.input_ids)
    if len(sample.aux) != tokens:
        raise StoreError(f"sample {sample.id}: {tokens} tokens, but {len(sample.aux)} rows of aux")
    if len(sample.last_hidden) != len(rows):
        raise StoreError(f"sample {sample.id}: {len(rows)} last_rows, but {len(sample.last_hidden)} of last_hidden")
    if len(rows) and not (rows[0] >= 0 and rows[-1] < tokens and (rows.diff() > 0).all()):
        raise StoreError(f"sample {sample.id}: last_rows are not ascending within its {tokens} tokens")


def _write(path: str | Path, tensors: dict[str, list[Tensor]], samples: list[dict[str, Any]], fingerprint: str) -> None:
    """A safetensors file whose tensors are given in pieces: https://github.com/huggingface/safetensors#format."""
    metadata = {"format": FORMAT, "fingerprint": fingerprint, "samples": json.dumps(samples)}
    header: dict[str, Any] = {"__metadata__": metadata}
    filled = {name: pieces or [torch.empty(0)] for name, pieces in tensors.items()}
    # Wide types first, so that each tensor is aligned wherever the one before it ends.
    ordered = sorted(filled.items(), key=lambda item: -item[1][0].element_size())
    at = 0
    for name, pieces in ordered:
        kind = {(piece.dtype, piece.shape[1:]) for piece in pieces}
        if len(kind) > 1:
            raise StoreError(f"{name} differs from sample to sample in dtype or width: {sorted(map(str, kind))}")
        end = at + sum(piece.nbytes for piece in pieces)
        shape = [sum(len(piece) for piece in pieces), *pieces[0].shape[1:]]
        header[name] = {"dtype": DTYPES[pieces[0].dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in itertools.chain.from_iterable(pieces for _, pieces in ordered):
            file.write(piece.detach().cpu().contiguous().view(torch.uint8).numpy().data)
