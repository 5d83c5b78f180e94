"""What cannot work is refused with exit code 2, a message that names the setting, and no engine started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, compose
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from eagle3_ray.config import ConfigError
from eagle3_ray.evaluate import heldout
from eagle3_ray.prepare import prepare
from eagle3_ray.run import open_run


def command(stage: str, *overrides: str, home: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EAGLE3_RAY_HOME": str(home), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", f"ray_jobs.{stage}", *overrides],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
    )


FAULTS = [
    ("no.such.setting=1", "no.such.setting"),
    ("train.no_such=1", "no_such"),
    ("target=no_such", "no_such"),
    ("train.steps=many", "steps"),
    ("prompts.source=missing.jsonl", "prompts.source"),
    ("evaluate.source=missing.jsonl", "evaluate.source"),
    ("prompts.source={empty}", "prompts.source"),
    ("capture.boundaries=[2,15,30]", "capture.boundaries"),
    ("capture.boundaries=[15,2]", "capture.boundaries"),
    ("drafter.draft_vocab_size=49153", "drafter.draft_vocab_size"),
    ("store.root={file}/below", "store.root"),
    ("store.root=relative", "store.root"),
    ("store.root=s3://key:secret@bucket/p", "store.root"),
    ("store.cache_bytes=1000", "store.cache_bytes"),
    ("target.path=/no/such/folder", "target.path"),
    ("engine.name=other", "engine.name"),
    ("engine.dtype=float8", "engine.dtype"),
    ("evaluate.num_draft_tokens=5", "evaluate.num_draft_tokens: a chain (topk 1) of 3 steps verifies 4 tokens, not 5"),
    ("evaluate.temperature=0.7", "evaluate.temperature: 0.7, but with hardware.device=cpu"),
    ("evaluate.sweep=[[3,1,4],[3,1]]", "evaluate.sweep [3, 1]: not [num_steps, topk, num_draft_tokens]"),
    ("evaluate.source=null", "evaluate.source: None with evaluate.suites=[]"),
    ("+evaluate.suites={{a: {{source: a.jsonl}}}}", "with evaluate.suites=['a']; one of the two, and not both"),
    ("evaluate.drafters=[/no/such/folder]", "evaluate.drafters: no drafter at '/no/such/folder'"),
    ("train.batch_size=0", "train.batch_size"),
    ("train.max_length=0", "train.max_length"),
    ("train.num_workers=3", "train.num_workers: 3 share train.batch_size=2 samples a step"),
    ("hardware.tp_size=2", "drafter.num_attention_heads: 9 cannot be shared by 2 ranks"),
    ("train.loss=kl", "train.loss: 'kl'"),
    ("train.on_nonfinite=ignore", "train.on_nonfinite: 'ignore' is none of stop, skip"),
    ("train.loss_spike=1", "train.loss_spike: 1.0 is not above 1"),
    ("train.loss_spike=nan", "train.loss_spike: nan is not above 1"),
    ("train.loss_spike=inf", "train.loss_spike: inf is not above 1"),
    ("train.step_decay=0", "train.step_decay: 0"),
    ("train.step_decay=1.5", "train.step_decay: 1.5"),
    ("capture.boundaries=[2]", "capture.boundaries"),
    ("drafter.num_attention_heads=7", "drafter.num_attention_heads"),
    ("drafter.attention=mla", "drafter.attention"),
    ("drafter.num_hidden_layers=0", "drafter.num_hidden_layers"),
    ("drafter.hidden_size=1728", "drafter.hidden_size"),
    ("drafter.vocabulary=best", "drafter.vocabulary"),
    ("drafter.vocabulary=start", "drafter.vocabulary"),
    ("drafter.start_from=/no/such/folder", "drafter.vocabulary"),
    ("drafter.initial_fc=zero", "drafter.initial_fc"),
    ("drafter.initial_lm_head=zero", "drafter.initial_lm_head"),
    ("train.heldout=-1", "train.heldout"),
    ("target.weights=/no/such/folder", "target.weights"),
    ("export.embedding=mine", "export.embedding: 'mine'"),
    ("export.format=gguf", "export.format: 'gguf' is none of sglang, vllm, speculators"),
    ("features.folder=features/0123456789abcdef", "features.folder: no features at 'features/0123456789abcdef'"),
    ("+engine.args.pp_size=2", "pp_size"),
    ("+engine.args.enable_two_batch_overlap=true", "enable_two_batch_overlap"),
]


@pytest.mark.parametrize(("override", "named"), FAULTS, ids=[override for override, _ in FAULTS])
def test_a_fault_is_refused_before_any_engine_starts(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, named: str
) -> None:
    monkeypatch.setenv("EAGLE3_RAY_HOME", str(tmp_path / "home"))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "file").write_text("")
    override = override.format(empty=tmp_path / "empty.jsonl", file=tmp_path / "file")
    with pytest.raises((ConfigError, HydraException, OmegaConfBaseException)) as refused:
        run = open_run(compose(override))
        if override.startswith("evaluate.source"):
            heldout(run)
        prepare(run, run.config.prompts)
    assert named in str(refused.value)


def test_key_value_heads_are_shared_or_repeated_by_the_ranks(smollm2: Path, tmp_path: Path) -> None:
    settings = [f"store.root={tmp_path}", "hardware.tp_size=3"]
    open_run(compose(*settings, "drafter.num_key_value_heads=1"))  # repeated
    open_run(compose(*settings, "drafter.num_key_value_heads=9"))
    six = [*settings, "drafter.num_attention_heads=6", "drafter.num_key_value_heads=2"]
    with pytest.raises(ConfigError, match="drafter.num_key_value_heads: 2 cannot be shared by 3 ranks"):
        open_run(compose(*six))
    open_run(compose(*six, "+engine.args.dp_size=3", "+engine.args.enable_dp_attention=true"))  # a rank has all heads


def test_a_start_is_looked_at_before_any_engine_starts(smollm2: Path, tmp_path: Path) -> None:
    settings = [f"target.path={smollm2}", f"store.root={tmp_path}", "drafter.vocabulary=start"]
    settings += ["drafter.start_from=/no/such/folder"]
    with pytest.raises(ConfigError, match="drafter.start_from: '/no/such/folder': no config.json with safetensors"):
        open_run(compose(*settings))
    with pytest.raises(ConfigError, match="train.heldout: 0 is less than 1"):
        open_run(compose(*settings, "train.heldout=0"))


# One of Hydra's, one of OmegaConf's, one of our own checks, one of a stage
@pytest.mark.parametrize("fault", [FAULTS[0], FAULTS[3], FAULTS[7], FAULTS[4]], ids=lambda fault: fault[0])
def test_a_refusal_ends_the_command_with_two(smollm2: Path, tmp_path: Path, fault: tuple[str, str]) -> None:
    override, named = fault
    ended = command("prepare", override, home=tmp_path / "home")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Ray" not in ended.stdout  # no cluster either


def test_the_resolved_configuration_can_be_printed(tmp_path: Path) -> None:
    ended = command("pipeline", "--cfg", "job", "--resolve", "train.steps=7", home=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "steps: 7" in ended.stdout


def test_prepare_runs_from_any_folder_and_writes_only_below_the_store(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    ended = command("prepare", home=tmp_path / "home", cwd=tmp_path / "elsewhere")
    assert ended.returncode == 0, ended.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["prompts"]
    again = command("prepare", home=tmp_path / "home", cwd=tmp_path / "elsewhere")
    assert again.stdout == ended.stdout


def test_a_record_that_is_there_twice_is_counted_and_kept_once(smollm2: Path, tmp_path: Path) -> None:
    lines = ['{"prompt": "a"}', '{"prompt": "a"}', '{"id": "x", "prompt": "b"}', '{"id": "x", "prompt": "c"}']
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    ended = command("prepare", f"prompts.source={tmp_path}/p.jsonl", home=tmp_path / "home")
    assert ended.returncode == 0, ended.stderr
    (summary,) = (json.loads(path.read_text()) for path in (tmp_path / "home").rglob("summary.json"))
    assert (summary["records"], summary["duplicates"], summary["prompts"], summary["bad"]) == (4, 1, 3, 0)
    (unit,) = (tmp_path / "home").rglob("*.jsonl")
    assert len({json.loads(line)["id"] for line in unit.read_text().splitlines()}) == 3  # one id, two texts: two ids


def test_too_many_bad_records_stop_the_job(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    ended = command("prepare", f"prompts.source={tmp_path}/p.jsonl", home=tmp_path / "home")
    assert ended.returncode == 2
    assert "prompts.max_bad_share=0.05" in ended.stderr
    assert "1 of 2 records" in ended.stderr
    again = command("prepare", f"prompts.source={tmp_path}/p.jsonl", home=tmp_path / "home")
    assert (again.returncode, again.stderr) == (2, ended.stderr)  # what is prepared is not thereby accepted
    kept = command("prepare", f"prompts.source={tmp_path}/p.jsonl", "prompts.max_bad_share=0.5", home=tmp_path / "home")
    assert kept.returncode == 0
    assert "1 prompts, 1 bad records" in kept.stdout
