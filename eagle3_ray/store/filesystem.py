"""A root folder, on local disk or in an S3 bucket, and the few operations the store needs.

Two promises carry the store: an object appears whole or not at all, and `create` has one winner among any number of
threads, processes and machines. On local disk both come from a temporary file that is synced and then renamed or
linked to its name; on S3 from one PUT, conditional for `create`. A fault becomes a StoreError that names the setting;
on S3 one that may pass is tried again first.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import os
import re
import shutil
import stat
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from eagle3_ray import strict_json
from eagle3_ray.secrets import HIDDEN, clean

if TYPE_CHECKING:
    from eagle3_ray.store.s3 import S3

TEMPORARY = ".tmp"  # objects with this ending are never listed
PATIENCE_S = 300.0  # that a request is tried again: a unit's work is worth more than the minutes of an outage
START_PATIENCE_S = 10.0  # the same while the root is checked: a wrong endpoint should be told at once
READ_BYTES = 64 * 2**20  # at a time, of an object that is only hashed
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_KEY, MOST_PART = 1024, 255  # bytes of UTF-8: S3's limit of a key, and a file system's of one name
NO_NAME = re.compile(r"[\x00-\x1f\x7f-\x9f\\]")  # control characters, and what is a separator elsewhere


class StoreError(RuntimeError):
    """The store cannot do what was asked. The message names the setting and the value seen, never a secret."""


def checked(key: str) -> str:
    """The key, if it can name an object below a root; StoreError if not.

    A key comes from settings, from listings and out of files that others may have written. One that is checked can be
    joined to any folder and stays inside: no absolute path, no part that is empty, '.' or '..', no control character.
    """
    try:
        parts = [part.encode() for part in key.split("/")]
    except UnicodeEncodeError:
        parts = []
    if not all(0 < len(part) <= MOST_PART and part not in (b".", b"..") for part in parts or [b""]) or (
        NO_NAME.search(key) or sum(map(len, parts)) + len(parts) - 1 > MOST_KEY
    ):
        raise StoreError(f"{key!r} cannot be the key of an object: it must stay below store.root")
    return key


def below(folder: Path, key: str) -> Path:
    """Where the object of this key lies below a local folder: the only way from a key to a path."""
    return folder / checked(key)


class Damaged(StoreError):
    """What is stored is not what was written there, or not what it is taken for."""


@dataclass(frozen=True)
class Entry:
    """An object in a listing."""

    key: str
    size: int  # bytes
    modified: float  # seconds since 1970, by the storage's clock


class Filesystem:
    """Objects below one root, by key. Cheap to make and to pickle: the connection is opened at the first use.

    With `exclusive` off, `create` looks and then writes: of two that create at the same time both may believe they won,
    and the last stays.
    """

    def __init__(self, root: str, storage_options: dict[str, Any] | None = None, exclusive: bool = True):
        path = os.path.expanduser(root.removeprefix("file://"))
        scheme, _, rest = path.rpartition("://")
        if "@" in rest.partition("/")[0] and scheme:
            seen = f"{scheme}://{HIDDEN}@{rest.partition('@')[2]}"
            raise StoreError(f"store.root must not hold credentials, seen {seen!r}: they come from the AWS chain")
        if not (os.path.isabs(path) if not scheme else scheme in ("s3", "s3a") and rest.strip("/")):
            raise StoreError(f"store.root must be an absolute path or s3://bucket/prefix, seen {root!r}")
        self.root = path.rstrip("/")
        self.local = not scheme
        self.storage_options = dict(storage_options or {})
        self.exclusive = exclusive
        self.patience_s = PATIENCE_S
        self._connection: S3 | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    @property
    def _s3(self) -> S3:
        if self._connection is None:
            from eagle3_ray.store.s3 import S3  # half a second that a local root needs not wait

            self._connection = S3(self.storage_options, self.patience_s, self._told)
        return self._connection

    def url(self, key: str) -> str:
        """The absolute path, or the URL, of an object; of the root itself for ''. StoreError as `checked`."""
        return f"{self.root}/{checked(key)}" if key else self.root

    def read(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """The object, or its bytes start:end. A missing one is a FileNotFoundError, here and in `size`, `download`."""
        with self._errors("read", key, FileNotFoundError):
            if not self.local:
                return self._s3.get(self.url(key), start, end)
            with open(self.url(key), "rb") as file:
                file.seek(start or 0)
                return file.read(-1 if end is None else max(0, end - (start or 0)))

    def read_json(self, key: str) -> dict[str, Any]:
        """What `write_json` or `create_json` put there; Damaged where it is anything else."""
        data = self.read(key)
        try:
            return strict_json.unsealed(strict_json.loads(data), key)
        except ValueError as error:
            raise Damaged(f"{self.url(key)} is not what was written: {error}") from None

    def write_json(self, key: str, value: dict[str, Any]) -> None:
        """Put an object as sealed JSON (strict_json.py), in place of any other."""
        self.write(key, _json(value, key))

    def create_json(self, key: str, value: dict[str, Any]) -> bool:
        """As `create`, with sealed JSON."""
        return self.create(key, _json(value, key))

    def write(self, key: str, data: bytes) -> None:
        """Put the object, in place of any other."""
        with self._errors("write", key):
            if self.local:
                _place(Path(self.url(key)), lambda path: path.write_bytes(data), os.replace)
            else:
                self._s3.send(self.url(key), len(data), lambda start, end: data[start:end])

    def create(self, key: str, data: bytes) -> bool:
        """Put the object where there is none; False when there is one.

        False may also mean that this very call was sent twice and the first try arrived, its answer lost. Who must
        know the difference reads the object.
        """
        with self._errors("create", key):
            if not self.exclusive:
                if self.exists(key):
                    return False
                self.write(key, data)
                return True
            try:
                if self.local:
                    _place(Path(self.url(key)), lambda path: path.write_bytes(data), os.link)
                else:
                    self._s3.put(self.url(key), data, create=True)
            except OSError as error:  # the loser's error differs between servers; whether the object exists does not
                if isinstance(error, PermissionError) or not self.exists(key):
                    raise
                return False
            return True

    def upload(self, local_path: str | Path, key: str) -> None:
        """Put a local file as one object."""
        with self._errors("upload to", key):
            if self.local:
                _place(Path(self.url(key)), lambda path: shutil.copyfile(local_path, path), os.replace)
            else:
                with open(local_path, "rb") as file:
                    size, number = os.fstat(file.fileno()).st_size, file.fileno()
                    self._s3.send(self.url(key), size, lambda start, end: os.pread(number, end - start, start))

    def download(self, key: str, local_path: str | Path) -> None:
        """Copy an object to a local file, which appears whole."""
        with self._errors("download", key, FileNotFoundError), room_in(Path(local_path).parent):
            get = shutil.copyfile if self.local else self._s3.download
            _place(Path(local_path), lambda path: get(self.url(key), path), os.replace, durable=False)

    def list(self, prefix: str) -> list[str]:
        """The keys below a folder, at any depth, sorted; none when there is no such folder.

        StoreError where one cannot be a key: an S3 server takes any name for an object, '..' included.
        """
        folder = prefix.strip("/")
        with self._errors("list", folder):
            if self.local:
                names = [f"{parent}/{name}" for parent, _, files in _walk(self.url(folder)) for name in files]
                start = len(self.root) + 1
            else:
                names = list(self._s3.find(self.url(folder)))
                start = len(self.root.partition("://")[2]) + 1
        keys = _kept((name[start:] for name in names), folder)
        return sorted(checked(key) for key in keys if not key.endswith(TEMPORARY))

    def entries(self, prefix: str) -> Sequence[Entry]:
        """As `list`, with sizes and times, and with the temporary files of writers that live or were killed."""
        folder = prefix.strip("/")
        with self._errors("list", folder):
            if self.local:
                found = _local_entries(self.url(folder), len(self.root) + 1)
            else:
                start = len(self.root.partition("://")[2]) + 1
                listed = self._s3.find(self.url(folder))
                found = [Entry(name[start:], info["size"], _modified(info)) for name, info in listed.items()]
        by_key = {entry.key: entry for entry in found}
        return [by_key[checked(key)] for key in sorted(_kept(by_key, folder))]

    def exists(self, key: str) -> bool:
        with suppress(FileNotFoundError, NotADirectoryError):
            self.size(key)
            return True
        return False

    def size(self, key: str) -> int:
        with self._errors("look at", key, FileNotFoundError, NotADirectoryError):
            if not self.local:
                return self._s3.size(self.url(key))
            found = os.stat(self.url(key))
            if stat.S_ISDIR(found.st_mode):
                raise FileNotFoundError(f"{self.url(key)} is a folder")
            return found.st_size

    def sha256(self, key: str) -> str:
        """Of the whole object, in hex; what is read at a time is bounded."""
        digest, size = hashlib.sha256(), self.size(key)
        for start in range(0, size, READ_BYTES):
            digest.update(self.read(key, start, min(start + READ_BYTES, size)))
        return digest.hexdigest()

    def delete(self, key: str) -> None:
        """Remove the object; that there is none is fine."""
        with self._errors("delete", key), suppress(FileNotFoundError):
            if self.local:
                os.unlink(self.url(key))
            else:
                self._s3.delete(self.url(key))

    def check(self) -> None:
        """Refuse a root that cannot be written, listed or read, or on which `create` lets two writers win."""
        files = copy.copy(self)
        files.patience_s = START_PATIENCE_S
        probe = f"probe-{uuid4().hex}{TEMPORARY}"
        files.list(probe)  # before anything is written: some servers make a missing bucket at the first write
        files.create(probe, b"first")  # False where its answer was lost: it stands all the same
        second, kept = files.create(probe, b"second"), files.read(probe)
        files.delete(probe)
        if second or kept != b"first":
            raise StoreError(
                f"store.root is {self.root!r}: its storage does not honour create-if-absent, so that two attempts at a "
                f"unit may both be kept; store.exclusive_create=false goes on without, for one job alone{self._sets()}"
            )

    @contextmanager
    def _errors(self, doing: str, key: str, *expected: type[Exception]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, (StoreError, *expected)):
                raise
            whole = "".join(traceback.format_exception(error))
            cause = error if clean(whole, self.storage_options) == whole else None
            seen = f"store.root is {self.root!r}: cannot {doing} {self.url(key)} ({self._told(error)}){self._sets()}"
            raise StoreError(seen) from cause

    def _told(self, error: BaseException) -> str:
        if not str(error) and error.__cause__:  # a time limit says nothing itself
            error = error.__cause__
        return clean(f"{type(error).__name__}: {error}", self.storage_options)

    def _sets(self) -> str:
        """Which store.storage_options are set; of their values only the endpoint is shown."""
        if self.local:
            return ""
        shown = [f"{k}={v!r}" if k == "endpoint_url" else k for k, v in sorted(self.storage_options.items())]
        return clean(f"; store.storage_options sets {', '.join(shown) or 'nothing'}", self.storage_options)


def _json(value: dict[str, Any], key: str) -> bytes:
    return strict_json.dumps(strict_json.sealed(value, key), indent=1, sort_keys=True, ensure_ascii=False).encode()


def _kept(keys: Iterable[str], folder: str) -> Iterator[str]:
    """Those of objects below the folder: S3 may list the folder itself, and markers that end in a slash."""
    inside = f"{folder}/" if folder else ""
    return (key for key in keys if key.startswith(inside) and key != inside and not key.endswith("/"))


@contextmanager
def room_in(folder: Path) -> Iterator[None]:
    """Name the setting where a file of ours does not fit on the node's own disk."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StoreError(f"store.scratch_dir has no room in {folder} ({error})") from error
        raise


def _place(path: Path, fill: Callable[[Path], Any], put: Callable[[Path, Path], None], durable: bool = True) -> None:
    """Fill a temporary file beside `path`, then give it its name: os.replace takes the name, os.link needs it free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid4().hex}{TEMPORARY}")
    try:
        fill(temporary)
        if durable:
            _sync(temporary)
        put(temporary, path)
        if durable:
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    def fail(error: OSError) -> None:  # os.walk passes over a folder it cannot read; a listing must not
        raise error

    folder = folder.rstrip("/")
    return os.walk(folder, onerror=fail) if os.path.isdir(folder) else iter(())


def _local_entries(folder: str, start: int) -> list[Entry]:
    found = []
    for parent, _, names in _walk(folder):
        for name in names:
            path = f"{parent}/{name}"
            with suppress(FileNotFoundError):  # renamed or removed meanwhile
                info = os.stat(path)
                found.append(Entry(path[start:], info.st_size, info.st_mtime))
    return found


def _modified(info: dict[str, Any]) -> float:
    """When an object was written, as S3 tells it; of a folder's marker it does not: now."""
    told = info.get("LastModified")
    return told.timestamp() if isinstance(told, datetime) else time.time()
