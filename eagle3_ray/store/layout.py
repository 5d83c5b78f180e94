"""The bytes of a shard: a safetensors file of columns, in each of which the samples' pieces lie end to end.

Header and index come first, then the columns. So a file is read by memory map, or straight from a store by byte
ranges, and either way one sample costs its own bytes and no more. A range has no file's checksum to lean on: `crc32`,
the last of the index, has one of each sample's stored bytes, and one of all that lies before it. A compressed column is
a tensor of bytes; the metadata say what they hold, and `<name>.blocks` in the index where its blocks end.

A header can be made to say anything, with checksums that fit. So every number of it is held against the others and the
file's size before it is used, and whatever still cannot be read ends in a `Damaged` that names the shard.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3_ray import strict_json
from eagle3_ray.store.blocks import block_rows, compress, decompress
from eagle3_ray.store.filesystem import Damaged, Filesystem, StoreError

FORMAT = "2"
# As safetensors names them
NAMES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
MAX_HEADER = 100 * 2**20  # bytes; safetensors' own limit
MOST_ROW = 2**28  # bytes of one row, far above any state's: what a header claims is allocated before it is read
MOST_BLOCK = 2**26  # bytes of a block that is more than one row
FIRST_READ = 2**16  # bytes: of most shards the whole of header and index
AHEAD = 64  # blocks that are encoded, and wait to be written, at a time
SMALL = 2**16  # bytes: blocks that are not worth a thread
_pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "shard")


@dataclass(frozen=True)
class Kind:
    """What the rows of a column are, and how many a block holds where it is compressed."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of one row
    block: int | None = None

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self, rows: int) -> list[int]:
        """The rows of each block of a sample that has so many. All are one block where nothing is compressed."""
        step = self.block or max(1, rows)
        return [min(step, rows - at) for at in range(0, rows, step)]


# ---------------------------------------------------------------- writing


def write_columns(
    path: str | Path,
    columns: dict[str, list[Tensor]],
    index: dict[str, Tensor],
    metadata: dict[str, str],
    compressed: Sequence[str] = (),
) -> None:
    """Columns are given in pieces, one a sample: https://github.com/huggingface/safetensors#format.

    Header and index are written last, into room left for them: only then are checksums and compressed sizes known.
    """
    kinds = {name: _kind(name, pieces, name in compressed) for name, pieces in columns.items()}
    # Wide types first, so that each tensor is aligned wherever the one before it ends
    kinds = dict(sorted(kinds.items(), key=lambda item: -1 if item[1].block else -item[1].dtype.itemsize))
    rows = {name: sum(map(len, columns[name])) for name in kinds}
    blocks = {name: _blocks(columns[name], kind) for name, kind in kinds.items()}
    sizes = {name: rows[name] * kind.row_bytes for name, kind in kinds.items()}
    ends = {f"{name}.blocks": torch.zeros(len(blocks[name]) + 1, dtype=torch.int64) for name in compressed}  # [B+1]
    checks = [0] * max(map(len, columns.values()))
    index = {**index, **ends, "crc32": torch.zeros(len(checks) + 1, dtype=torch.int64)}  # last: it covers the others
    guess = {name: 2 * size + 99 * len(blocks[name]) if kinds[name].block else size for name, size in sizes.items()}
    room = len(_header(kinds, rows, guess, index, metadata))  # no true size has more digits
    with open(path, "wb") as file:
        file.seek(room + sum(tensor.nbytes for tensor in index.values()))
        for name, kind in kinds.items():
            written = [0]
            for (sample, _), (data, crc) in zip(blocks[name], _encoded(blocks[name], kind), strict=True):
                file.write(data)
                checks[sample] = _joined(checks[sample], crc)
                written.append(written[-1] + len(data))
            if kind.block:
                sizes[name], index[f"{name}.blocks"] = written[-1], torch.tensor(written)
        prefix = _header(kinds, rows, sizes, index, metadata, room)
        prefix += b"".join(tensor.numpy().tobytes() for name, tensor in index.items() if name != "crc32")
        index["crc32"] = torch.tensor([*checks, zlib.crc32(prefix)])  # [S+1]
        file.seek(0)
        file.write(prefix + index["crc32"].numpy().tobytes())


def _kind(name: str, pieces: list[Tensor], compressed: bool) -> Kind:
    kinds = {Kind(piece.dtype, tuple(piece.shape[1:])) for piece in pieces} or {Kind(torch.float32, ())}
    if len(kinds) > 1:
        raise StoreError(f"{name} differs from sample to sample in dtype or width: {sorted(map(str, kinds))}")
    (kind,) = kinds
    return Kind(kind.dtype, kind.shape, block_rows(kind.row_bytes)) if compressed else kind


def _blocks(pieces: list[Tensor], kind: Kind) -> list[tuple[int, Tensor]]:
    """Every block of a column, with the number of its sample."""
    return [(i, block) for i, piece in enumerate(pieces) for block in piece.split(kind.blocks(len(piece)))]


def _encoded(blocks: list[tuple[int, Tensor]], kind: Kind) -> Iterator[tuple[Any, int]]:
    """Each block's stored bytes and their crc32. Where blocks are large, threads make them ahead of the writing."""

    def encode(item: tuple[int, Tensor]) -> tuple[Any, int]:
        block = item[1].detach().cpu().contiguous()
        data = compress(block) if kind.block else block.flatten().view(torch.uint8).numpy().data
        return data, zlib.crc32(data)

    if sum(block.nbytes for _, block in blocks) < SMALL * len(blocks):
        yield from map(encode, blocks)
        return
    for at in range(0, len(blocks), AHEAD):
        yield from _pool.map(encode, blocks[at : at + AHEAD])


def _header(
    kinds: dict[str, Kind],
    rows: dict[str, int],
    sizes: dict[str, int],
    index: dict[str, Tensor],
    metadata: dict[str, str],
    room: int = 0,
) -> bytes:
    """The file up to its first tensor, filled up with blanks to `room` bytes, or to where that tensor is aligned."""
    stored = {name: ("I64", list(tensor.shape), tensor.nbytes) for name, tensor in index.items()}
    for name, kind in kinds.items():
        plain = (NAMES[kind.dtype], [rows[name], *kind.shape], sizes[name])
        stored[name] = ("U8", [sizes[name]], sizes[name]) if kind.block else plain
    packed = {name: (NAMES[kind.dtype], kind.shape, kind.block) for name, kind in kinds.items() if kind.block}
    header: dict[str, Any] = {"__metadata__": metadata | {"format": FORMAT, "compressed": strict_json.dumps(packed)}}
    at = 0
    for name, (dtype, shape, size) in stored.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = strict_json.dumps(header).encode()
    text += b" " * (room - 8 - len(text) if room else -len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _joined(check: int, crc: int) -> int:
    """A checksum of what `check` covers and then of what `crc` does."""
    return zlib.crc32(crc.to_bytes(4, "little"), check)


# ---------------------------------------------------------------- reading


class Source(Protocol):
    """Where a shard's bytes are."""

    checked: bool  # as a whole, by the sha256 of its commit

    def read(self, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The bytes begin:end of each span, fewer where the shard ends before."""


class Mapped:
    """A local file. Nothing is copied."""

    checked = True

    def __init__(self, path: str | Path):
        self._bytes = torch.from_file(str(path), shared=False, size=os.stat(path).st_size, dtype=torch.uint8)

    def read(self, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        return [self._bytes[begin:end] for begin, end in spans]


class Ranges:
    """An object of a store. Only what is asked for is read, several ranges at a time."""

    checked = False

    def __init__(self, files: Filesystem, key: str):
        self._files, self._key = files, key

    def read(self, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        return list(_pool.map(self._range, spans))

    def _range(self, span: tuple[int, int]) -> Tensor:
        data = self._files.read(self._key, *span) if span[0] < span[1] else b""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Column:
    """Where the pieces of one column lie."""

    kind: Kind
    begin: int  # in the file
    rows: list[int]  # [S+1] at which each sample begins
    blocks: list[int]  # [S+1] the same of its blocks, and
    ends: list[int]  # [B+1] where those end, from `begin` on; both empty where nothing is compressed

    def piece(self, sample: int) -> tuple[list[int], list[int]]:
        """The rows of each of the sample's blocks, and the places in the file between which the blocks lie."""
        first, last = self.rows[sample : sample + 2]
        rows = self.kind.blocks(last - first)
        if self.kind.block:
            ends = self.ends[self.blocks[sample] : self.blocks[sample + 1] + 1]
        else:
            ends = [row * self.kind.row_bytes for row in itertools.accumulate(rows, initial=first)]
        return rows, [self.begin + end for end in ends]


class Columns:
    """An open file: its metadata, and of each sample the piece of every column.

    Without `files`, `path` is a local file; with it, an object's key. `offsets` names, for each column, the tensor of
    the index that says where the samples' rows begin.
    """

    def __init__(self, path: str | Path, fingerprint: str, offsets: dict[str, str], files: Filesystem | None = None):
        self.name = str(path) if files is None else files.url(str(path))
        try:
            self._source: Source = Mapped(path) if files is None else Ranges(files, str(path))
            header, begin = self._read_header()
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            for name, expected in (("format", FORMAT), ("fingerprint", fingerprint)):
                found = self.metadata.get(name)
                if found != expected:
                    raise Damaged(f"shard {self.name} has the {name} {found!r}, this run reads {expected!r}")
            self._read_index(header, begin, offsets)
        except StoreError:
            raise
        except Exception as error:  # whatever a damaged header leads to
            raise Damaged(f"shard {self.name} cannot be opened: {error}") from error

    def read(self, sample: int) -> dict[str, Tensor]:
        """The sample's rows of each column: views of the file where it is local and they are not compressed."""
        try:
            return self._values(self._stored(sample))
        except (StoreError, FileNotFoundError):
            raise
        except Exception as error:  # whatever bytes lead to that fit their checksums and no column
            raise Damaged(f"shard {self.name}: its sample {sample} cannot be read: {error}") from error

    def _stored(self, sample: int) -> dict[str, tuple[list[int], Tensor, tuple[Tensor, ...]]]:
        """Of each column: the rows of the sample's blocks, its stored bytes, and those block by block."""
        pieces = {name: column.piece(sample) for name, column in self.columns.items()}
        data = self._source.read([(ends[0], ends[-1]) for _, ends in pieces.values()])
        found = {}
        for (name, (rows, ends)), stored in zip(pieces.items(), data, strict=True):
            if len(stored) != ends[-1] - ends[0]:
                raise Damaged(f"shard {self.name} ends before its sample {sample} does")
            found[name] = rows, stored, stored.split([end - begin for begin, end in itertools.pairwise(ends)])
        if not self._source.checked:
            crcs = _pool.map(_crc32, itertools.chain.from_iterable(blocks for _, _, blocks in found.values()))
            if functools.reduce(_joined, crcs, 0) != self._crc32[sample]:
                raise Damaged(f"shard {self.name}: the bytes of its sample {sample} are not those that were written")
        return found

    def _values(self, stored: dict[str, tuple[list[int], Tensor, tuple[Tensor, ...]]]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        packed: list[tuple[Tensor, Tensor]] = []  # a block, and the rows to fill from it
        for name, (rows, data, blocks) in stored.items():
            kind = self.columns[name].kind
            shape = (sum(rows), *kind.shape)
            if kind.block:
                values[name] = torch.empty(shape, dtype=kind.dtype)
                packed += zip(blocks, values[name].split(rows), strict=True)
            else:
                values[name] = data.view(kind.dtype).view(shape)
        list(_pool.map(lambda pair: decompress(*pair), packed))
        return values

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """The header, and where it ends."""
        (self._prefix,) = self._source.read([(0, FIRST_READ)])
        end = 8 + int.from_bytes(self._up_to(8), "little")
        if end > MAX_HEADER:
            raise ValueError("it does not begin as a safetensors file")
        return strict_json.loads(self._up_to(end)[8:]), end

    def _read_index(self, header: dict[str, Any], begin: int, offsets: dict[str, str]) -> None:
        placed = dict(_placed(header, begin))
        names = list(placed)
        columns = names[names.index("crc32") + 1 :]
        data = self._up_to(placed["crc32"].end)
        index = {name: _numbers(name, placed[name], data) for name in names if name not in columns}
        *self._crc32, whole = index["crc32"]
        if zlib.crc32(data[: placed["crc32"].begin]) != whole:
            raise ValueError("its header and index are not those that were written")
        if self._source.checked and len(self._source.read([(placed[names[-1]].end - 1, 2**62)])[0]) != 1:
            raise ValueError("it does not end where its header says")
        packed = strict_json.loads(self.metadata["compressed"])
        self.columns: dict[str, Column] = {}
        for name in columns:
            where, of = placed[name], offsets.get(name, "offsets")
            kind, rows = _kind_of(where, packed.get(name)), index[of]
            _check_ascending(of, rows, len(self._crc32), None if kind.block else where.shape[0])
            if not kind.block:
                self.columns[name] = Column(kind, where.begin, rows, [], [])
                continue
            counts = [len(kind.blocks(after - before)) for before, after in itertools.pairwise(rows)]
            blocks, ends = list(itertools.accumulate(counts, initial=0)), index[f"{name}.blocks"]
            _check_ascending(f"{name}.blocks", ends, blocks[-1], where.end - where.begin)
            self.columns[name] = Column(kind, where.begin, rows, blocks, ends)

    def _up_to(self, end: int) -> bytes:
        """The file's first bytes; those that are not here yet are read."""
        have = len(self._prefix)
        if have < end:
            self._prefix = torch.cat([self._prefix, *self._source.read([(have, end)])])
        if len(self._prefix) < end:
            raise ValueError("it ends early")
        return self._prefix[:end].numpy().tobytes()


def _crc32(block: Tensor) -> int:
    return zlib.crc32(block.numpy().data)


# ---------------------------------------------------------------- what a header may say


@dataclass(frozen=True)
class _Place:
    """One tensor of the file."""

    dtype: torch.dtype
    shape: list[int]
    begin: int  # in the file
    end: int


def _placed(header: dict[str, Any], start: int) -> Iterator[tuple[str, _Place]]:
    """Each tensor by its name. They lie end to end from `start` on, each with the bytes of its dtype and shape."""
    at = start
    for name, about in header.items():
        dtype, shape, (begin, end) = DTYPES[about["dtype"]], about["shape"], about["data_offsets"]
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name} has the shape {shape}")
        size = math.prod(shape) * dtype.itemsize
        if (start + begin, start + end) != (at, at + size):
            raise ValueError(f"{name} lies at {begin}:{end}, not at {at - start}:{at - start + size}")
        yield name, _Place(dtype, shape, at, at := at + size)


def _numbers(name: str, place: _Place, data: bytes) -> list[int]:
    """A tensor of the index; `data` is the file up to its end at least."""
    if place.dtype != torch.int64 or len(place.shape) != 1 or not place.shape[0]:
        raise ValueError(f"{name} of its index is no list of numbers")
    return torch.frombuffer(bytearray(data[place.begin : place.end]), dtype=torch.int64).tolist()


def _kind_of(place: _Place, packed: Any) -> Kind:
    """What a column's rows are, as the header has it or, of a compressed one, the metadata."""
    if packed is None:
        dtype, shape, block = place.dtype, place.shape[1:], None
        plausible = len(place.shape) > 0
    else:
        name, shape, block = packed
        dtype = DTYPES[name]
        plausible = place.dtype == torch.uint8 and len(place.shape) == 1 and type(block) is int and block > 0
        plausible = plausible and all(type(size) is int and size > 0 for size in shape)
    kind = Kind(dtype, tuple(shape), block)
    if not plausible or kind.row_bytes > MOST_ROW or (block or 1) > max(1, MOST_BLOCK // max(1, kind.row_bytes)):
        raise ValueError(f"it has a column of {kind}")
    return kind


def _check_ascending(name: str, values: list[int], pieces: int, end: int | None) -> None:
    """`values` are the bounds of so many pieces, from 0 on, and up to `end` where that is known."""
    if len(values) != pieces + 1 or values[0] != 0 or any(a > b for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name} of its index are not the bounds of {pieces} pieces")
    if end is not None and values[-1] != end:
        raise ValueError(f"{name} of its index end at {values[-1]}, not at {end}")
