"""What several tests share: the demo's target, tiny targets, and engines that start once a session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # see conf/hardware/cpu.yaml
os.environ.setdefault("RAY_worker_niceness", "0")  # not Ray's 15: another file's tests run on the same cores


def compose(*overrides: str) -> Any:
    """The configuration of a command line."""
    from hydra import compose, initialize_config_dir

    from ray_jobs import typed

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return typed(compose("config", overrides=list(overrides)))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo's target, made when it is not there."""
    made = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "smollm2.py")], check=True, capture_output=True, text=True
    )
    return Path(made.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """A random eight-layer Llama with SmolLM2's tokenizer."""
    import shutil

    from tiny_targets import tiny_llama

    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama(folder, vocab=49152, layers=8)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (smollm2 / name).exists():
            shutil.copy(smollm2 / name, folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_engine(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One real SGLang engine on SmolLM2 in fp32, capturing the default boundaries, for the whole session."""
    from eagle3_ray.engines.sglang import SGLangEngine
    from eagle3_ray.run import open_run

    run = open_run(compose(f"target.path={smollm2}", f"store.root={tmp_path_factory.mktemp('store')}"))
    engine = SGLangEngine(run.config, run.folder, run.spec)
    yield engine
    engine.close()


@pytest.fixture
def left_behind() -> Iterator[Callable[[], set[str]]]:
    """Says what is new in shared memory and belongs to no process that lives."""
    import psutil

    from eagle3_ray.engines.processes import shared_memory
    from eagle3_ray.leftovers import SHARED_MEMORY

    files = {str(path) for path in Path(SHARED_MEMORY).iterdir()}
    yield (
        lambda: (
            {str(path) for path in Path(SHARED_MEMORY).iterdir() if not path.is_dir()}
            - files
            - shared_memory(psutil.pids())
        )
    )
