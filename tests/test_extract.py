"""Extraction unit by unit, on the reference engine and without Ray: what is committed, reused and refused."""

from __future__ import annotations

import dataclasses
import json
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import compose
from safetensors.torch import load_file

from eagle3_ray.engines.base import EngineError, RequestError
from eagle3_ray.engines.transformers import TransformersEngine
from eagle3_ray.extract import (
    ExtractError,
    Extractor,
    capture_units,
    extract,
    extracted,
)
from eagle3_ray.prepare import Corpus, prepare
from eagle3_ray.probe import ProbeError
from eagle3_ray.restarts import FAILED_STARTS, GivenUp, RestartingEngine
from eagle3_ray.run import Run, open_run
from eagle3_ray.store.cache import node_cache
from eagle3_ray.store.commits import Commit
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.precision import dequantise, stored
from eagle3_ray.store.shards import target_rows
from eagle3_ray.store.transcode import destination

TURNS = [["Hello"], ["One", "Two"], ["Tell me more"], ["Why?"], ["A", "B", "C"]]


@pytest.fixture
def line(tiny_llama_folder: Path, tmp_path: Path):
    """Opens a run over five conversations in units of two."""
    prompts = tmp_path / "prompts.jsonl"
    records = [
        {"id": f"p{i}", "messages": [{"role": "user", "content": t} for t in turns]} for i, turns in enumerate(TURNS)
    ]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))

    def opened(*overrides: str) -> tuple[Run, Corpus]:
        common = ["engine=transformers", f"target.path={tiny_llama_folder}", f"store.root={tmp_path}/store"]
        common += [f"prompts.source={prompts}", "prompts.unit_size=2", "sampling.max_new_tokens=6"]
        run = open_run(compose(*common, *overrides))
        return run, prepare(run, run.config.prompts)

    return opened


def work(run: Run, corpus: Corpus, units: list[str] | None = None) -> list[dict]:
    responses, description = run.responses(corpus.fingerprint)
    responses.describe(description)
    features, description = run.features(corpus.fingerprint)
    features.describe(description | {"shard_bytes": run.config.store.shard_bytes})
    extractor = Extractor(run, corpus)
    return [extractor({"unit": [unit]}) for unit in units or corpus.units]


def samples_of(run: Run, corpus: Corpus) -> dict:
    features, commits = extracted(run, corpus)
    found = {}
    for commit in commits:
        reader = features.open(commit, node_cache(run.config.store))
        found |= {sample.id: sample for sample in (reader.features(i) for i in range(len(reader)))}
    return found


def test_every_token_has_its_states(line) -> None:
    run, corpus = line("capture.boundaries=[1,4]", "capture.dtype=float32")
    work(run, corpus)
    found = samples_of(run, corpus)
    assert sorted(found) == [f"p{i}" for i in range(5)]
    engine = TransformersEngine(run.config, run.folder, run.spec)
    for sample in found.values():
        (wanted,) = engine.capture([sample.input_ids.tolist()])
        assert torch.equal(sample.aux, wanted.aux)
        assert torch.equal(sample.last_rows, target_rows(sample.loss_mask))
        assert torch.equal(sample.last_hidden, wanted.last_hidden[sample.last_rows])
    answers = {
        name: int((sample.loss_mask.diff(prepend=torch.tensor([False])) & sample.loss_mask).sum())
        for name, sample in found.items()
    }
    assert answers == {f"p{i}": len(turns) for i, turns in enumerate(TURNS)}


def test_precision_and_compression_are_those_of_the_settings(line, tmp_path: Path) -> None:
    run, corpus = line("capture.dtype=float32")
    small, _ = line("capture.dtype=float8_e4m3", "store.compression=zstd")
    work(run, corpus)
    work(small, corpus)
    features, commits = extracted(small, corpus)
    tensors = load_file(features.fetch(commits[0], node_cache(run.config.store)))
    assert tensors["aux_scale"].shape[1] == 3 and tensors["aux.blocks"][-1] == len(tensors["aux"])
    whole, kept = samples_of(run, corpus), samples_of(small, corpus)
    for name, sample in kept.items():
        states = stored(whole[name].aux, whole[name].last_hidden, "float8_e4m3")
        assert torch.equal(sample.aux, dequantise(states["aux"], states["aux_scale"]))
        assert torch.equal(sample.last_hidden, states["last_hidden"])
    transcoded = destination(run.features(corpus.fingerprint)[0], Filesystem(str(tmp_path / "other")), "float8_e4m3")
    assert transcoded.folder == features.folder


def test_what_is_missing_is_named_and_what_is_committed_is_kept(line) -> None:
    run, corpus = line()
    work(run, corpus, ["000001"])
    with pytest.raises(ExtractError, match="2 of 3 units are not extracted"):
        extracted(run, corpus)
    before = run.responses(corpus.fingerprint)[0].read_commit("000001")
    rows = work(run, corpus)
    assert [row["engine_starts"] for row in rows] == [[1], [0], [0]]
    assert run.responses(corpus.fingerprint)[0].read_commit("000001") == before
    assert sum(len(commit.samples) for commit in extracted(run, corpus)[1]) == 5


def test_a_finished_unit_starts_no_engine(line, monkeypatch) -> None:
    run, corpus = line()
    work(run, corpus)
    monkeypatch.setattr("eagle3_ray.extract.start_engine", None)
    assert [row["engine_starts"] for row in work(run, corpus)] == [[0]] * 3


def test_other_boundaries_reuse_the_responses(line, monkeypatch) -> None:
    run, corpus = line()
    work(run, corpus)
    other, same_corpus = line("capture.boundaries=[1,3]")
    assert same_corpus.fingerprint == corpus.fingerprint
    monkeypatch.setattr(TransformersEngine, "generate", None)  # a generation would fail
    work(other, corpus)
    first, second = samples_of(run, corpus), samples_of(other, corpus)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name].input_ids, second[name].input_ids)
        assert first[name].aux.shape != second[name].aux.shape


def test_capture_units_are_cut_by_bytes(line) -> None:
    run, corpus = line("prompts.unit_size=5")
    work(run, corpus)
    commit = run.responses(corpus.fingerprint)[0].read_commit("000000")
    tokens = [sample["tokens"] for sample in commit.samples]
    run.config.store.shard_bytes = (tokens[0] + tokens[1]) * run.spec.row_bytes
    cuts = capture_units(run, commit)
    assert [number for _, cut in cuts for number in cut] == list(range(5))
    assert cuts[0] == ("000000-0000", [0, 1])
    assert all(sum(tokens[n] for n in cut) <= tokens[0] + tokens[1] or len(cut) == 1 for _, cut in cuts)


def test_a_prompt_without_room_is_a_status_and_not_the_end(line) -> None:
    run, corpus = line("sampling.max_new_tokens=2030")
    work(run, corpus, ["000000"])
    commit = run.responses(corpus.fingerprint)[0].read_commit("000000")
    assert commit.samples == []
    assert {failure["id"] for failure in commit.facts["failed"]} == {"p0", "p1"}
    assert "exceed the context of 2042" in commit.facts["failed"][0]["reason"]


def test_states_that_are_not_finite_are_a_status(line, monkeypatch) -> None:
    run, corpus = line()
    capture = TransformersEngine._capture

    def broken(self, ids):
        captured = capture(self, ids)
        if ids in wanted:  # not in the probe
            captured.aux[-1, -1] = float("nan")
        return captured

    work(run, corpus, ["000000"])
    responses, _ = run.responses(corpus.fingerprint)
    reader = responses.open(responses.read_commit("000000"), node_cache(run.config.store))
    wanted = [reader.response(n).input_ids.tolist() for n in range(2)]
    monkeypatch.setattr(TransformersEngine, "_capture", broken)
    other, _ = line("capture.boundaries=[1,3]")
    (row,) = work(other, corpus, ["000000"])
    assert row["failed"] == [2]
    commit = other.features(corpus.fingerprint)[0].read_commit("000000-0000")
    reasons = [failure["reason"] for failure in commit.facts["failed"]]
    assert reasons == ["boundary 3: the states are not finite"] * 2


def test_rejected_states_are_freed_at_once(line, monkeypatch) -> None:
    """Else they would fill the shared memory that the next capture waits for."""
    run, corpus = line("hardware.max_inflight=1", "prompts.unit_size=5", "prompts.max_bad_share=1")
    capture, alive = TransformersEngine.capture, []

    def tracked(self, sequences):
        assert not any(reference() for reference in alive)
        found = capture(self, sequences)
        alive.extend(weakref.ref(one) for one in found)
        return found

    def reject(*args):
        raise RequestError("unlike the probe's")

    work(run, corpus)
    other, _ = line("capture.boundaries=[1,3]", "hardware.max_inflight=1", "prompts.unit_size=5")
    monkeypatch.setattr("eagle3_ray.extract.probe", lambda *args: {"norms": {}})
    monkeypatch.setattr("eagle3_ray.extract.check_norms", reject)
    monkeypatch.setattr(TransformersEngine, "capture", tracked)
    (row,) = work(other, corpus)
    assert len(alive) == 5 and row["failed"] == [5]


def test_an_engine_that_dies_costs_what_was_in_flight(line, monkeypatch) -> None:
    run, corpus = line("hardware.max_inflight=1")
    generate, prompts = TransformersEngine.generate, []

    def failing(self, sequences, sampling):
        prompts.append(sequences)
        if len(prompts) == 3:
            raise EngineError("gone")
        return generate(self, sequences, sampling)

    monkeypatch.setattr(TransformersEngine, "generate", failing)
    (row,) = work(run, corpus, ["000000"])
    assert row["engine_starts"] == [2]
    assert row["samples"] == [2]
    assert len(prompts) == 4 and prompts[2] == prompts[3]  # asked again; the two turns before it are kept
    (crash,) = (run.files.read_json(key) for key in run.files.list("") if "/attempts/" in key)
    assert crash == {"samples": [1], "error": "gone"}


def test_a_prompt_that_kills_every_engine_is_given_up_alone(line, monkeypatch) -> None:
    run, corpus = line("prompts.unit_size=5")
    poison = next(prompt for prompt in corpus.read("000000") if prompt.id == "p3").segments[0]
    generate = TransformersEngine.generate

    def deadly(self, sequences, sampling):
        if poison in sequences:
            raise EngineError("gone\nits last words")
        return generate(self, sequences, sampling)

    monkeypatch.setattr(TransformersEngine, "generate", deadly)
    (row,) = work(run, corpus)
    assert (row["samples"], row["failed"]) == ([4], [1])
    (failure,) = run.responses(corpus.fingerprint)[0].read_commit("000000").facts["failed"]
    assert failure["id"] == "p3"
    assert failure["reason"].startswith("quarantined: the engine died") and "its last words" in failure["reason"]
    (commit,) = run.features(corpus.fingerprint)[0].commits()
    assert {sample["id"] for sample in commit.samples} == {"p0", "p1", "p2", "p4"}
    with pytest.raises(ExtractError, match="1 of 5 samples failed, more than prompts.max_bad_share=0.05"):
        extracted(run, corpus)


def test_too_many_failures_stop_the_job_before_the_last_unit(line, monkeypatch) -> None:
    run, corpus = line("sampling.max_new_tokens=2030")  # no prompt has room
    worked = []

    def rows(run, corpus, todo):  # what Ray does, one unit after the other
        extractor = Extractor(run, corpus)
        for unit in todo:
            worked.append(unit)
            yield {name: value for name, (value,) in extractor({"unit": [unit]}).items()}

    monkeypatch.setattr("eagle3_ray.extract._rows", rows)
    with pytest.raises(ExtractError, match="2 of 5 samples failed, more than prompts.max_bad_share=0.05"):
        extract(run, corpus)
    assert worked == ["000000"]


def test_engines_that_all_die_stop_the_job(line, monkeypatch) -> None:
    run, corpus = line()

    def dead(*args, **kwargs):
        raise EngineError("gone for good")

    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "generate", dead)
        patch.setattr("eagle3_ray.restarts.BARREN_CRASHES", 2)
        with pytest.raises(GivenUp, match="2 engines in a row died .*: gone for good"):
            work(run, corpus, ["000001"])
    monkeypatch.setattr("eagle3_ray.restarts.PAUSE_S", 0)
    monkeypatch.setattr("eagle3_ray.extract.start_engine", dead)
    extractor = Extractor(run, corpus)
    with pytest.raises(GivenUp, match="failed to start 3 times in a row: gone for good"):
        extractor({"unit": ["000002"]})
    assert extractor.engine.starts == FAILED_STARTS


def test_a_deadly_prompt_is_given_up_even_where_the_probe_would_use_it(line, monkeypatch) -> None:
    run, corpus = line("prompts.unit_size=5")
    poison = corpus.read("000000")[0].segments[0]
    generate, capture = TransformersEngine.generate, TransformersEngine.capture

    def deadly(method):
        def call(self, sequences, *args):
            if any(ids[: len(poison)] == poison for ids in sequences):
                raise EngineError("gone")
            return method(self, sequences, *args)

        return call

    monkeypatch.setattr(TransformersEngine, "generate", deadly(generate))
    monkeypatch.setattr(TransformersEngine, "capture", deadly(capture))
    monkeypatch.setattr("eagle3_ray.restarts.PAUSE_S", 0)
    (row,) = work(run, corpus)
    assert (row["samples"], row["failed"]) == ([4], [1])
    (failure,) = run.responses(corpus.fingerprint)[0].read_commit("000000").facts["failed"]
    assert failure["id"] == "p0" and failure["reason"].startswith("quarantined")


def test_a_suspected_sample_runs_with_no_other() -> None:
    engine = RestartingEngine(start=None)
    running, alone = [], threading.Event()

    def attempt(suspected: bool) -> None:
        with engine._turn(alone=suspected):
            running.append(suspected)
            assert not suspected or running.count(False) == 0
            alone.wait(0.2)
            running.remove(suspected)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(attempt, [False, True, False, True, False, False]))
    assert running == [] and not engine.alone and engine.attempts == 0


def test_units_share_one_engine_and_do_not_wait_for_each_other(line, monkeypatch) -> None:
    """While the first unit's last answer is on its way, the second unit is at work."""
    run, corpus = line("hardware.max_inflight=2", "prompts.unit_size=3")
    generate, together = TransformersEngine.generate, threading.Barrier(2, timeout=60)
    last = max(corpus.read("000000"), key=lambda prompt: -len(prompt.segments)).segments[0]

    def waiting(self, sequences, sampling):
        if sequences == [last] or sequences == [corpus.read("000001")[0].segments[0]]:
            together.wait()  # each of them needs the other to be at work too
        return generate(self, sequences, sampling)

    monkeypatch.setattr(TransformersEngine, "generate", waiting)
    for units, description in (run.responses(corpus.fingerprint), run.features(corpus.fingerprint)):
        units.describe(description)
    extractor = Extractor(run, corpus)
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda unit: extractor({"unit": [unit]}), corpus.units))
    assert sum(row["engine_starts"][0] for row in rows) == 1
    assert len(samples_of(run, corpus)) == 5


def test_an_engine_that_resolves_its_settings_otherwise_is_refused(line, monkeypatch) -> None:
    run, corpus = line()
    start = TransformersEngine.__init__

    def resolving(backend):
        def init(self, *args):
            start(self, *args)
            self.info["resolved"] = {"attention_backend": backend}

        return init

    monkeypatch.setattr(TransformersEngine, "__init__", resolving("fa3"))
    work(run, corpus, ["000000"])
    monkeypatch.setattr(TransformersEngine, "__init__", resolving("trtllm_mha"))
    with pytest.raises(StoreError, match='attention_backend: stored "fa3", now "trtllm_mha"'):
        work(run, corpus, ["000001"])


def test_an_engine_that_captures_other_layers_is_refused(line, monkeypatch) -> None:
    run, corpus = line()
    run.config.engine.name = "sglang"  # which is what the probe is for; the engine is a reference one with a fault

    def shifted(config, folder, spec):
        engine = dataclasses.replace(config.engine, name="transformers", version=None)
        return TransformersEngine(
            dataclasses.replace(config, engine=engine),
            folder,
            dataclasses.replace(spec, boundaries=tuple(boundary + 1 for boundary in spec.boundaries)),
        )

    monkeypatch.setattr("eagle3_ray.extract.start_engine", shifted)
    with pytest.raises(ProbeError, match="boundary 2 was asked for, boundary 3 came back"):
        work(run, corpus, ["000000"])
    assert run.features(corpus.fingerprint)[0].committed() == []


def simulate(run: Run, units: int, samples: int = 3) -> Corpus:
    """The commits of a corpus of so many units, all answered and captured; there are no shards."""
    corpus = Corpus(run.files, f"simulated{units}", [f"{i:06d}" for i in range(units)], {"prompts": units * samples})
    index = {"domain": "d", "tokens": 10, "generated": 5, "finish_reasons": ["stop"]}
    kinds = ((run.responses(corpus.fingerprint), {}), (run.features(corpus.fingerprint), {"targets": 4}))
    for (found, _), targets in kinds:
        for unit in corpus.units:
            name = f"{unit}-0000" if targets else unit
            facts = {"failed": [], "engine": {"engine": "simulated"}}
            of = [{"id": f"{unit}-{i}", **index, **targets} for i in range(samples)]
            found.create(Commit(name, f"{found.folder}/shards/{name}.{0:012x}.safetensors", 1, "0" * 64, of, facts))
    return corpus


def test_a_finished_extraction_is_planned_in_linear_time(line, monkeypatch) -> None:
    """Requests to the store, counted: listing and planning of a resumed run, and one unit's work."""
    run, _ = line()
    requests: Counter[str] = Counter()
    for name in ("read", "list", "size"):
        original = getattr(Filesystem, name)

        def counted(self, *args, name=name, original=original):
            requests[name] += 1
            return original(self, *args)

        monkeypatch.setattr(Filesystem, name, counted)
    seen = {}
    for units in (20, 40):
        corpus = simulate(run, units)
        requests.clear()
        assert extract(run, corpus)["samples"] == 3 * units  # would start Ray if anything were missing
        planned = requests.copy()
        requests.clear()
        Extractor(run, corpus)({"unit": ["000007"]})
        seen[units] = (planned, requests.copy())
    (small, one), (large, another) = seen[20], seen[40]
    assert one == another
    assert small["list"] == large["list"] <= 4
    assert large["read"] - small["read"] <= 4 * 20
    assert large["size"] == small["size"]
