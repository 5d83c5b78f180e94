"""What a store holds and nothing will ever read: the remains of attempts that lost, were killed or were superseded.

Commits are read after everything was listed, so a unit that is committed meanwhile keeps its shard. A shard that lies
there before its commit does is told from an orphan by its age alone, hence the age limit. What is to be removed is
looked for twice, and only what both looks found is removed.
"""

from __future__ import annotations

from collections.abc import Iterable

from eagle3_ray.progress import Progress
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import TEMPORARY, Entry, Filesystem
from eagle3_ray.store.overview import KINDS
from eagle3_ray.store.parallel import in_parallel

ORPHANS, LEFT, ATTEMPTS, PROMPTS = "orphan shards", "temporary files", "attempts", "unfinished prompts"


def garbage(files: Filesystem, before: float, folder: str | None = None) -> dict[str, list[Entry]]:
    """All that was last written before then, by kind; of the whole store or of features/<fingerprint> alone."""
    found: dict[str, list[Entry]] = {ORPHANS: [], LEFT: [], ATTEMPTS: [], PROMPTS: []}
    shards: dict[str, list[Entry]] = {}
    attempts: dict[str, list[Entry]] = {}
    prompts: dict[str, list[Entry]] = {}
    for entry in files.entries(folder or ""):
        kind, _, rest = entry.key.partition("/")
        name, _, below = rest.partition("/")
        if entry.key.endswith(TEMPORARY):
            found[LEFT].append(entry)
        elif kind in KINDS and below.startswith("shards/"):
            shards.setdefault(f"{kind}/{name}", []).append(entry)
        elif kind in KINDS and below.startswith("attempts/"):
            attempts.setdefault(f"{kind}/{name}", []).append(entry)
        elif kind == "prompts" and below:
            prompts.setdefault(name, []).append(entry)
    for of in sorted(shards.keys() | attempts.keys()):
        units = Units(files, *of.split("/"))
        committed = units.committed()
        named = {commit.shard for commit in in_parallel(units.read_commit, committed)}
        found[ORPHANS] += [entry for entry in shards.get(of, []) if entry.key not in named]
        done = {f"{of}/attempts/{unit}" for unit in committed}
        found[ATTEMPTS] += [entry for entry in attempts.get(of, []) if entry.key.rpartition("/")[0] in done]
    for name, entries in prompts.items():
        whole = f"prompts/{name}/summary.json"
        if all(entry.modified < before for entry in entries) and not any(entry.key == whole for entry in entries):
            found[PROMPTS] += entries
    return {kind: [entry for entry in entries if entry.modified < before] for kind, entries in found.items()}


def remove(files: Filesystem, entries: Iterable[Entry], before: float, folder: str | None = None) -> list[Entry]:
    """Delete those of `entries` that are garbage still; returns them."""
    still = {entry.key for found in garbage(files, before, folder).values() for entry in found}
    gone = [entry for entry in entries if entry.key in still]
    progress = Progress("gc", len(gone), "objects")
    for _ in in_parallel(lambda entry: files.delete(entry.key), gone):
        progress.add(1)
    return gone
