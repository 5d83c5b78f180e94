"""Single tensors of a folder of safetensors files, on disk or in a bucket, without the rest of it.

Of each file that is looked into the header is read, and of a tensor its own bytes, in pieces and several at a time: so
a few GB come out of hundreds. Where there is an index (model.safetensors.index.json), the other files stay closed.
Format: https://github.com/huggingface/safetensors#format.

Files of our own, checkpoints above all, are written and read whole (`write_tensors`, `read_tensors`), with a digest.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from eagle3_ray import strict_json
from eagle3_ray.leftovers import temporary_folder
from eagle3_ray.store.filesystem import Damaged, Filesystem, StoreError, checked
from eagle3_ray.store.layout import DTYPES, MAX_HEADER
from eagle3_ray.store.parallel import in_parallel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PIECE_BYTES = 32 * 2**20  # of one request, which has a time limit
READERS = 8
DIGEST = "sha256"  # in the metadata of a file that `write_tensors` wrote: of all else in it
STORED = DTYPES | {"BOOL": torch.bool, "F64": torch.float64}


def write_tensors(files: Filesystem, key: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Put tensors as one object. Their digest costs 0.8 s a GB of one core."""
    files.write(key, save(tensors, metadata | {DIGEST: _digest(tensors, metadata)}))


def read_tensors(files: Filesystem, key: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `write_tensors` put there, tensors and metadata. Damaged where it is anything else, also when read again."""
    for last in (False, True):  # what comes from a remote store may be damaged on its way
        with temporary_folder() as folder:
            local = folder / "tensors"
            files.download(key, local)
            try:
                tensors = load_file(local)
                with safe_open(local, "pt") as file:
                    metadata: dict[str, str] = file.metadata() or {}
            except SafetensorError as error:
                fault = str(error)
            else:
                expected = metadata.pop(DIGEST, None)  # none was written before there were digests
                if expected in (None, _digest(tensors, metadata)):
                    return tensors, metadata
                fault = "it does not fit its digest"
        if last or files.local:
            break
    raise Damaged(f"{files.url(key)} is not what was written: {fault}")


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    about = {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
    digest = hashlib.sha256(strict_json.dumps([about, metadata], sort_keys=True).encode())
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Source(Protocol):
    """Where the files are: a `Filesystem`, or a model hub."""

    def url(self, key: str) -> str: ...

    def read(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """The file, or its bytes start:end; FileNotFoundError where there is none."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies."""

    file: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    begin: int  # in the file
    end: int


class Tensors:
    """A folder's tensors, by name. FileNotFoundError where it holds no safetensors, StoreError for damaged ones."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._headers: dict[str, dict[str, Entry]] = {}
        try:
            self._file_of = _weight_map(source.read(INDEX))
        except FileNotFoundError:
            self._file_of = dict.fromkeys(self._header(SINGLE), SINGLE)
        except ValueError as error:
            raise StoreError(f"{source.url(INDEX)} is no index of safetensors files: {error}") from None

    def names(self) -> list[str]:
        return list(self._file_of)

    def entry(self, name: str) -> Entry:
        header = self._header(self._file_of[name])
        if name not in header:
            raise StoreError(f"{self._source.url(self._file_of[name])} holds no {name}, against what {INDEX} says")
        return header[name]

    def read(self, name: str) -> Tensor:
        entry = self.entry(name)
        size = entry.end - entry.begin
        if entry.dtype not in STORED or size != math.prod(entry.shape) * STORED[entry.dtype].itemsize:
            raise StoreError(f"{self._source.url(entry.file)}: {name} is {size} bytes of {entry.dtype} {entry.shape}")
        if not size:
            return torch.empty(entry.shape, dtype=STORED[entry.dtype])
        data = bytearray(size)

        def fill(start: int) -> None:
            end = min(start + PIECE_BYTES, size)
            piece = self._source.read(entry.file, entry.begin + start, entry.begin + end)
            if len(piece) != end - start:
                raise StoreError(f"{self._source.url(entry.file)} ends before its tensor {name} does")
            data[start:end] = piece

        for _ in in_parallel(fill, range(0, size, PIECE_BYTES), READERS):
            pass
        return torch.frombuffer(data, dtype=STORED[entry.dtype]).view(entry.shape)

    def _header(self, file: str) -> dict[str, Entry]:
        if file not in self._headers:
            length = int.from_bytes(self._source.read(file, 0, 8), "little")
            try:
                if not 0 < length <= MAX_HEADER:
                    raise ValueError(f"a header of {length} bytes")
                header = strict_json.loads(self._source.read(file, 8, 8 + length))
                header.pop("__metadata__", None)
                self._headers[file] = {name: _entry(file, about, 8 + length) for name, about in header.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise StoreError(f"{self._source.url(file)} is no safetensors file: {error!r}") from None
        return self._headers[file]


def _weight_map(data: bytes) -> dict[str, str]:
    """The file of each tensor; ValueError where the index names none, or one that lies elsewhere."""
    index = strict_json.loads(data)
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError("it has no weight_map")
    return {name: checked(file) for name, file in found.items()}


def _entry(file: str, about: dict[str, Any], start: int) -> Entry:
    dtype, shape, (begin, end) = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)) or begin > end:
        raise ValueError(f"a tensor of {dtype} {shape} at {begin}:{end}")
    return Entry(file, dtype, tuple(shape), start + begin, start + end)
