"""A root folder, on local disk or behind any fsspec URL, and the few operations the store needs.

Two promises carry the store: an object appears whole or not at all, and `create` has one winner among any number of
threads, processes and machines. On local disk both come from a temporary file that is synced and then renamed or
linked to its name; on S3 from one PUT, conditional for `create`. A fault becomes a StoreError that names the setting.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec

TEMPORARY = ".tmp"  # objects with this ending are never listed


class StoreError(RuntimeError):
    """The store cannot do what was asked. The message names the setting and the value seen, never a secret."""


@dataclass(frozen=True)
class Entry:
    """An object in a listing."""

    key: str
    size: int  # bytes
    modified: float  # seconds since 1970, by the storage's clock


class Filesystem:
    """Objects below one root, by key. Cheap to make and to pickle: the connection is opened at the first use."""

    def __init__(self, root: str, storage_options: dict[str, Any] | None = None):
        path = os.path.expanduser(root.removeprefix("file://"))
        if not os.path.isabs(path) and not path.partition("://")[2].strip("/"):
            raise StoreError(f"store.root must be an absolute path or a URL like s3://bucket/prefix, seen {root!r}")
        self.root = path.rstrip("/")
        self.local = "://" not in path
        self.storage_options = dict(storage_options or {})
        self._fsspec: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fsspec": None}

    @property
    def _remote(self) -> Any:
        if self._fsspec is None:
            # Both caches off: a listing must be true now, and a second Filesystem must read its own credentials.
            options = {"skip_instance_cache": True, "use_listings_cache": False, **self.storage_options}
            self._fsspec = fsspec.filesystem(self.root.partition("://")[0], **options)
        return self._fsspec

    def url(self, key: str) -> str:
        """The absolute path, or the URL, of an object: for messages, summaries and fsspec."""
        return f"{self.root}/{key}"

    def read(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """The object, or its bytes start:end. A missing one is a FileNotFoundError, here and in `size`, `download`."""
        with self._errors("read", key, FileNotFoundError):
            if not self.local:
                return self._remote.cat_file(self.url(key), start=start, end=end)
            with open(self.url(key), "rb") as file:
                file.seek(start or 0)
                return file.read(-1 if end is None else max(0, end - (start or 0)))

    def write(self, key: str, data: bytes) -> None:
        """Put the object, in place of any other."""
        with self._errors("write", key):
            if self.local:
                _place(Path(self.url(key)), lambda path: path.write_bytes(data), os.replace)
            else:
                self._remote.pipe_file(self.url(key), data)

    def create(self, key: str, data: bytes) -> bool:
        """Put the object where there is none; False when there is one.

        False may also mean that this very call was sent twice and the first try arrived, its answer lost. Who must
        know the difference reads the object.
        """
        with self._errors("create", key):
            try:
                if self.local:
                    _place(Path(self.url(key)), lambda path: path.write_bytes(data), os.link)
                else:
                    self._remote.pipe_file(self.url(key), data, mode="create")
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
                self._remote.put_file(str(local_path), self.url(key))

    def download(self, key: str, local_path: str | Path) -> None:
        """Copy an object to a local file, which appears whole."""
        with self._errors("download", key, FileNotFoundError):
            get = shutil.copyfile if self.local else self._remote.get_file
            _place(Path(local_path), lambda path: get(self.url(key), str(path)), os.replace, durable=False)

    def list(self, prefix: str) -> list[str]:
        """The keys below a folder, at any depth, sorted; none when there is no such folder."""
        below = f"{prefix.strip('/')}/".lstrip("/")
        with self._errors("list", below):
            if self.local:
                names = [f"{folder}/{name}" for folder, _, files in _walk(self.url(below)) for name in files]
                start = len(self.root) + 1
            else:
                names = self._remote.find(self.url(below).rstrip("/"))
                start = len(self._remote._strip_protocol(self.root)) + 1
        keys = (name[start:] for name in names)  # among them, on S3, perhaps the folder itself
        return sorted(k for k in keys if k.startswith(below) and k != below and not k.endswith(("/", TEMPORARY)))

    def entries(self, prefix: str) -> Sequence[Entry]:
        """As `list`, with sizes and times, and with the temporary files of writers that live or were killed."""
        below = f"{prefix.strip('/')}/".lstrip("/")
        with self._errors("list", below):
            if self.local:
                found = _local_entries(self.url(below), len(self.root) + 1)
            else:
                start = len(self._remote._strip_protocol(self.root)) + 1
                listed = self._remote.find(self.url(below).rstrip("/"), detail=True)
                found = [Entry(name[start:], info["size"], _modified(info)) for name, info in listed.items()]
        kept = (e for e in found if e.key.startswith(below) and e.key != below and not e.key.endswith("/"))
        return sorted(kept, key=lambda entry: entry.key)

    def exists(self, key: str) -> bool:
        with suppress(FileNotFoundError, NotADirectoryError):
            self.size(key)
            return True
        return False

    def size(self, key: str) -> int:
        with self._errors("look at", key, FileNotFoundError, NotADirectoryError):
            info = _info(self.url(key)) if self.local else self._remote.info(self.url(key))
            if info["type"] == "directory":
                raise FileNotFoundError(f"{self.url(key)} is a folder")
            return info["size"]

    def delete(self, key: str) -> None:
        """Remove the object; that there is none is fine."""
        with self._errors("delete", key), suppress(FileNotFoundError):
            if self.local:
                os.unlink(self.url(key))
            else:
                self._remote.rm_file(self.url(key))

    def check(self) -> None:
        """Refuse a root that cannot be written, listed or read, or on which `create` lets two writers win."""
        probe = f"probe-{uuid4().hex}{TEMPORARY}"
        self.list(probe)  # before anything is written: some servers make a missing bucket at the first write
        won = [self.create(probe, b"first"), self.create(probe, b"second")]
        kept = self.read(probe)
        self.delete(probe)
        if won != [True, False] or kept != b"first":
            raise StoreError(f"store.root is {self.root!r}: its storage does not honour create-if-absent{self._sets()}")

    @contextmanager
    def _errors(self, doing: str, key: str, *expected: type[Exception]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, (StoreError, *expected)):
                raise
            reason = told = f"{type(error).__name__}: {error}"
            for secret in _secrets(self.storage_options):
                reason = reason.replace(secret, "***")
            seen = f"store.root is {self.root!r}: cannot {doing} {self.url(key)} ({reason}){self._sets()}"
            raise StoreError(seen) from (error if reason == told else None)

    def _sets(self) -> str:
        """Which store.storage_options are set; of their values only the endpoint is shown."""
        if self.local:
            return ""
        shown = [f"{k}={v!r}" if k == "endpoint_url" else k for k, v in sorted(self.storage_options.items())]
        return f"; store.storage_options sets {', '.join(shown) or 'nothing'}"


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


def _info(path: str) -> dict[str, Any]:
    found = os.stat(path)
    return {"type": "directory" if stat.S_ISDIR(found.st_mode) else "file", "size": found.st_size}


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
    """When an object was written, as S3 or another fsspec file system tells it; unknown is now."""
    told = info.get("LastModified") or info.get("mtime") or info.get("created")
    return told.timestamp() if isinstance(told, datetime) else float(told or time.time())


def _secrets(options: dict[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _secrets(value)
        elif isinstance(value, str) and value and any(word in name.lower() for word in ("secret", "token", "password")):
            yield value
