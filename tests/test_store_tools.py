"""ray_jobs.store on local disk. Tests that take `files` run on S3 too: test_store_tools_s3.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file
from stores import HIDDEN, TARGET, fill

from eagle3_ray.capture import describe_target
from eagle3_ray.config import ConfigError, TargetConfig
from eagle3_ray.layouts import export_features
from eagle3_ray.store.commits import Commit, Units
from eagle3_ray.store.copying import copy, with_responses
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.garbage import ATTEMPTS, LEFT, ORPHANS, PROMPTS, garbage, remove
from eagle3_ray.store.overview import details, find, table
from eagle3_ray.store.parallel import in_parallel
from eagle3_ray.store.verify import verify
from eagle3_ray.strict_json import fingerprint, sealed
from ray_jobs.store import ACTIONS


@pytest.fixture
def files(tmp_path: Path) -> Filesystem:
    return Filesystem(str(tmp_path / "root"))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Filesystem:
    return Filesystem(str(tmp_path / "elsewhere"))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each operation of any Filesystem is called."""
    calls: Counter[str] = Counter()

    def count(name: str) -> Callable[..., Any]:
        operation = getattr(Filesystem, name)

        def counting(self: Filesystem, *args: Any) -> Any:
            calls[name] += 1
            return operation(self, *args)

        return counting

    with monkeypatch.context() as patch:
        for name in ("read", "write", "create", "upload", "download", "list", "entries", "size", "delete"):
            patch.setattr(Filesystem, name, count(name))
        yield calls


# ls, stat


def test_a_listing_tells_size_and_time_and_shows_temporary_files(files: Filesystem) -> None:
    before = time.time()
    for key, data in (("a/2", b"22"), ("a/deep/1", b"1"), ("ab/3", b""), ("a/.x.tmp", b"tmp")):
        files.write(key, data)
    assert [(entry.key, entry.size) for entry in files.entries("a")] == [("a/.x.tmp", 3), ("a/2", 2), ("a/deep/1", 1)]
    assert all(before - 5 < entry.modified < time.time() + 5 for entry in files.entries(""))
    assert len(files.entries("")) == 4
    assert list(files.entries("a/2")) == list(files.entries("none")) == []


def test_ls_has_a_line_for_each_folder(files: Filesystem, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="store.root: neither"):
        find(files)
    responses, features = fill(files, tmp_path)
    about = {"boundaries": [1, 2], "dtype": "float32", "target": {}}
    empty = Units(files, "features", fingerprint(about))
    empty.describe(about)
    header, first, *more = table(find(files))
    assert " ".join(header.split()) == "folder target boundaries dtype units samples tokens bytes last commit"
    assert first.split()[:7] == [responses.folder, "model.safetensors:abababab", "-", "-", "2", "6", "39"]
    by_name = {line.split()[0]: line.split() for line in more}
    assert by_name[features.folder][1:7] == ["model.safetensors:abababab", "2,4,6", "bfloat16", "2", "6", "39"]
    assert by_name[empty.folder][1:] == ["-", "1,2", "float32", "0", "0", "0", "0", "B", "-"]
    assert time.strftime("%Y-%m-%d", time.gmtime()) in more[-1] + first


def test_a_fingerprint_may_be_shortened_while_it_is_one_folders(files: Filesystem, tmp_path: Path) -> None:
    responses, features = fill(files, tmp_path)
    for name in (features.folder, features.folder[:14], features.folder.rpartition("/")[2][:5]):
        assert [folder.name for folder in find(files, name)] == [features.folder]
    for wrong in ("features/ffffffff", ""):
        with pytest.raises(ConfigError, match=f"fingerprint: '{wrong}' begins [02] of {responses.folder}, feat"):
            find(files, wrong)


def test_stat_counts_domains_ends_and_failures(files: Filesystem, tmp_path: Path) -> None:
    responses, features = fill(files, tmp_path)
    told = "\n".join(details(find(files, features.folder)[0]))
    size = sum(commit.size for commit in features.commits())
    assert "2 units, 6 samples" in told and "39, 27 generated, 16 targets" in told
    assert f"{size / 39:.1f} a token" in told and "stop 4, length 2" in told
    assert "code: 2 samples, 13 tokens" in told and "maths: 4 samples, 26 tokens" in told
    assert "failed" not in told
    assert "2: too long: 0-x, 1-x" in "\n".join(details(find(files, responses.folder)[0]))


# verify


def test_a_sound_store_has_no_faults(files: Filesystem, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(files, tmp_path)
    assert verify(find(files)) == []
    assert "verify: 4/4 units" in capsys.readouterr().out


def test_each_damage_is_found_and_what_to_delete_is_named(files: Filesystem, tmp_path: Path) -> None:
    responses, features = fill(files, tmp_path, units=7)
    commits = features.commits()
    flipped = bytearray(files.read(commits[0].shard))
    flipped[-1] ^= 1
    files.write(commits[0].shard, bytes(flipped))
    files.write(commits[1].shard, files.read(commits[1].shard)[:-1])
    files.delete(commits[2].shard)
    files.write(f"{features.folder}/commits/000003-0000.json", b"{")
    for number, change in ((4, {"tokens": 99}), (5, {"id": "other"})):
        key = f"{features.folder}/commits/{number:06d}-0000.json"
        commit = json.loads(files.read(key))
        commit["samples"][1] |= change
        del commit["check"]  # as by hand, or by a writer that knows nothing of it
        files.write(key, json.dumps(commit).encode())
    last = f"{features.folder}/commits/000006-000"
    files.write(f"{last}1.json", json.dumps(asdict(features.read_commit("000006-0000"))).encode())  # without a check
    answers = responses.read_commit("000006")
    files.delete(answers.shard)
    faults = {fault.unit: fault for fault in verify(find(files))}
    told = {
        f"{features.folder}: 000000-0000": "has the sha256",
        f"{features.folder}: 000001-0000": "bytes, its commit says",
        f"{features.folder}: 000002-0000": "is missing",
        f"{features.folder}: 000003-0000": "000003-0000.json is not what was written: Expecting property name",
        f"{features.folder}: 000004-0000": "sample 4-1: tokens is 10, its commit says 99",
        f"{features.folder}: 000005-0000": 'sample 5-1: id is "5-1", its commit says "other"',
        f"{features.folder}: 000006-0001": "is not the commit of unit 000006-0001: it is that of unit '000006-0000'",
        f"{responses.folder}: 000006": "is missing",
    }
    assert faults.keys() == told.keys()
    for unit, words in told.items():
        assert words in faults[unit].reason
    (delete,) = faults[f"{features.folder}: 000000-0000"].delete
    assert delete == files.url(f"{features.folder}/commits/000000-0000.json")
    assert faults[f"{responses.folder}: 000006"].delete == [
        files.url(f"{responses.folder}/commits/000006.json"),
        files.url(f"{last}0.json"),
        files.url(f"{last}1.json"),
    ]


def test_a_store_that_fails_is_no_fault_of_its_units(
    files: Filesystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = find(files, fill(files, tmp_path)[1].folder)

    def fail(*args: object) -> bytes:
        raise StoreError("the network is down")

    monkeypatch.setattr(Filesystem, "read", fail)
    with pytest.raises(StoreError, match="network"):
        verify(folders)


def test_what_is_on_its_way_lies_in_the_scratch_folder(
    files: Filesystem, elsewhere: Filesystem, tmp_path: Path
) -> None:
    folder = find(files, fill(files, tmp_path)[1].folder)[0]
    missing = tmp_path / "no-such-folder"
    for action in (
        lambda: verify([folder], missing),
        lambda: copy([folder], elsewhere, missing),
        lambda: export_features(folder, tmp_path / "exported", "specforge", None, missing),
    ):
        with pytest.raises(FileNotFoundError, match="no-such-folder"):
            action()


# gc


def litter(files: Filesystem, responses: Units, features: Units) -> dict[str, list[str]]:
    """What a store gathers in time, by kind."""
    left = {
        ORPHANS: [f"{features.folder}/shards/0.lost.safetensors", f"{responses.folder}/shards/9.lost.safetensors"],
        LEFT: [f"{features.folder}/commits/.killed.tmp", "runs/demo/.killed.tmp"],
        ATTEMPTS: [f"{features.folder}/attempts/000000-0000/0000.abc.json"],
        PROMPTS: ["prompts/half/units/000000.jsonl", "prompts/half/units/000001.jsonl"],
    }
    kept = [
        f"{features.folder}/attempts/000009-0000/0000.abc.json",  # its unit is not committed
        "prompts/whole/units/000000.jsonl",
        "prompts/whole/summary.json",
        "drafters/abc/state/1.safetensors",
        "runs/demo/summary.json",
    ]
    for key in (*kept, *(key for keys in left.values() for key in keys)):
        files.write(key, b"1234")
    return left


def test_garbage_is_what_nothing_names_and_is_kept_while_it_is_young(files: Filesystem, tmp_path: Path) -> None:
    responses, features = fill(files, tmp_path)
    sound = set(files.list(""))
    left = litter(files, responses, features)
    now = time.time() + 60
    assert {kind: [entry.key for entry in found] for kind, found in garbage(files, now).items()} == left
    assert garbage(files, now)[ORPHANS][0].size == 4
    assert not any(garbage(files, now - 3600).values())  # written a moment ago: perhaps on its way to a commit
    found = garbage(files, now, features.folder)
    assert [entry.key for kind in found.values() for entry in kind] == [
        key for keys in left.values() for key in keys if key.startswith(features.folder)
    ]
    everything = [entry for entries in garbage(files, now).values() for entry in entries]
    assert remove(files, everything, now) == everything
    assert not any(garbage(files, now).values())
    assert sound < set(files.list("")) and verify(find(files)) == []
    assert files.exists("prompts/whole/units/000000.jsonl") and files.exists("drafters/abc/state/1.safetensors")


def test_prompts_that_are_being_made_are_kept_whole(files: Filesystem) -> None:
    files.write("prompts/half/units/000000.jsonl", b"")
    files.write("prompts/half/units/000001.jsonl", b"")
    os.utime(files.url("prompts/half/units/000000.jsonl"), (1, 1))  # one unit is old, the next is of this moment
    assert not any(garbage(files, time.time() - 60).values())


@pytest.mark.parametrize("when", ["after the first listing", "before the removal"])
def test_a_unit_that_is_committed_meanwhile_keeps_its_shard(
    files: Filesystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    _, features = fill(files, tmp_path)
    key = f"{features.folder}/commits/000001-0000.json"
    commit, shard = files.read(key), features.read_commit("000001-0000").shard
    files.delete(key)  # the shard is there, its commit is about to be
    now, entries, listings = time.time() + 60, Filesystem.entries, []

    def commit_after(self: Filesystem, prefix: str) -> Any:
        found = entries(self, prefix)
        listings.append(prefix)
        if len(listings) == (1 if when == "after the first listing" else 2):
            self.create(key, commit)
        return found

    monkeypatch.setattr(Filesystem, "entries", commit_after)
    found = garbage(files, now)[ORPHANS]
    assert [entry.key for entry in found] == ([] if when == "after the first listing" else [shard])
    assert remove(files, found, now) == [] and files.exists(shard)


# copy


def test_a_copy_is_the_same_store_and_is_made_once(
    files: Filesystem, elsewhere: Filesystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    responses, features = fill(files, tmp_path)
    files.write_json(f"{features.folder}/summary.json", {})
    folders = with_responses(find(files, features.folder), find(files))
    assert [folder.name for folder in folders] == [responses.folder, features.folder]  # training reads both
    size = sum(commit.size for units in (responses, features) for commit in units.commits())
    assert copy(folders, elsewhere) == {"units_sent": 4, "bytes_sent": size}
    assert elsewhere.list("") == files.list("")
    assert all(elsewhere.read(key) == files.read(key) for key in files.list(""))
    assert verify(find(elsewhere)) == []
    with counted(monkeypatch) as calls:
        assert copy(folders, elsewhere) == {"units_sent": 0, "bytes_sent": 0}
    assert calls["upload"] == calls["download"] == 0
    damaged = features.commits()[0].shard
    elsewhere.write(damaged, b"torn")
    assert copy(folders, elsewhere)["units_sent"] == 1 and elsewhere.read(damaged) == files.read(damaged)


@pytest.mark.parametrize("at", range(1, 12))
def test_a_copy_that_is_stopped_shows_only_whole_units_and_goes_on(
    files: Filesystem, elsewhere: Filesystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    fill(files, tmp_path)
    writes: list[str] = []

    def stop(name: str) -> Callable[..., Any]:
        operation = getattr(Filesystem, name)

        def stopping(self: Filesystem, *args: Any) -> Any:
            writes.append(name)
            if len(writes) >= at:
                raise KeyboardInterrupt
            return operation(self, *args)

        return stopping

    with monkeypatch.context() as patch:
        for name in ("create", "upload"):
            patch.setattr(Filesystem, name, stop(name))
        with pytest.raises(KeyboardInterrupt):  # of 2 descriptions, 1 engine.json, 4 shards and 4 commits
            copy(find(files), elsewhere)
    if any(key.endswith("description.json") for key in elsewhere.list("")):
        assert verify(find(elsewhere)) == []
    copy(find(files), elsewhere)
    assert elsewhere.list("") == files.list("") and verify(find(elsewhere)) == []


def test_a_damaged_shard_is_not_copied_and_another_capture_not_mixed(
    files: Filesystem, elsewhere: Filesystem, tmp_path: Path
) -> None:
    _, features = fill(files, tmp_path)
    key = f"{features.folder}/commits/000001-0000.json"
    other = replace(features.read_commit("000001-0000"), sha256="0" * 64)
    Units(elsewhere, features.kind, features.fingerprint).create(other)
    with pytest.raises(StoreError, match="has another commit of unit 000001-0000; two captures are not mixed"):
        copy(find(files), elsewhere)
    elsewhere.delete(key)
    shard = features.read_commit("000001-0000").shard
    files.write(shard, bytes(len(files.read(shard))))
    with pytest.raises(StoreError, match=f"{shard} has the sha256"):
        copy(find(files), elsewhere)
    assert not elsewhere.exists(key) and not elsewhere.exists(shard)


# Planning at size


def test_work_grows_with_the_units_and_not_faster(
    files: Filesystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = _calls_at(files, 40, 20, monkeypatch)
    assert listings == {"ls": (2, 41), "stat": (2, 41), "gc": (1, 40), "commits": (0, 40)}
    assert _calls_at(files, 80, 20, monkeypatch) == {"ls": (2, 81), "stat": (2, 81), "gc": (1, 80), "commits": (0, 80)}


@pytest.mark.full
def test_a_million_and_a_half_samples_are_planned(
    files: Filesystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle3_ray.train.features import epoch_order

    listings = _calls_at(files, 3000, 500, monkeypatch)
    assert listings == {"ls": (2, 3001), "stat": (2, 3001), "gc": (1, 3000), "commits": (0, 3000)}
    order = epoch_order(0, 0, [500] * 3000)
    assert len(set(order)) == 1_500_000


def _calls_at(
    files: Filesystem, units: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[int, int]]:
    """For each look at a store of so many commits, the whole listings and the objects read."""
    about = {"boundaries": [2, 4, 6], "dtype": "bfloat16", "target": {}}
    features = Units(files, "features", fingerprint(about))
    features.describe(about)
    files.write(f"{features.folder}/shards/000000.lost.safetensors", b"")
    listed = {"domain": "maths", "tokens": 9, "generated": 5, "targets": 4, "finish_reasons": ["stop"]}
    for number in range(units):
        shard = f"{features.folder}/shards/{number:06d}.{number:012x}.safetensors"
        index = [{"id": f"{number}-{i}", **listed} for i in range(samples)]
        commit = Commit(f"{number:06d}", shard, 9, "0" * 64, index, {})
        key = f"{features.folder}/commits/{number:06d}.json"
        path = Path(files.url(key))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(sealed(asdict(commit), key)))  # quicker than create, which syncs each
    found = {}
    looks: dict[str, Callable[[], Any]] = {
        "ls": lambda: list(table(find(files))),
        "stat": lambda: [list(details(folder)) for folder in find(files)],
        "gc": lambda: garbage(files, time.time()),
        "commits": features.commits,
    }
    for name, look in looks.items():
        with counted(monkeypatch) as calls:
            look()
        found[name] = (calls["entries"], calls["read"])
        assert calls["size"] == 0 and calls["list"] <= 1
    return found


def test_parallel_work_is_bounded_and_ends_with_its_error() -> None:
    running, most = 0, 0

    def work(i: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.001)
        running -= 1
        if i == 50:
            raise ValueError("fifty")
        return i

    started: list[int] = []
    source = (started.append(i) or i for i in range(1000))
    results = in_parallel(work, source, workers=3)
    assert [next(results) for _ in range(10)] == list(range(10))
    assert most <= 3 and len(started) <= 10 + 6
    with pytest.raises(ValueError, match="fifty"):
        list(results)
    assert len(started) < 70


# The command


def run(*overrides: str, root: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ray_jobs.store", f"store.root={root}", *overrides]
    return subprocess.run(command, capture_output=True, text=True, cwd=root.parent, env=environment)


FAULTS = [
    ([], "action"),
    (["action=rm"], "action: 'rm' is none of ls, stat"),
    (["action=ls", "delete=true"], "delete: action=ls does not take it"),
    (["action=ls", "fingerprint=none"], "fingerprint: 'none' begins 0 of"),
    (["action=copy"], "to: action=copy needs"),
    (["action=copy", "to={root}"], "is store.root"),
    (["action=copy", "to=relative"], "to: "),
    (["action=export", "to=/tmp/x", "layout=other"], "layout: 'other' is none of specforge, speculators"),
    (["action=export", "layout=specforge"], "to: an absolute path"),
    (["action=gc", "older_than_hours=soon"], "older_than_hours"),
    (["action=gc", "older_than_hours=-1"], "older_than_hours: -1.0 is less than 0"),
    (["action=ls", "no_such=1"], "no_such"),
    (["action=ls", "store.root=nosuch://x"], "store.root"),
    (["action=ls", "store.root=/no/such/folder"], "store.root: neither"),
]


@pytest.mark.full
@pytest.mark.parametrize(("overrides", "named"), FAULTS, ids=[" ".join(overrides) for overrides, _ in FAULTS])
def test_a_faulty_command_ends_with_2(tmp_path: Path, overrides: list[str], named: str) -> None:
    root = tmp_path / "root"
    fill(Filesystem(str(root)), tmp_path)
    ended = run(*(override.format(root=root) for override in overrides), root=root)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert named in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.full
def test_every_command_of_the_documentation_runs(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    save_file({"model.norm.weight": torch.ones(HIDDEN)}, target / "model.safetensors")
    weights = describe_target(TargetConfig("t", str(target)), target)["weights"]
    _, features = fill(
        Filesystem(str(tmp_path / "root")), tmp_path, target=TARGET | {"weights": weights}, norm=torch.ones(HIDDEN)
    )
    text = (ROOT / "docs" / "store.md").read_text().replace("\\\n", " ")
    lines = [line.split()[3:] for line in text.splitlines() if line.startswith("python -m ray_jobs.store ")]
    actions = [line[0] for line in lines]
    assert sorted(set(actions)) == sorted(f"action={name}" for name in ACTIONS)
    known = {
        "features/0636": features.folder[:13],
        "/data": str(tmp_path),
        "/models/SmolLM2-135M-Instruct": str(target),
    }
    for line in lines:
        if line[0] == "action=transcode" and find_spec("eagle3_ray.store.transcode") is None:
            continue
        for documented, here in known.items():
            line = [word.replace(documented, here) for word in line]
        ended = run(*line, root=tmp_path / "root")
        assert ended.returncode == 0, f"{line}: {ended.stderr}"


def test_the_commands_work_on_a_store_alone(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    files = Filesystem(str(root))
    responses, features = fill(files, tmp_path)
    before = files.list("")

    def told(*overrides: str, code: int = 0) -> str:
        ended = run(*overrides, root=root)
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout

    assert told("action=ls").count("\n") == 3
    assert features.folder in told("action=stat", "fingerprint=features/")
    assert told("action=verify").endswith("verify: 4 units, 0 bad\n")
    assert "4 units sent" in told("action=copy", f"to={other}")
    left = [key for keys in litter(files, responses, features).values() for key in keys]
    assert "orphan shards: 0 objects" in told("action=gc")  # too young
    dry = told("action=gc", "older_than_hours=0")
    assert "orphan shards: 2 objects, 8 B" in dry and "nothing was removed" in dry and files.exists(left[0])
    assert "removed 7 objects, 28 B" in told("action=gc", "older_than_hours=0", "delete=true")
    assert set(before) <= set(files.list("")) and not any(files.exists(key) for key in left)
    shard = features.commits()[0].shard
    files.write(shard, b"torn")
    out = told("action=verify", code=1)
    assert f"to redo it, delete {root}/{features.folder}/commits/000000-0000.json" in out
    assert "has 4 bytes" in run("action=copy", f"to={tmp_path}/third", root=root).stderr
