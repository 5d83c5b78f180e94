"""Real SGLang on a real target: what it captures is what Transformers computes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT, compose

from eagle3_ray.config import SamplingConfig
from eagle3_ray.engines import start_engine
from eagle3_ray.engines.base import EngineError, RequestError, answer, each
from eagle3_ray.engines.sglang import SGLangEngine, engine_environment
from eagle3_ray.engines.sglang_plugin import HOOKS
from eagle3_ray.engines.transformers import TransformersEngine
from eagle3_ray.leftovers import is_alive, own_folder
from eagle3_ray.probe import probe
from eagle3_ray.run import Run, open_run

pytestmark = pytest.mark.engine
TOLERANCE = 1e-4  # of the largest value of a state, in fp32
GREEDY = SamplingConfig(max_new_tokens=24)


def reference(run: Run) -> TransformersEngine:
    config = dataclasses.replace(run.config, engine=dataclasses.replace(run.config.engine, name="transformers"))
    config.engine.version = None
    return TransformersEngine(config, run.folder, run.spec)


def assert_same_states(captured, expected, boundaries: int) -> None:
    """Every row of every boundary, and the last hidden state, within TOLERANCE of that state's scale."""
    assert captured.aux.shape == expected.aux.shape
    assert captured.last_hidden.shape == expected.last_hidden.shape
    states = zip(captured.aux.chunk(boundaries, -1), expected.aux.chunk(boundaries, -1), strict=True)
    for got, wanted in [*states, (captured.last_hidden, expected.last_hidden)]:
        assert torch.isfinite(got).all()
        assert (got - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@pytest.fixture(scope="module")
def prompts(smollm2_tokenizer) -> list[list[int]]:
    texts = ["Why is the sky blue?", "Count to five.", "Hi", "Write a long poem about the sea. " * 40]
    render = smollm2_tokenizer.apply_chat_template
    chats = [render([{"role": "user", "content": t}], tokenize=False, add_generation_prompt=True) for t in texts]
    return [smollm2_tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats] + [[7]]


@pytest.fixture(scope="module")
def smollm2_reference(smollm2, tmp_path_factory) -> TransformersEngine:
    store = tmp_path_factory.mktemp("store")
    return reference(open_run(compose(f"target.path={smollm2}", f"store.root={store}")))


def test_the_engine_says_what_it_is(smollm2_engine: SGLangEngine) -> None:
    info = smollm2_engine.info
    assert info["engine"] == "sglang.srt.entrypoints.engine.Engine"
    assert info["version"] == "0.5.23"
    assert info["layer_ids"] == [1, 14, 26]  # boundaries 2, 15, 27 in Llama's own words
    (pid,) = info["scheduler_pids"]
    assert "scheduler" in "".join(psutil.Process(pid).cmdline())
    assert info["hooked"] == {str(pid): list(HOOKS)}
    assert info["layers_to_capture"] == [2, 15, 27]  # read back from the model itself
    assert info["resolved"]["prefill_attention_backend"] == "intel_amx"
    assert info["resolved"]["dtype"] == "float32"


def test_captured_states_equal_transformers(smollm2_engine, smollm2_reference, prompts) -> None:
    together = each(lambda ids: smollm2_engine.capture([ids])[0], prompts, 8)  # one batch, several requests
    for ids, captured in zip(prompts, together, strict=True):
        assert len(captured.aux) == len(ids)
        assert_same_states(captured, smollm2_reference.capture([ids])[0], 3)


def test_a_prompt_captured_behind_its_own_answer_has_every_row(smollm2_engine, smollm2_reference, prompts) -> None:
    ids = list(prompts[0])
    (first,) = smollm2_engine.generate([ids], GREEDY)
    whole = ids + first.token_ids  # all of it in the prefix cache by now
    for _ in range(2):
        (captured,) = smollm2_engine.capture([whole])
        assert_same_states(captured, smollm2_reference.capture([whole])[0], 3)
    (again,) = smollm2_engine.generate([ids], GREEDY)
    assert again == first  # capturing in between changed no answer


def test_generated_ids_are_the_model_own_with_the_end_token(smollm2_engine, smollm2_reference, prompts) -> None:
    long = dataclasses.replace(GREEDY, max_new_tokens=48)
    answers = smollm2_engine.generate(prompts[1:3], long)
    assert answers == smollm2_reference.generate(prompts[1:3], long)
    assert any(response.finish_reason == "stop" and response.token_ids[-1] == 2 for response in answers)


def test_sampling_is_obeyed(smollm2_engine, prompts) -> None:
    hot = SamplingConfig(max_new_tokens=16, temperature=2.0)
    drawn = [smollm2_engine.generate([prompts[0]], hot)[0].token_ids for _ in range(3)]
    assert len({tuple(ids) for ids in drawn}) > 1
    only_best = dataclasses.replace(hot, top_k=1)
    assert smollm2_engine.generate([prompts[0]], only_best) == smollm2_engine.generate(
        [prompts[0]], dataclasses.replace(GREEDY, max_new_tokens=16)
    )


def test_turns_are_answered_on_the_answers_before_them(smollm2_engine, prompts, smollm2_tokenizer) -> None:
    tail = smollm2_tokenizer("<|im_end|>\n<|im_start|>user\nAnd why?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    answered = answer(smollm2_engine, [prompts[1], tail], GREEDY, 2048)
    first, second = (response.token_ids for response in answered.responses)
    ended = first[-1] == tail[0]
    between = tail[1:] if ended else tail
    assert answered.token_ids == prompts[1] + first + between + second
    marked = [t for t, said in zip(answered.token_ids, answered.loss_mask, strict=True) if said]
    assert marked == first + second
    assert smollm2_engine.generate([prompts[1] + first + between], GREEDY)[0].token_ids == second


def test_an_over_long_prompt_is_refused_alone(smollm2_engine, prompts) -> None:
    too_long = [5] * 9000
    results = each(lambda ids: smollm2_engine.generate([ids], GREEDY)[0], [prompts[0], too_long, prompts[1]], 3)
    assert isinstance(results[1], RequestError)
    assert [len(results[i].token_ids) > 0 for i in (0, 2)] == [True, True]
    with pytest.raises(RequestError, match="exceed the context"):
        answer(smollm2_engine, [too_long], GREEDY, 8192)


def test_nothing_waits_in_shared_memory_after_a_capture(smollm2_engine, prompts) -> None:
    smollm2_engine.capture(prompts)
    assert list(smollm2_engine.capture_dir.glob("*.rows")) == []


def test_rows_in_shared_memory_are_bounded(smollm2_engine, prompts, monkeypatch) -> None:
    ids = prompts[0]
    size = len(ids) * 4 * 576 * 4  # three boundaries and the last, fp32
    monkeypatch.setattr(smollm2_engine, "capture_bytes", 2 * size)
    waiting = []

    def hold(_: int) -> int:
        (captured,) = smollm2_engine.capture([ids])
        waiting.append(smollm2_engine._waiting_bytes)
        return len(captured.aux)

    assert each(hold, range(6), 6) == [len(ids)] * 6
    assert 0 < max(waiting) <= 2 * size
    assert smollm2_engine._waiting_bytes == 0
    with pytest.raises(RequestError, match=f"need {3 * size} bytes, more than hardware.capture_bytes={2 * size}"):
        smollm2_engine.capture([ids] * 3)
    assert len(smollm2_engine.capture([ids] * 2)) == 2


def test_shared_memory_without_room_is_refused_at_the_start(tiny_llama_folder, tmp_path) -> None:
    run = open_run(
        compose(f"target.path={tiny_llama_folder}", f"store.root={tmp_path}", "hardware.capture_bytes=1000000000000")
    )
    with pytest.raises(EngineError, match="hardware.capture_bytes: 1000000000000, and .* are free in /dev/shm"):
        start_engine(run.config, run.folder, run.spec)


def test_the_likeliest_next_tokens_are_the_targets(smollm2_engine, smollm2_reference, prompts) -> None:
    found, wanted = smollm2_engine.next_tokens(prompts[0]), smollm2_reference.next_tokens(prompts[0])
    assert [token for _, token in found] == [token for _, token in wanted]
    assert torch.allclose(torch.tensor([p for p, _ in found]), torch.tensor([p for p, _ in wanted]), atol=1e-3)


def test_the_probe_passes_on_a_real_engine_with_either_reference(
    smollm2, smollm2_engine, prompts, tmp_path, monkeypatch
):
    run = open_run(compose(f"target.path={smollm2}", f"store.root={tmp_path}"))
    found = probe(run, smollm2_engine, prompts[:3])
    assert found["reference"] == "transformers" and max(found["errors"].values()) < 1e-5
    monkeypatch.setattr("eagle3_ray.probe.REFERENCE_BYTES", 0)
    found = probe(run, smollm2_engine, prompts[:3])
    assert found["reference"] == "output head"
    assert found["same_token"] == 1.0 and found["logprob_error"] < 1e-4


@pytest.mark.full
def test_the_probe_passes_on_a_real_engine_in_bf16(smollm2, prompts, tmp_path, monkeypatch) -> None:
    """Its limits leave room for the rounding, and none for a neighbouring boundary."""
    run = open_run(compose(f"target.path={smollm2}", f"store.root={tmp_path}", "engine.dtype=bfloat16"))
    engine = start_engine(run.config, run.folder, run.spec)
    try:
        found = probe(run, engine, prompts[:3])
        assert found["reference"] == "transformers" and 1e-4 < max(found["errors"].values()) < 0.05
        monkeypatch.setattr("eagle3_ray.probe.REFERENCE_BYTES", 0)
        assert probe(run, engine, prompts[:3])["reference"] == "output head"
    finally:
        engine.close()


@pytest.mark.full
def test_an_engine_that_answers_no_more_counts_as_dead(tiny_llama_folder, tmp_path) -> None:
    overrides = [f"target.path={tiny_llama_folder}", f"store.root={tmp_path}", "hardware.stall_timeout_s=4"]
    run = open_run(compose(*overrides))
    engine = start_engine(run.config, run.folder, run.spec)
    processes = [psutil.Process(pid) for pid in [*engine.info["scheduler_pids"], engine.info["child_pid"]]]
    try:
        time.sleep(6)  # with nothing to do, silence is no stall
        engine.capture([[5, 6, 7]])
        processes[0].suspend()
        with pytest.raises(EngineError, match="no answer for hardware.stall_timeout_s=4"):
            engine.capture([[5, 6, 7]])
    finally:
        engine.close()
    assert not any(is_alive(process) for process in processes)


PLANTED = {
    "a renamed hook target": (
        """
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor as owner
    owner._append_hidden_states = owner._append_prefill_hidden_states
    del owner._append_prefill_hidden_states
""",
        "did not hook sglang.srt.managers.*_append_prefill_hidden_states in scheduler",
    ),
    "a model that counts otherwise": (
        """
    from sglang.srt.models.llama import LlamaForCausalLM
    stock = LlamaForCausalLM.set_eagle3_layers_to_capture
    LlamaForCausalLM.set_eagle3_layers_to_capture = lambda self, ids: stock(self, [layer + 1 for layer in ids])
""",
        r"the boundaries \[1, 3, 5\] were asked for, the model of scheduler \d+ captures \[\[2, 4, 6\]\]",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", PLANTED)
def test_an_sglang_that_is_not_the_one_we_know_is_refused(tiny_llama_folder, tmp_path, fault: str) -> None:
    """The fault is a plugin of SGLang's own, found before ours."""
    code, message = PLANTED[fault]
    (tmp_path / "a_fault-0.dist-info").mkdir()
    (tmp_path / "a_fault-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: a-fault\nVersion: 0\n")
    (tmp_path / "a_fault-0.dist-info" / "entry_points.txt").write_text("[sglang.srt.plugins]\na = a_fault:load\n")
    (tmp_path / "a_fault.py").write_text(f"def load():{code}")
    overrides = [f"target.path={tiny_llama_folder}", f"store.root={tmp_path}/store", "capture.boundaries=[1,3,5]"]
    run = open_run(compose(*overrides, f"+hardware.env.PYTHONPATH={tmp_path}"))
    with pytest.raises(EngineError, match=message):
        start_engine(run.config, run.folder, run.spec)


@pytest.mark.full
def test_captures_do_not_push_out_the_prefix_that_prompts_share(tiny_llama_folder, tmp_path) -> None:
    """Each capture leaves nodes in the prefix cache that nobody can reach: they must be the first to go."""
    run = open_run(
        compose(
            f"target.path={tiny_llama_folder}", f"store.root={tmp_path}/store", "hardware.args.max_total_tokens=4096"
        )
    )
    engine = start_engine(run.config, run.folder, run.spec)
    shared = list(range(100, 356))

    def cached() -> float:
        """Generate on prompts that share a prefix; the share of it that the cache had."""
        hits = []
        for number in range(8):
            ids = shared + [5000 + number, *range(7000 + 20 * number, 7020 + 20 * number)]
            sampling = {"max_new_tokens": 4, "temperature": 0.0}
            hits.append(engine._submit({"ids": ids, "sampling": sampling}).result()[1]["cached_tokens"])
        return sum(hits) / len(hits) / len(shared)

    try:
        cached()
        before = cached()
        for number in range(10):  # 10,240 tokens, more than twice what the cache holds
            engine.capture([torch.randint(3, 49000, (512,)).tolist() for _ in range(2)])
            after = cached()
            assert after >= before - 0.05, (number, before, after)
        assert before > 0.9
    finally:
        engine.close()


def test_without_the_plugin_no_engine_is_ready(tiny_llama_folder, tmp_path, left_behind, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    monkeypatch.setattr("eagle3_ray.engines.sglang.PLUGIN", "misspelt")
    run = open_run(compose(f"target.path={tiny_llama_folder}", f"store.root={tmp_path}"))
    with pytest.raises(EngineError, match="the capture plugin did not hook sglang.srt.layers.logits_processor"):
        start_engine(run.config, run.folder, run.spec)
    assert left_behind() == set()


def test_sglang_finds_the_plugin_where_the_package_is_only_a_working_directory(tmp_path) -> None:
    """As under `ray job submit`: what SGLang looks for is package metadata, and no install wrote any."""
    code = tmp_path / "job"
    shutil.copytree(ROOT / "eagle3_ray", code / "eagle3_ray")
    (tmp_path / "scratch").mkdir()
    environment = engine_environment(compose().hardware, tmp_path / "scratch")
    environment["PYTHONPATH"] = os.pathsep.join([str(code), str(tmp_path / "scratch")])
    script = """
from importlib.metadata import entry_points
(found,) = [e for e in entry_points(group="sglang.srt.plugins") if e.dist.name == "eagle3-ray-plugin"]
print(found.name, found.load().__module__, found.load().__code__.co_filename)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    name, module, file = ended.stdout.split()
    assert (name, module) == ("eagle3_ray", "eagle3_ray.engines.sglang_plugin")
    assert Path(file).is_relative_to(code)
    assert "eagle3_ray" in environment.get("SGLANG_PLUGINS", "eagle3_ray").split(",")


def test_another_version_than_the_configured_one_is_refused(tiny_llama_folder, tmp_path) -> None:
    run = open_run(compose(f"target.path={tiny_llama_folder}", f"store.root={tmp_path}", "engine.version=0.5.22"))
    with pytest.raises(EngineError, match="engine.version is 0.5.22, this node has sglang 0.5.23"):
        start_engine(run.config, run.folder, run.spec)


def test_a_tiny_llama_and_the_death_of_its_scheduler(tiny_llama_folder: Path, tmp_path: Path, left_behind) -> None:
    """SGLang says nothing when its scheduler is killed from outside: calls must fail all the same, and soon."""
    overrides = [f"target.path={tiny_llama_folder}", f"store.root={tmp_path}", "capture.boundaries=[1,3,5]"]
    run = open_run(compose(*overrides, "hardware.args.max_total_tokens=512"))
    wanted = reference(run)
    sequences = [list(range(3, 3 + n)) for n in (1, 16, 100)]
    engine = start_engine(run.config, run.folder, run.spec)
    processes = [psutil.Process(pid) for pid in [*engine.info["scheduler_pids"], engine.info["child_pid"]]]
    try:
        assert engine.info["layer_ids"] == [0, 2, 4]
        for ids in sequences:
            (captured,) = engine.capture([ids])
            assert_same_states(captured, wanted.capture([ids])[0], 3)
        for too_large in (engine.capture, lambda prompts: engine.generate(prompts, GREEDY)):
            with pytest.raises(RequestError):  # it is within the context, but the engine has no memory for it
                too_large([list(range(3, 603))])
        assert len(engine.capture([sequences[0]])[0].aux) == 1  # and it lives
        os.kill(processes[0].pid, 9)
        with pytest.raises(EngineError, match="the engine failed: (scheduler|the engine's process)"):
            engine.capture([sequences[-1]])
        with pytest.raises(EngineError):
            engine.generate([sequences[-1]], GREEDY)
    finally:
        engine.close()
    assert not any(is_alive(process) for process in processes)
    assert not engine.capture_dir.exists()
    assert left_behind() == set()


def test_folders_of_dead_engines_are_removed(tmp_path: Path) -> None:
    dead, dead_lock = own_folder(tmp_path)
    alive, alive_lock = own_folder(tmp_path)
    dead_lock.close()  # as the end of a process does
    (tmp_path / "eagle3-ray-engine-notes").mkdir()
    mine, _ = own_folder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, mine, tmp_path / "eagle3-ray-engine-notes"])
    alive_lock.close()
