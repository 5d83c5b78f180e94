"""The whole line with its store on a real S3 server: nothing of it is left on local disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from seaweed import serve

from eagle3_ray.store.filesystem import Filesystem

pytestmark = [pytest.mark.full, pytest.mark.engine]


def test_the_pipeline_runs_on_s3_and_repeats_nothing(smollm2: Path, tmp_path: Path) -> None:
    with serve(tmp_path / "seaweed") as server:
        secret = server.storage_options["secret"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "AWS_ACCESS_KEY_ID": server.storage_options["key"],
            "AWS_SECRET_ACCESS_KEY": secret,
        }
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        command = [sys.executable, "-m", "ray_jobs.pipeline", "store=s3", f"store.root=s3://{server.bucket}/runs/a"]
        command += [f"+store.storage_options.endpoint_url={server.endpoint}", f"store.scratch_dir={scratch}", "run=s3"]
        command += ["prompts.limit=8", "prompts.unit_size=4", "sampling.max_new_tokens=12", "evaluate.limit=2"]
        command += ["evaluate.max_new_tokens=12", "train.steps=2", "train.heldout=2", "store.shard_bytes=1000000"]
        ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr[-4000:]
        assert "accept length" in ended.stdout
        assert secret not in ended.stdout + ended.stderr
        files = Filesystem(f"s3://{server.bucket}/runs/a", server.storage_options)
        summary = json.loads(files.read("runs/s3/summary.json"))
        assert summary["accept_length"] >= 1.0
        keys = files.list("")
        for part in ("/commits/", "/shards/", "runs/s3/report.html", "/export/model.safetensors", "/weights/"):
            assert any(part in key for key in keys), keys
        assert len([key for key in keys if key.startswith("features/") and "/commits/" in key]) > 2  # cut by bytes
        for key in keys:
            assert secret.encode() not in files.read(key), key
        assert [path.name for path in scratch.iterdir() if "cache" not in path.name] == []

        again = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert again.returncode == 0, again.stderr[-4000:]
        assert files.list("") == keys
