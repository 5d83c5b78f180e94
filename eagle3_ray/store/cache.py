"""This node's own disk: copies of the shards that are read here, and the scratch space of those that are written.

All processes of a node share the copies. Each is fetched by one of them while the others wait, and before that the
least recently used make room. One that another process has open can be read to its end without its name; one that has
lost its name before it was opened is fetched again (`Units.open`).

The folder may lie where every user of the node can write. It is used only if it is ours and nobody else can write into
it: then no file or link of another's can be there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from eagle3_ray.config import StoreConfig
from eagle3_ray.store.filesystem import TEMPORARY, StoreError, below

LOCKS = 64  # downloads of different shards that may run at a time
STALE_S = 3600.0  # a temporary file that was not written to for so long is a dead process's


@dataclass(frozen=True)
class Cache:
    """Copies below a folder, of at most `limit` bytes together, and the one that is being read in any case."""

    folder: Path
    limit: int = 2**62

    def path(self, key: str) -> Path:
        return below(self.folder, key)

    @staticmethod
    def used(path: Path) -> None:
        """A copy was used now. Its time of change stays: that tells whether it is the copy that was verified."""
        with suppress(FileNotFoundError):
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    @contextmanager
    def adding(self, key: str, size: int) -> Iterator[None]:
        """One process at a time, with room made for `size` bytes."""
        with self._locked(_lock(key)):
            if not self.path(key).exists():
                with self._locked("room"):
                    self._make_room(size, _lock(key))
            yield

    def _make_room(self, size: int, held: str) -> None:
        found = []
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):  # another process of the node made room before
                    seen = path.lstat()
                    found.append((max(seen.st_atime_ns, seen.st_mtime_ns), seen.st_size, path))
        used = sum(length for _, length, _ in found)
        for _, length, path in sorted(found):
            if used + size <= self.limit and shutil.disk_usage(self.folder).free >= size:
                return
            if self._remove(path, held):
                used -= length

    def _remove(self, path: Path, held: str) -> bool:
        """Not a lock, nor what another process is fetching."""
        with suppress(BlockingIOError, FileNotFoundError):  # in use; named or removed by another process meanwhile
            if path.suffix == ".lock" or path.suffix == TEMPORARY and time.time() - path.lstat().st_mtime < STALE_S:
                return False
            name = _lock(str(path.relative_to(self.folder)))
            with nullcontext() if name == held else self._locked(name, fcntl.LOCK_NB):
                path.unlink(missing_ok=True)
                return True
        return False

    @contextmanager
    def _locked(self, name: str, how: int = 0) -> Iterator[None]:
        """A lock that ends with its process, however that ends."""
        own(self.folder)
        lock = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | how)
            yield
        finally:
            os.close(lock)


def _lock(key: str) -> str:
    return f"{zlib.crc32(key.encode()) % LOCKS:02}"


def own(folder: Path) -> None:
    """Make the folder for this user alone, or take it if it is that. StoreError where it is not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(0o700)
        folder.chmod(0o700)  # whatever the umask
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o022:
        raise StoreError(
            f"store.scratch_dir: {folder} is no folder that is ours alone ({stat.filemode(seen.st_mode)}, of user "
            f"{seen.st_uid}); remove it, or name another folder"
        )
    if seen.st_mode & 0o077:
        folder.chmod(0o700)


def scratch(config: StoreConfig) -> Path:
    return Path(config.scratch_dir or tempfile.gettempdir())


def node_cache(config: StoreConfig) -> Cache:
    """The copies that all processes of this user on this node share. They outlive a job, for the next one."""
    return Cache(scratch(config) / f"eagle3-ray-cache-{os.getuid()}", config.cache_bytes)
