"""The report page, from a summary alone."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eagle3_ray.config import EvaluateConfig
from eagle3_ray.report import report
from eagle3_ray.store.filesystem import Filesystem


def walked(accept_length: float) -> dict[str, Any]:
    return {"completion_tokens": 90, "verify_steps": 60, "accept_length": accept_length, "never_right": 1.03}


def page(tmp_path: Path, heldout: int, verification: dict[str, Any] | None = None) -> str:
    """The report's text, without tags and line breaks."""
    training = {
        "draft_vocab_size": 8192,
        "coverage": 0.98765,
        "coverage_by_domain": {"code": 0.9912, "maths": 0.5},
        "heldout": {"samples": heldout, "draft_steps": 3, "before": walked(1.1), "after": walked(1.5)},
    }
    empty = {"by_domain": {}, "seconds": {}, "versions": {}, "boundaries": [2, 4], "layer_ids": [1, 3]}
    numbers = dict.fromkeys(
        ["completion_tokens", "verify_steps", "heldout", "samples", "prompts", "tokens_captured", "tokens_generated"], 7
    )
    paths = {"drafter": "drafters/d", "drafter_path": "d", "features_path": "f", "bytes_stored": 10}
    summary = {"run": "r", "target": "t", "accept_length": 1.5, "accept_length_by_step": [0.5]}
    summary |= {"greedy_identical": None}
    files = Filesystem(str(tmp_path))
    run: Any = SimpleNamespace(files=files, config=SimpleNamespace(run="r", evaluate=EvaluateConfig(source="x")))
    report(run, {**summary, **empty, **numbers, **paths, "training": training, "verification": verification})
    return " ".join(re.sub(r"<[^>]+>", " ", files.read("runs/r/report.html").decode()).split())


def test_the_vocabulary_is_told_by_domain_and_the_accept_length_before_and_after(tmp_path: Path):
    told = page(tmp_path, heldout=16)
    assert "8192 tokens, 98.77% of what the target said (code 99.12%, maths 50.00%)" in told
    assert "over 16 samples that were not trained on: accept length 1.100 before the first step, 1.500 after" in told
    assert "not trained on" not in page(tmp_path, heldout=0)


def test_the_matrix_and_the_causes_are_told(tmp_path: Path):
    assert "Not verified: verify.samples is 0." in page(tmp_path, heldout=0)
    spread = {"median": [1e-7, 2e-7], "p95": [3e-7, 4e-7]}
    found = {
        "verdict": "misaligned",
        "causes": ["layer ids are off by one"],
        "matrix": [[0.5, 1.25], [2e-7, 0.75]],
        "trained": [2, 4],
        "facts": {"layers_to_capture": [3, 5]},
        "rows": {"prompt": 99, "verify": 0},
        "samples": 4,
        "errors": {"prompt": spread, "verify": {}},
        "floor": {"prompt": spread, "verify": {}},
    }
    told = page(tmp_path, heldout=0, verification=found)
    assert "misaligned layer ids are off by one" in told
    assert "served boundary trained 2 trained 4 3 0.5 1.2 5 2e-07 0.75" in told
    assert "prompts 99 2e-07 4e-07 2e-07 4e-07" in told
    assert "verify steps" not in told.split("states of")[1].split("Training")[0]
