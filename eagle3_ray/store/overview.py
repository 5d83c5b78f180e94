"""What a store holds, told by its commits: every other tool of ray_jobs.store starts from these folders.

A whole kind is listed once, with sizes and times; commits are then read in parallel and one at a time, so that neither
the number of requests nor the memory grows faster than the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from eagle3_ray.config import ConfigError
from eagle3_ray.store.commits import Commit, Units
from eagle3_ray.store.filesystem import TEMPORARY, Entry, Filesystem
from eagle3_ray.store.parallel import in_parallel

KINDS = ("responses", "features")
SHOWN = 5  # ids of failed samples that are listed for each reason


@dataclass
class Folder:
    """responses/<fingerprint>/ or features/<fingerprint>/, as it was listed."""

    units: Units
    fingerprint: str
    committed: dict[str, Entry] = field(default_factory=dict)  # by unit

    @property
    def name(self) -> str:
        return self.units.folder

    def commits(self) -> Iterator[Commit]:
        return in_parallel(self.units.read_commit, self.committed)


def find(files: Filesystem, fingerprint: str | None = None) -> list[Folder]:
    """All folders, or the one that `fingerprint`, or features/<fingerprint>, is the beginning of."""
    folders: dict[str, Folder] = {}
    for kind in KINDS:
        entries = files.entries(kind)
        for entry in entries:
            if entry.key.count("/") == 2 and entry.key.endswith("/description.json"):
                name = entry.key.split("/")[1]
                folders[f"{kind}/{name}"] = Folder(Units(files, kind, name), name)
        for entry in entries:
            folder = folders.get(entry.key.partition("/commits/")[0])
            if folder and not entry.key.endswith(TEMPORARY):
                folder.committed[folder.units.unit_of(entry.key)] = entry
    if not folders:
        raise ConfigError(f"store.root: neither responses nor features are stored below {files.root!r}")
    if fingerprint is None:
        return list(folders.values())
    named = {(name if "/" in fingerprint else folder.fingerprint): folder for name, folder in folders.items()}
    found = [folder for name, folder in named.items() if name.startswith(fingerprint)]
    if len(found) != 1:
        among = [folder.name for folder in found] or list(folders)
        raise ConfigError(f"fingerprint: {fingerprint!r} begins {len(found)} of {', '.join(among)}")
    return found


def table(folders: list[Folder]) -> Iterator[str]:
    """A line a folder: what it is, how much of it is committed, and when it last grew."""
    rows = [("folder", "target", "boundaries", "dtype", "units", "samples", "tokens", "bytes", "last commit")]
    for folder in folders:
        about = folder.units.description()
        samples = tokens = size = 0
        for commit in folder.commits():
            samples += len(commit.samples)
            tokens += sum(sample["tokens"] for sample in commit.samples)
            size += commit.size
        counts = (str(len(folder.committed)), str(samples), str(tokens), readable(size))
        boundaries = ",".join(map(str, about.get("boundaries", []))) or "-"
        rows.append((folder.name, target_name(about), boundaries, about.get("dtype", "-"), *counts, _last(folder)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = range(4, 8)
    for row in rows:
        cells = (c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        yield "  ".join(cells).rstrip()


def details(folder: Folder) -> Iterator[str]:
    """One folder at length: counts, bytes, ends of answers, domains, and which samples failed and why."""
    about, totals = folder.units.description(), Counter[str]()
    domains: dict[str, Counter[str]] = {}
    ends, failed = Counter[str](), dict[str, list[str]]()
    for commit in folder.commits():
        totals += Counter(units=1, bytes=commit.size, samples=len(commit.samples))
        tokens = sum(sample["tokens"] for sample in commit.samples)
        for sample in commit.samples:
            counts = Counter({name: sample.get(name, 0) for name in ("tokens", "generated", "targets")})
            totals += counts
            share = round(commit.size * sample["tokens"] / tokens) if tokens else 0
            domain = domains.setdefault(str(sample.get("domain")), Counter())
            domain += counts + Counter(samples=1, bytes=share)
            ends.update(sample.get("finish_reasons", []))
        for failure in commit.facts.get("failed", []):
            failed.setdefault(failure["reason"], []).append(failure["id"])
    yield folder.name
    yield f"  target         {target_name(about)}"
    for name in ("responses", "prompts", "engine", "engine_version", "boundaries", "dtype"):
        if name in about:
            yield f"  {name:<14} {about[name]}"
    yield f"  last commit    {_last(folder)}"
    yield f"  committed      {totals['units']} units, {totals['samples']} samples"
    targets = f", {totals['targets']} targets" if totals["targets"] else ""
    yield f"  tokens         {totals['tokens']}, {totals['generated']} generated{targets}"
    yield f"  bytes          {readable(totals['bytes'])}, {totals['bytes'] / max(1, totals['tokens']):.1f} a token"
    yield f"  answers ended  {', '.join(f'{reason} {count}' for reason, count in ends.most_common()) or '-'}"
    for name, of in sorted(domains.items()):  # a shard is not cut by domain: its bytes are shared out by tokens
        yield f"  domain         {name}: {of['samples']} samples, {of['tokens']} tokens, {readable(of['bytes'])}"
    for reason, ids in sorted(failed.items(), key=lambda item: -len(item[1])):
        more = ", …" if len(ids) > SHOWN else ""
        yield f"  failed         {len(ids)}: {reason.splitlines()[0]}: {', '.join(ids[:SHOWN])}{more}"


def target_name(description: dict[str, Any]) -> str:
    """A hub target by its name and commit; a local one by its weights, since its path says nothing elsewhere."""
    weights = description.get("target", {}).get("weights", {})
    if "hub" in weights:
        return weights["hub"][:-32]  # of the commit's 40 digits, 8
    return next((f"{name}:{digest[:8]}" for name, digest in sorted(weights.items())), "-")


def readable(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def _last(folder: Folder) -> str:
    if not folder.committed:
        return "-"
    newest = max(entry.modified for entry in folder.committed.values())
    return datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d %H:%M UTC")
