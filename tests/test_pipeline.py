"""The whole line through a real `ray job submit`, against a head that `ray start` made."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from ray.job_submission import JobSubmissionClient
from tenacity import Retrying, stop_after_delay, wait_fixed

from eagle3_ray.drafter.checkpoint import load

pytestmark = pytest.mark.engine
RAY = str(Path(sys.executable).parent / "ray")
SMALL = [
    "prompts.limit=9",
    "prompts.unit_size=4",
    "sampling.max_new_tokens=12",
    "evaluate.limit=6",
    "evaluate.max_new_tokens=40",
    "hardware.num_actors=1",
    "capture.boundaries=[2,4,6]",
    "train.steps=0",
    "verify.samples=2",
    "run=job",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def submit(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Submits jobs whose working folder is a copy of the tracked code, to a head of its own."""
    folder = tmp_path_factory.mktemp("head")
    code = folder / "code"
    for name in ("eagle3_ray", "ray_jobs", "conf", "examples"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    dashboard = free_port()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # jobs call plain `python`
        "RAY_AUTH_MODE": "disabled",  # a head on loopback, for this test alone
        "RAY_TMPDIR": str(Path("/tmp") / f"ray-{os.getpid()}"),  # sockets need short paths
        "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "EAGLE3_RAY_HOME": str(folder / "home"),
    }
    environment.pop("PYTHONPATH", None)
    head = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
    log = (folder / "head.log").open("wb")
    started = subprocess.Popen(
        [RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={free_port()}", "--num-cpus=4"]
        + [f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", "--disable-usage-stats"]
        + [f"--dashboard-agent-listen-port={free_port()}"],  # else the one that another Ray on this machine has
        env=head,
        cwd=folder,
        stdout=log,
        stderr=subprocess.STDOUT,
    )

    def run(stage: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        command = ["python", "-m", f"ray_jobs.{stage}", *overrides, f"store.root={folder}/store"]
        return subprocess.run(
            [RAY, "job", "submit", "--working-dir", str(code), "--", *command],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
        )

    run.store = folder / "store"
    try:
        wait_for_jobs(environment["RAY_ADDRESS"])
        yield run
    finally:  # this head and no other: `ray stop` would end every Ray on the machine
        family = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
        for process in family:
            process.terminate()
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in alive:
            process.kill()
        started.wait()
        log.close()
        shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)


def wait_for_jobs(address: str) -> None:
    """Until the head takes a job: its dashboard is up before its agent is, by minutes where other tests run beside."""
    for attempt in Retrying(stop=stop_after_delay(600), wait=wait_fixed(1), reraise=True):
        with attempt:
            JobSubmissionClient(address).submit_job(entrypoint="true")


@pytest.fixture(scope="module")
def small(tiny_llama_folder: Path) -> list[str]:
    """The demo trains on SmolLM2 itself."""
    return [*SMALL, f"target.path={tiny_llama_folder}"]


@pytest.fixture(scope="module")
def summary(submit, small: list[str]) -> dict:
    """The pipeline's summary; its drafter had no training step."""
    ended = submit("pipeline", *small)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    return json.loads((submit.store / "runs" / "job" / "summary.json").read_text())


def test_the_summary_says_what_was_done(summary: dict, submit) -> None:
    assert (summary["samples"], summary["prompts"], summary["failed"]) == (9, 9, 0)
    assert summary["boundaries"] == [2, 4, 6]
    assert summary["layer_ids"] == [1, 3, 5]
    assert summary["heldout"] == 6
    assert summary["completion_tokens"] == sum(row["completion_tokens"] for row in summary["by_domain"].values())
    assert set(summary["seconds"]) == {"prepare", "extract", "train", "export", "evaluate", "verify", "total"}
    assert summary["versions"]["sglang"] == "0.5.23"
    for engine in [*summary["engines"]["extract"], *summary["engines"]["evaluate"]]:
        assert engine["engine"] == "sglang.srt.entrypoints.engine.Engine"
        assert len(engine["scheduler_pids"]) == 1
    for engine in summary["engines"]["extract"]:
        assert [len(hooks) for hooks in engine["hooked"].values()] == [2]
    assert summary["engines"]["evaluate"][0]["hooked"] == {}


def test_a_drafter_of_no_training_accepts_next_to_nothing(summary: dict) -> None:
    assert 1.0 <= summary["accept_length"] < 1.1
    assert (summary["greedy_identical"], summary["disagreement"]) == (True, None)


def test_what_is_walked_is_what_was_served(summary: dict) -> None:
    assert summary["not_simulated"] == {}
    assert summary["simulated"]["answers"]["completion_tokens"] == summary["completion_tokens"]
    assert abs(summary["simulated"]["answers"]["served_minus_simulated"]) <= 0.01
    assert "served minus simulated" in Path(summary["report_path"]).read_text()
    assert summary["accept_length"] == pytest.approx(summary["completion_tokens"] / summary["verify_steps"], abs=1e-3)


def test_greedy_answers_are_the_same_with_and_without_speculation(summary: dict) -> None:
    assert summary["greedy_identical"] is True


def test_training_features_are_the_serving_features(summary: dict, submit) -> None:
    found = summary["verification"]
    assert (found["verdict"], found["causes"], found["samples"]) == ("aligned", [], 2)
    assert found["trained"] == found["facts"]["layers_to_capture"] == [2, 4, 6]
    assert [min(range(3), key=row.__getitem__) for row in found["matrix"]] == [0, 1, 2]
    for kind in ("prompt", "verify"):
        assert found["rows"][kind] > 20
        assert max(found["errors"][kind]["p95"]) < 0.01  # the store's bfloat16, of a float32 engine
    assert found["drafts"]["same"] == 1.0
    assert "aligned" in Path(summary["report_path"]).read_text()


def test_all_outputs_lie_below_the_store(summary: dict, submit) -> None:
    for name in ("drafter_path", "report_path", "features_path"):
        assert Path(summary[name]).is_relative_to(submit.store)
    names = {path.name for path in submit.store.iterdir()}
    assert names == {"prompts", "responses", "features", "drafters", "runs"}
    assert not (submit.store.parent / "home").exists()
    page = Path(summary["report_path"]).read_text()
    assert f"{summary['accept_length']:.3f}" in page


def test_what_is_stored_adds_up(summary: dict, submit) -> None:
    (features,) = (submit.store / "features").iterdir()
    commits = [json.loads(path.read_text()) for path in sorted((features / "commits").iterdir())]
    assert [commit["unit"] for commit in commits] == ["000000-0000", "000001-0000", "000002-0000"]
    assert sum(sample["tokens"] for commit in commits for sample in commit["samples"]) == summary["tokens_captured"]
    shards = sum(
        path.stat().st_size
        for kind in ("features", "responses")
        for path in (submit.store / kind).rglob("*.safetensors")
    )
    assert shards == summary["bytes_stored"]


def test_the_exported_drafter_names_the_captured_layers(summary: dict) -> None:
    folder = Path(summary["drafter_path"])
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert load(folder).config.draft_vocab_size == 4096


def test_a_second_run_repeats_nothing(summary: dict, submit, small: list[str]) -> None:
    def written() -> dict[Path, int]:
        kinds = ("prompts", "responses", "features", "drafters")
        files = (path for kind in kinds for path in (submit.store / kind).rglob("*") if path.is_file())
        return {path: path.stat().st_mtime_ns for path in files}

    before = written()
    ended = submit("pipeline", *small)
    assert ended.returncode == 0, ended.stdout[-6000:]
    assert written() == before
    again = json.loads((submit.store / "runs" / "job" / "summary.json").read_text())
    changed = {"seconds": None, "check": None}
    assert again | changed == summary | changed


def test_a_faulty_job_ends_before_any_engine(submit, small: list[str]) -> None:
    ended = submit("extract", *small, "capture.boundaries=[2,4,8]")
    assert ended.returncode != 0
    assert "capture.boundaries: 8 is outside the target" in ended.stdout + ended.stderr
