"""Two extractions of one corpus into one store at the same time, each with a Ray of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, compose

from eagle3_ray.extract import extracted
from eagle3_ray.prepare import prepare
from eagle3_ray.run import open_run
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.commits import Units

pytestmark = pytest.mark.full


@pytest.mark.parametrize("other", [[], ["capture.boundaries=[1,3]"]], ids=["the same", "other boundaries"])
def test_two_jobs_at_once_do_everything_once(tiny_llama_folder: Path, tmp_path: Path, other: list[str]) -> None:
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"id": f"p{i}", "prompt": f"Say {i}"}) + "\n" for i in range(40))
    )
    settings = ["engine=transformers", f"target.path={tiny_llama_folder}", f"prompts.source={tmp_path}/p.jsonl"]
    settings += ["prompts.unit_size=4", "sampling.max_new_tokens=8", "hardware.num_actors=1", "cluster.num_cpus=1"]
    settings += [f"store.root={tmp_path}/store", f"store.scratch_dir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    jobs = []
    for number, overrides in enumerate((settings, settings + other)):
        log = (tmp_path / f"{number}.log").open("wb")
        command = [sys.executable, "-m", "ray_jobs.extract", *overrides]
        jobs.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))
    ended = [job.wait() for job in jobs]
    assert ended == [0, 0], [(tmp_path / f"{number}.log").read_text()[-2000:] for number in range(2)]
    for overrides in (settings, settings + other):
        run = open_run(compose(*overrides))
        corpus = prepare(run, run.config.prompts)
        features, commits = extracted(run, corpus)
        responses, _ = run.responses(corpus.fingerprint)
        for units in (responses, features):
            check_every_shard_is_named_and_whole(units)
        found = Counter(sample["id"] for commit in commits for sample in commit.samples)
        assert found == {f"p{i}": 1 for i in range(40)}


def check_every_shard_is_named_and_whole(units: Units) -> None:
    """Whoever came second has removed its own shard, and nobody else's."""
    commits = units.commits()
    assert units.files.list(f"{units.folder}/shards") == sorted(commit.shard for commit in commits)
    for commit in commits:
        reader = units.open(commit, Cache(Path("/nonexistent")))
        assert len(reader) == len(commit.samples)
