"""What counts as done: a unit is captured when its commit exists, and never before.

A commit is one small JSON object, made with create-if-absent after its shard is whole. So of several attempts at one
unit (a retry, two actors, a run started twice) exactly one is ever seen, and a crash at any moment leaves either a
whole unit or garbage that no commit names. There is no index to keep in step: readers list the commits.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from eagle3_ray.store.cache import Cache
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.parallel import in_parallel

if TYPE_CHECKING:
    from eagle3_ray.store.shards import ShardReader

File = tuple[str, int, int, int]  # path, inode, size, time of change
_verified: set[tuple[File, str]] = set()  # the shards that this process has checked, with their sha256


@dataclass(frozen=True)
class Commit:
    """One finished unit."""

    unit: str
    shard: str  # key below the store's root
    size: int  # bytes
    sha256: str
    samples: list[dict[str, Any]]  # the index, in the shard's order: id, domain, tokens, …
    facts: dict[str, Any]  # about the unit: counts, timings, whatever its stage wants to keep


class Units:
    """One set of units, responses/<fingerprint>/ or features/<fingerprint>/, and its description."""

    def __init__(self, files: Filesystem, kind: str, fingerprint: str):
        self.files = files
        self.folder = f"{_name(kind)}/{_name(fingerprint)}"

    def describe(self, description: dict[str, Any]) -> None:
        """Record what the fingerprint stands for; refuse another description under the same fingerprint."""
        self.record("description", description)

    def record(self, name: str, value: dict[str, Any]) -> None:
        """Keep <name>.json for good. StoreError, line by line, where another value is kept already."""
        key, data = f"{self.folder}/{_name(name)}.json", _json(value)
        if self.files.create(key, data):
            return
        stored, now = _flat(json.loads(self.files.read(key))), _flat(json.loads(data))
        differ = sorted(name for name in stored.keys() | now.keys() if stored.get(name) != now.get(name))
        if differ:
            lines = [f"  {name}: stored {stored.get(name, 'none')}, now {now.get(name, 'none')}" for name in differ]
            raise StoreError("\n".join([f"{self.files.url(key)} describes something else:", *lines]))

    def description(self) -> dict[str, Any]:
        try:
            return json.loads(self.files.read(self._description))
        except FileNotFoundError as error:
            raise StoreError(f"nothing is stored here yet: no {self.files.url(self._description)}") from error

    def commit(self, unit: str, shard: Path, samples: list[dict[str, Any]], **facts: Any) -> bool:
        """Store a local shard as this unit; False when another attempt was first."""
        commit_key = self._commit_key(unit)
        if self.has(unit):
            return False
        key = f"{self.folder}/shards/{unit}.{uuid4().hex[:12]}.safetensors"
        commit = Commit(unit, key, shard.stat().st_size, _sha256(shard), samples, facts)
        self.files.upload(shard, key)
        if self.files.create(commit_key, _json(asdict(commit))):
            return True
        if self.read_commit(unit).shard == key:  # it was created, only the answer was lost: the shard is in use
            return True
        self.files.delete(key)
        return False

    def has(self, unit: str) -> bool:
        """Whether this unit is finished: one request, where `committed` lists them all."""
        return self.files.exists(self._commit_key(unit))

    def committed(self) -> list[str]:
        """The names of the finished units, sorted."""
        folder = f"{self.folder}/commits/"
        keys = self.files.list(folder)
        return sorted(key.removeprefix(folder).removesuffix(".json") for key in keys)

    def read_commit(self, unit: str) -> Commit:
        return Commit(**json.loads(self.files.read(self._commit_key(unit))))

    def commits(self) -> list[Commit]:
        """Every finished unit, sorted by name."""
        return list(in_parallel(self.read_commit, self.committed()))

    def open(self, commit: Commit, cache: Cache) -> ShardReader:
        """The unit's shard, verified."""
        from eagle3_ray.store.shards import ShardReader  # torch: who only commits shards needs none

        while True:
            path = self.fetch(commit, cache)
            file = _identity(path)
            try:
                return ShardReader(path, self.folder.rpartition("/")[2])
            except Exception:
                if file and file == _identity(path):
                    raise  # else another process of the node made room just now

    def fetch(self, commit: Commit, cache: Cache) -> Path:
        """A local path of the unit's shard: the file itself on local disk, else a copy in the cache.

        Size and checksum are compared with the commit at the first read in this process. A copy that fails may have
        been damaged on the way or in the cache, so it is downloaded once more; the store's own file is not forgiven.
        """
        url = self.files.url(commit.shard)
        path = Path(url) if self.files.local else cache.path(commit.shard)
        fault = _fault(path, commit)
        if fault and not self.files.local:
            with cache.adding(commit.shard, commit.size):
                for _ in range(2):
                    fault = _fault(path, commit)  # another process may have fetched it in the meantime
                    if not fault:
                        break
                    with suppress(FileNotFoundError):
                        self.files.download(commit.shard, path)
                fault = _fault(path, commit)
        if fault:
            raise StoreError(f"shard {url} {fault}; delete {self.files.url(self._commit_key(commit.unit))} to redo it")
        if not self.files.local:
            cache.used(path)
        return path

    @property
    def _description(self) -> str:
        return f"{self.folder}/description.json"

    def _commit_key(self, unit: str) -> str:
        return f"{self.folder}/commits/{_name(unit)}.json"


def _fault(path: Path, commit: Commit) -> str | None:
    """What is wrong with a local shard. The whole file is read once; after that its size alone is compared."""
    file = _identity(path)
    if not file:
        return "is missing"
    if (file, commit.sha256) in _verified:
        return None
    fault = fault_of_bytes(path, commit)
    if not fault:
        _verified.add((file, commit.sha256))
    return fault


def fault_of_bytes(path: Path, commit: Commit) -> str | None:
    """What tells a local shard's bytes, all of them read, from those that were committed."""
    try:
        size = path.stat().st_size
        sha256 = _sha256(path) if size == commit.size else None
    except FileNotFoundError:
        return "is missing"
    if sha256 is None:
        return f"has {size} bytes, its commit says {commit.size}"
    return None if sha256 == commit.sha256 else f"has the sha256 {sha256}, its commit says {commit.sha256}"


def _identity(path: Path) -> File | None:
    """What tells one file from another that takes its name."""
    try:
        seen = path.stat()
    except FileNotFoundError:
        return None
    return str(path), seen.st_ino, seen.st_size, seen.st_mtime_ns


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def _name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise StoreError(f"{name!r} cannot name a unit or a fingerprint: letters, digits, '_', '.' and '-' only")
    return name


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode()


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Each setting by its dotted name, its value as JSON."""
    if not isinstance(value, dict) or not value:
        return {name: json.dumps(value)}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{name}.{key}" if name else key).items()}
