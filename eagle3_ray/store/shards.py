"""A shard: one safetensors file that holds the samples of one unit, end to end.

Sample s owns the tokens offsets[s]:offsets[s+1] of every per-token tensor, and target_offsets[s]:target_offsets[s+1] of
the last hidden states, which are kept only where they can be a training target; `last_rows` says which tokens those
are. The file is written straight from the samples' memory, since the states of a unit are large and joining them first
would hold them twice. What is not a tensor (ids, finish reasons) is JSON in the metadata.

`layout` has the file itself: how one sample is read alone, from disk or from a store, and checked, and how states are
compressed. A shard says all that of itself, so shards of every kind may lie in one folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_ray import strict_json
from eagle3_ray.store.filesystem import Damaged, Filesystem, StoreError
from eagle3_ray.store.layout import Columns, write_columns
from eagle3_ray.store.precision import dequantise, finite

STATES = ("aux", "last_hidden")  # what a shard is large by
OFFSETS = {"last_hidden": "target_offsets", "last_rows": "target_offsets"}  # of the columns that have no row a token


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
    aux_scale: Tensor | None = None  # [T, A], as stored in fp8: what each boundary of aux is to be multiplied by


def target_rows(loss_mask: Tensor) -> Tensor:
    """The rows whose last hidden state is a training target: at p, with x_p and x_{p+1} both of the response."""
    mask = loss_mask.bool()  # [T]
    return (mask[:-1] & mask[1:]).nonzero().flatten()  # [R]


# ---------------------------------------------------------------- writing


def write_responses(path: str | Path, responses: Sequence[Response], fingerprint: str) -> None:
    samples = [{"id": r.id, "finish_reasons": r.finish_reasons, "domain": r.domain, "seed": r.seed} for r in responses]
    metadata = {"fingerprint": fingerprint, "samples": strict_json.dumps(samples)}
    write_columns(path, _tokens(responses), {"offsets": _offsets([r.input_ids for r in responses])}, metadata)


def write_features(path: str | Path, features: Sequence[Features], fingerprint: str, compression: str = "none") -> None:
    """`compression` is store.compression; it changes what the shard weighs, and no value in it."""
    for sample in features:
        _check(sample)
    offsets = _offsets([f.input_ids for f in features])
    columns = _tokens(features) | {
        "aux": [f.aux for f in features],  # [N, A*H]
        "last_hidden": [f.last_hidden for f in features],  # [R, H]
        "last_rows": [f.last_rows.long() + n for f, n in zip(features, offsets.tolist(), strict=False)],  # [R] of 0..N
    }
    scales = [f.aux_scale for f in features if f.aux_scale is not None]
    if scales:
        columns["aux_scale"] = scales  # [N, A]
    index = {"offsets": offsets, "target_offsets": _offsets([f.last_rows for f in features])}
    compressed = STATES if compression == "zstd" else ()
    metadata = {"fingerprint": fingerprint, "samples": strict_json.dumps([{"id": f.id} for f in features])}
    write_columns(path, columns, index, metadata, compressed)


def _tokens(samples: Sequence[Response] | Sequence[Features]) -> dict[str, list[Tensor]]:
    for s in samples:
        if len(s.loss_mask) != len(s.input_ids):
            raise StoreError(f"sample {s.id}: {len(s.input_ids)} tokens, but {len(s.loss_mask)} rows of loss_mask")
    return {
        "input_ids": [s.input_ids.to(torch.int32) for s in samples],  # [N]
        "loss_mask": [s.loss_mask.to(torch.uint8) for s in samples],  # [N]
    }


def _offsets(pieces: Sequence[Tensor]) -> Tensor:
    return torch.tensor([0, *map(len, pieces)]).cumsum(0)  # [S+1]


def _check(sample: Features) -> None:
    """One row a token, always: a short record would train on the wrong states. And finite, every value.

    Sums tell, at 20 GB a second of a core in bfloat16, where `isfinite` of each value does 0.8: 6% of the time that the
    shard then takes to write into memory. Of fp8 the scales tell.
    """
    rows, tokens = sample.last_rows, len(sample.input_ids)
    if len(sample.aux) != tokens:
        raise StoreError(f"sample {sample.id}: {tokens} tokens, but {len(sample.aux)} rows of aux")
    if len(sample.last_hidden) != len(rows):
        raise StoreError(f"sample {sample.id}: {len(rows)} last_rows, but {len(sample.last_hidden)} of last_hidden")
    if len(rows) and not (rows[0] >= 0 and rows[-1] < tokens and (rows.diff() > 0).all()):
        raise StoreError(f"sample {sample.id}: last_rows are not ascending within its {tokens} tokens")
    scales = 0 if sample.aux_scale is None else len(sample.aux_scale)
    if scales != tokens * (sample.aux.dtype == torch.float8_e4m3fn):
        raise StoreError(f"sample {sample.id}: {tokens} tokens of {sample.aux.dtype}, but {scales} rows of aux_scale")
    values = {"aux": sample.aux, "last_hidden": sample.last_hidden}
    values |= {} if sample.aux_scale is None else {"aux": sample.aux_scale}
    for name, states in values.items():
        if not finite(states):
            raise StoreError(f"sample {sample.id}: its {name} is not finite")


# ---------------------------------------------------------------- reading


class ShardReader:
    """A shard, open for reading any sample.

    Of a local file the tensors are views, where nothing is compressed. With `files`, `path` is a key of that store, and
    each sample's bytes are read from there and compared with their checksum. Damaged, now or at a sample, where the
    shard holds no such samples as `write_responses` and `write_features` write, or others than a commit has `listed`.
    """

    def __init__(
        self,
        path: str | Path,
        fingerprint: str,
        files: Filesystem | None = None,
        listed: list[dict[str, Any]] | None = None,
    ):
        self._file = Columns(path, fingerprint, OFFSETS, files)
        self._listed = listed
        try:
            self._samples: list[dict[str, Any]] = strict_json.loads(self._file.metadata["samples"])
            self._is_features = "aux" in self._file.columns
            self._check_samples()
            if self._samples:  # else no row says what a column is of
                _check_columns(self._file)
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"shard {self._file.name} cannot be opened: {error}") from None

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def hidden_size(self) -> int:
        """Of features, where there is a sample."""
        return self._file.columns["last_hidden"].kind.shape[0]

    def response(self, i: int) -> Response:
        columns = self._read(i)
        return Response(**self._samples[i], input_ids=columns["input_ids"], loss_mask=columns["loss_mask"])

    def features(self, i: int) -> Features:
        """States that are stored in fp8 come as bfloat16."""
        sample = self.stored(i)
        if sample.aux_scale is not None:
            sample.aux, sample.aux_scale = dequantise(sample.aux, sample.aux_scale), None  # [T, A*H]
        return sample

    def stored(self, i: int) -> Features:
        """The states as they are stored."""
        if not self._is_features:
            raise Damaged(f"shard {self._file.name} holds responses, no features")
        columns = self._read(i)
        rows = columns["last_rows"] - self._file.columns["aux"].rows[i]  # [R]
        if not torch.equal(rows, target_rows(columns["loss_mask"])):
            raise Damaged(f"sample {self._samples[i]['id']} keeps the last hidden state of other rows than its targets")
        return Features(
            **self._samples[i],
            input_ids=columns["input_ids"],  # [T]
            loss_mask=columns["loss_mask"],  # [T]
            aux=columns["aux"],  # [T, A*H]
            last_hidden=columns["last_hidden"],  # [R, H]
            last_rows=rows,
            aux_scale=columns.get("aux_scale"),  # [T, A]
        )

    def _read(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        columns = self._file.read(i)
        mask, name = columns["loss_mask"], self._samples[i]["id"]
        if len(mask) and (mask.max() > 1 or columns["input_ids"].min() < 0):
            raise Damaged(f"sample {name} of shard {self._file.name} has no token ids, or no loss mask")
        columns["loss_mask"] = mask.bool()  # [T]
        if self._listed is not None:
            self._compare(i, {"generated": int(columns["loss_mask"].sum())})
        return columns

    def _check_samples(self) -> None:
        """ValueError unless the metadata tell of each sample what its kind has, and the commit the same of it."""
        samples, tokens = self._samples, self._file.columns["input_ids"].rows
        members = {"id"} if self._is_features else {"id", "finish_reasons", "domain", "seed"}
        if not isinstance(samples, list) or len(samples) != len(tokens) - 1:
            raise ValueError(f"its metadata do not list {len(tokens) - 1} samples")
        for sample in samples:
            if not isinstance(sample, dict) or sample.keys() != members or not isinstance(sample["id"], str):
                raise ValueError(f"its metadata list the sample {sample!r}")
        if self._listed is None:
            return
        if len(self._listed) != len(samples):
            raise ValueError(f"it has {len(samples)} samples, its commit lists {len(self._listed)}")
        for i, sample in enumerate(samples):
            found = {name: value for name, value in sample.items() if name != "seed"}
            found["tokens"] = tokens[i + 1] - tokens[i]
            if self._is_features:
                targets = self._file.columns["last_hidden"].rows
                found["targets"] = targets[i + 1] - targets[i]
            self._compare(i, found)

    def _compare(self, i: int, found: dict[str, Any]) -> None:
        assert self._listed is not None
        for name, value in found.items():
            said = self._listed[i].get(name)
            if said != value:
                raise Damaged(
                    f"shard {self._file.name}: sample {self._samples[i]['id']}: {name} is {strict_json.dumps(value)}, "
                    f"its commit says {strict_json.dumps(said)}"
                )


def _check_columns(file: Columns) -> None:
    """ValueError unless the columns are those of responses or of features, and their rows fit each other."""
    kinds = {name: (column.kind.dtype, column.kind.shape) for name, column in file.columns.items()}
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "input_ids": (torch.int32, ()),
        "loss_mask": (torch.uint8, ()),
    }
    if "aux" in kinds:
        (dtype, (width,)), (last_dtype, (hidden,)) = kinds["aux"], kinds["last_hidden"]
        if not dtype.is_floating_point or not last_dtype.is_floating_point or not hidden or width % hidden:
            raise ValueError(f"its states are {kinds['aux']} and {kinds['last_hidden']}")
        wanted |= {"aux": kinds["aux"], "last_hidden": kinds["last_hidden"], "last_rows": (torch.int64, ())}
        if dtype == torch.float8_e4m3fn:
            wanted["aux_scale"] = (torch.float32, (width // hidden,))
    if kinds != wanted:
        raise ValueError(f"its columns are {kinds}, not {wanted}")
