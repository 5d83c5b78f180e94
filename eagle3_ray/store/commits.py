"""What counts as done: a unit is captured when its commit exists, and never before.

A commit is one small JSON object, made with create-if-absent after its shard is whole. So of several attempts at one
unit (a retry, two actors, a run started twice) exactly one is ever seen, and a crash at any moment leaves either a
whole unit or garbage that no commit names. There is no index to keep in step: readers list the commits.

No reader believes a commit before it was held against the place where it lies (`_parsed`), against the others of its
folder (`commits`), and against the shard that it names (`open`).
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from eagle3_ray import strict_json
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.filesystem import Damaged, Filesystem, StoreError
from eagle3_ray.store.parallel import in_parallel

if TYPE_CHECKING:
    from eagle3_ray.store.shards import ShardReader

NAME = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,100}")  # of a unit or a fingerprint, and of whatever else becomes a key
DECIDES_NOTHING = ("shard_bytes",)  # of a description: how features are cut is no part of their fingerprint
File = tuple[str, int, int, int]  # path, inode, size, time of change
_verified: set[tuple[File, str]] = set()  # the shards that this process has checked, with their sha256


@dataclass(frozen=True)
class Commit:
    """One finished unit."""

    unit: str
    shard: str  # key below the store's root
    size: int  # bytes
    sha256: str
    samples: list[dict[str, Any]]  # the index, in the shard's order: id, and what INDEX names
    facts: dict[str, Any]  # about the unit: counts, timings, whatever its stage wants to keep


class Units:
    """One set of units, responses/<fingerprint>/ or features/<fingerprint>/, and its description."""

    def __init__(self, files: Filesystem, kind: str, fingerprint: str):
        self.files, self.kind, self.fingerprint = files, _name(kind), _name(fingerprint)
        self.folder = f"{kind}/{fingerprint}"

    def describe(self, description: dict[str, Any]) -> None:
        """Record what the fingerprint stands for; refuse another description under the same fingerprint."""
        self.record("description", description)

    def record(self, name: str, value: dict[str, Any]) -> None:
        """Keep <name>.json for good. StoreError, line by line, where another value is kept already."""
        key = f"{self.folder}/{_name(name)}.json"
        if self.files.create_json(key, value):
            return
        stored, now = _flat(self.files.read_json(key)), _flat(strict_json.loads(strict_json.dumps(value)))
        differ = sorted(name for name in stored.keys() | now.keys() if stored.get(name) != now.get(name))
        if differ:
            lines = [f"  {name}: stored {stored.get(name, 'none')}, now {now.get(name, 'none')}" for name in differ]
            raise StoreError("\n".join([f"{self.files.url(key)} describes something else:", *lines]))

    def description(self) -> dict[str, Any]:
        """What the fingerprint stands for. StoreError where there is none, Damaged where it is another's."""
        try:
            found = self.files.read_json(self._description)
        except FileNotFoundError as error:
            raise StoreError(f"nothing is stored here yet: no {self.files.url(self._description)}") from error
        decides = {name: value for name, value in found.items() if name not in DECIDES_NOTHING}
        if strict_json.fingerprint(decides) != self.fingerprint:
            raise Damaged(f"{self.files.url(self._description)} describes something else than its folder's name")
        return found

    def commit(self, unit: str, shard: Path, samples: list[dict[str, Any]], **facts: Any) -> bool:
        """Store a local shard as this unit; False when another attempt was first."""
        if self.has(unit):
            return False
        key = f"{self.folder}/shards/{unit}.{uuid4().hex[:12]}.safetensors"
        commit = Commit(unit, key, shard.stat().st_size, _sha256(shard), samples, facts)
        self.files.upload(shard, key)
        if self.create(commit):
            return True
        if self.read_commit(unit).shard == key:  # it was created, only the answer was lost: the shard is in use
            return True
        self.files.delete(key)
        return False

    def create(self, commit: Commit) -> bool:
        """Finish a unit whose shard is stored; False where it is finished."""
        return self.files.create_json(self._commit_key(commit.unit), asdict(commit))

    def has(self, unit: str) -> bool:
        """Whether this unit is finished: one request, where `committed` lists them all."""
        return self.files.exists(self._commit_key(unit))

    def committed(self) -> list[str]:
        """The names of the finished units, sorted; Damaged where something else lies among their commits."""
        return sorted(self.unit_of(key) for key in self.files.list(f"{self.folder}/commits"))

    def unit_of(self, key: str) -> str:
        """The unit whose commit has this key."""
        unit = key.removeprefix(f"{self.folder}/commits/").removesuffix(".json")
        if not NAME.fullmatch(unit) or key != self._commit_key(unit):
            raise Damaged(f"{self.files.url(key)} is no commit; remove it")
        return unit

    def read_commit(self, unit: str) -> Commit:
        """The commit of a finished unit; Damaged where what lies there cannot be it."""
        key = self._commit_key(unit)
        found = self.files.read_json(key)
        try:
            return _parsed(found, self.kind, self.folder, unit)
        except ValueError as error:
            raise Damaged(f"{self.files.url(key)} is not the commit of unit {unit}: {error}") from None

    def commits(self, units: list[str] | None = None) -> list[Commit]:
        """Every finished unit, sorted by name, or those named, in their order. Damaged as `read_commit`, and where two
        hold a sample of the same id."""
        found = list(in_parallel(self.read_commit, self.committed() if units is None else units))
        for sample, one, other in doubled(found):
            raise Damaged(f"{self.files.url(self.folder)}: sample {sample!r} is in the units {one} and {other}")
        return found

    def open(self, commit: Commit, cache: Cache) -> ShardReader:
        """The unit's shard, verified: its bytes, and that its samples are those that the commit lists."""
        from eagle3_ray.store.shards import ShardReader  # torch: who only commits shards needs none

        while True:
            path = self.fetch(commit, cache)
            file = _identity(path)
            try:
                return ShardReader(path, self.fingerprint, listed=commit.samples)
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
            fault = self._copy(commit, cache)
        if fault:
            raise Damaged(f"shard {url} {fault}; delete {self.files.url(self._commit_key(commit.unit))} to redo it")
        if not self.files.local:
            cache.used(path)
        return path

    def _copy(self, commit: Commit, cache: Cache) -> str | None:
        """Bring the shard into the cache; what is wrong with it there, if anything is."""
        try:
            size = self.files.size(commit.shard)
        except (FileNotFoundError, NotADirectoryError):
            return "is missing"
        if size != commit.size:  # told before other copies make room for so many bytes
            return f"has {size} bytes, its commit says {commit.size}"
        path = cache.path(commit.shard)
        with cache.adding(commit.shard, commit.size):
            for _ in range(2):
                if not _fault(path, commit):  # another process may have fetched it in the meantime
                    return None
                with suppress(FileNotFoundError):
                    self.files.download(commit.shard, path)
            return _fault(path, commit)

    @property
    def _description(self) -> str:
        return f"{self.folder}/description.json"

    def _commit_key(self, unit: str) -> str:
        return f"{self.folder}/commits/{_name(unit)}.json"


# ---------------------------------------------------------------- what a commit may say


def _parsed(found: dict[str, Any], kind: str, folder: str, unit: str) -> Commit:
    """The commit that lies in `folder` under the name of `unit`; ValueError where it cannot be that."""
    if found.keys() != Commit.__dataclass_fields__.keys():
        raise ValueError(f"it has the members {sorted(found)}")
    commit = Commit(**found)
    if commit.unit != unit:
        raise ValueError(f"it is that of unit {commit.unit!r}")
    shard = rf"{re.escape(folder)}/shards/{re.escape(unit)}\.[0-9a-f]{{12}}\.safetensors"
    if not isinstance(commit.shard, str) or not re.fullmatch(shard, commit.shard):
        raise ValueError(f"its shard is {commit.shard!r}, and not one of this unit in this folder")
    if not _is_count(commit.size):
        raise ValueError(f"its size is {commit.size!r}")
    if not isinstance(commit.sha256, str) or not re.fullmatch("[0-9a-f]{64}", commit.sha256):
        raise ValueError(f"its sha256 is {commit.sha256!r}")
    if not isinstance(commit.samples, list) or not all(isinstance(sample, dict) for sample in commit.samples):
        raise ValueError("its samples are no list of objects")
    for number, sample in enumerate(commit.samples):
        for name, holds in INDEX.items():
            if not holds(sample.get(name)) and (name != "targets" or kind == "features"):
                raise ValueError(f"{name} of its sample {number} is {sample.get(name)!r}")
    if not isinstance(commit.facts, dict) or not _are_failures(commit.facts.get("failed", [])):
        raise ValueError("its facts are no object, or do not list failed samples by id and reason")
    for name, _, _ in doubled([commit]):
        raise ValueError(f"it lists sample {name!r} twice")
    return commit


def doubled(commits: Iterable[Commit]) -> list[tuple[str, str, str]]:
    """Each sample that is there again, and the two units that have it."""
    unit_of: dict[str, str] = {}
    found = []
    for commit in commits:
        for sample in commit.samples:
            name = sample["id"]
            if name in unit_of:
                found.append((name, unit_of[name], commit.unit))
            unit_of[name] = commit.unit
    return found


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _are_failures(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and _are_texts([one.get("id"), one.get("reason")]) for one in value
    )


# Of each sample; the targets of features alone
INDEX: dict[str, Callable[[Any], bool]] = {
    "id": lambda value: isinstance(value, str),
    "domain": lambda value: value is None or isinstance(value, str),
    "tokens": _is_count,
    "generated": _is_count,
    "finish_reasons": _are_texts,
    "targets": _is_count,
}


# ---------------------------------------------------------------- bytes


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
    file = _identity(path)
    if file and file[2] != commit.size:
        return f"has {file[2]} bytes, its commit says {commit.size}"
    try:
        sha256 = _sha256(path) if file else None
    except FileNotFoundError:
        sha256 = None
    if sha256 is None:
        return "is missing"
    return None if sha256 == commit.sha256 else f"has the sha256 {sha256}, its commit says {commit.sha256}"


def _identity(path: Path) -> File | None:
    """What tells one file from another that takes its name; None where no file has it."""
    try:
        seen = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (str(path), seen.st_ino, seen.st_size, seen.st_mtime_ns) if stat.S_ISREG(seen.st_mode) else None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def _name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise StoreError(f"{name!r} cannot name a unit or a fingerprint: letters, digits, '_', '.' and '-' only")
    return name


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Each setting by its dotted name, its value as JSON."""
    if not isinstance(value, dict) or not value:
        return {name: strict_json.dumps(value)}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{name}.{key}" if name else key).items()}
