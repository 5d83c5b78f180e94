"""A look at a store, and work on it alone: list, verify, tidy up, copy, export, transcode."""

import sys
import time
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from eagle3_ray.config import LAYOUTS, ConfigError, StoreCommand, check
from eagle3_ray.run import check_cache
from eagle3_ray.store.cache import node_cache, scratch
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.overview import Folder, details, find, readable, table
from ray_jobs import command


def ls(job: StoreCommand, files: Filesystem) -> None:
    print(*table(find(files, job.fingerprint)), sep="\n")


def stat(job: StoreCommand, files: Filesystem) -> None:
    for folder in find(files, job.fingerprint):
        print(*details(folder), sep="\n")


def verify(job: StoreCommand, files: Filesystem) -> None:
    from eagle3_ray.store.verify import verify

    folders = find(files, job.fingerprint)
    faults = verify(folders, scratch(job.store))
    print(f"verify: {sum(len(folder.committed) for folder in folders)} units, {len(faults)} bad")
    for fault in faults:
        print(f"{fault.unit}: {fault.reason}")
        print(*(f"  to redo it, delete {url}" for url in fault.delete), sep="\n")
    if faults:
        sys.exit(1)


def gc(job: StoreCommand, files: Filesystem) -> None:
    from eagle3_ray.store.garbage import garbage, remove

    before = time.time() - job.older_than_hours * 3600
    folder = find(files, job.fingerprint)[0].name if job.fingerprint else None
    found = garbage(files, before, folder)
    for kind, entries in found.items():
        print(f"{kind}: {len(entries)} objects, {readable(sum(entry.size for entry in entries))}")
        print(*(f"  {files.url(entry.key)}" for entry in entries), sep="\n", end="\n" if entries else "")
    if job.delete:
        gone = remove(files, (entry for entries in found.values() for entry in entries), before, folder)
        print(f"gc: removed {len(gone)} objects, {readable(sum(entry.size for entry in gone))}")
    else:
        print("gc: nothing was removed; delete=true removes them")


def copy(job: StoreCommand, files: Filesystem) -> None:
    from eagle3_ray.store.copying import copy, with_responses

    target = _other_root(job, files)
    folders = with_responses(find(files, job.fingerprint), find(files))
    sent = copy(folders, target, scratch(job.store))
    print(f"copy: {sent['units_sent']} units sent, {readable(sent['bytes_sent'])}, to {target.root}")


def export(job: StoreCommand, files: Filesystem) -> None:
    if job.layout is None:
        raise ConfigError(f"layout: action=export needs one of {', '.join(LAYOUTS)}")
    if job.to is None or not Path(job.to).expanduser().is_absolute():
        raise ConfigError(f"to: an absolute path of a local folder, seen {job.to!r}")
    from eagle3_ray.layouts import export_features

    done = export_features(
        _features(job, files), Path(job.to).expanduser(), job.layout, job.target_path, scratch(job.store)
    )
    print(f"export: {done['samples']} samples at boundaries {done['boundaries']} in {done['to']}")


def transcode(job: StoreCommand, files: Filesystem) -> None:
    from eagle3_ray.store.transcode import destination, transcode

    source = _features(job, files).units
    dtype = job.dtype or source.description()["dtype"]
    root = _other_root(job, files) if job.to else files
    if dtype == source.description()["dtype"] and root is files:
        raise ConfigError(f"to: features in {dtype} stay in their folder; name another store's root")
    target = destination(source, root, dtype)
    done = transcode(source, target, job.store.compression, node_cache(job.store), scratch(job.store))
    print(f"transcode: {done} units, now in {root.url(target.folder)}")


# Each action, and the settings that it takes beside action, store and fingerprint
ACTIONS: dict[str, tuple[Callable[[StoreCommand, Filesystem], None], tuple[str, ...]]] = {
    "ls": (ls, ()),
    "stat": (stat, ()),
    "verify": (verify, ()),
    "gc": (gc, ("delete", "older_than_hours")),
    "copy": (copy, ("to", "to_storage_options")),
    "export": (export, ("to", "layout", "target_path")),
    "transcode": (transcode, ("to", "to_storage_options", "dtype")),
}


def main(composed: DictConfig) -> None:
    job = OmegaConf.to_object(composed)
    assert isinstance(job, StoreCommand)
    check(job)
    check_cache(job.store)
    action, takes = ACTIONS[job.action]
    for setting in fields(job):
        default = setting.default if setting.default is not MISSING else {}
        if setting.name not in ("action", "store", "fingerprint", *takes) and getattr(job, setting.name) != default:
            raise ConfigError(f"{setting.name}: action={job.action} does not take it")
    files = _opened("store.root", job.store.root, job.store.storage_options)
    try:
        action(job, files)
    except (StoreError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


def _opened(setting: str, root: str, options: dict[str, object]) -> Filesystem:
    """A store that can be reached; a look that writes nothing."""
    try:
        files = Filesystem(root, options)
        files.list("runs")
    except StoreError as error:
        raise ConfigError(f"{setting}: {error}") from None
    return files


def _other_root(job: StoreCommand, files: Filesystem) -> Filesystem:
    if job.to is None:
        raise ConfigError(f"to: action={job.action} needs another store's root")
    target = _opened("to", job.to, job.to_storage_options)
    if target.root == files.root:
        raise ConfigError(f"to: {job.to!r} is store.root")
    try:
        target.check()
    except StoreError as error:
        raise ConfigError(f"to: {error}") from None
    return target


def _features(job: StoreCommand, files: Filesystem) -> Folder:
    found = [folder for folder in find(files, job.fingerprint) if folder.name.startswith("features/")]
    if len(found) != 1:
        raise ConfigError(f"fingerprint: name one of {', '.join(folder.name for folder in found) or 'no features'}")
    return found[0]


if __name__ == "__main__":
    command("store_command", main)
