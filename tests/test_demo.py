"""`make demo`, whole: what a newcomer runs, and what it must give."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.full]


def test_the_demo_gives_a_drafter_that_sglang_accepts(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["make", "demo"],
        cwd=ROOT,
        env={**os.environ, "EAGLE3_RAY_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    print(json.dumps({name: summary[name] for name in ("accept_length", "accept_length_by_step", "seconds")}))
    assert summary["accept_length"] >= 1.5
    assert summary["greedy_identical"] is True
    assert summary["verification"]["verdict"] == "aligned"
    assert summary["samples"] >= 300
    assert summary["heldout"] >= 32
    for line in (f"accept length  {summary['accept_length']}", summary["drafter_path"], summary["report_path"]):
        assert line in ended.stdout
    shares = summary["accept_length_by_step"]
    assert len(shares) == 3 and all(0 < share < 1 for share in shares)
