"""Extraction unit by unit, on the reference engine and without Ray: what is committed, reused and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import compose

from eagle3_ray.engines.base import EngineError
from eagle3_ray.engines.transformers import TransformersEngine
from eagle3_ray.extract import ATTEMPTS, ExtractError, Extractor, capture_units, extracted
from eagle3_ray.prepare import Corpus, prepare
from eagle3_ray.run import Run, open_run
from eagle3_ray.store.shards import ShardReader, target_rows

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
    features.describe(description)
    extractor = Extractor(run, corpus)
    return [extractor({"unit": [unit]}) for unit in units or corpus.units]


def samples(run: Run, corpus: Corpus) -> dict:
    features, commits = extracted(run, corpus)
    fingerprint = Path(features.folder).name
    found = {}
    for commit in commits:
        reader = ShardReader(features.fetch(commit, "/nonexistent"), fingerprint)
        found |= {sample.id: sample for sample in (reader.features(i) for i in range(len(reader)))}
    return found


def test_every_token_has_its_states(line) -> None:
    run, corpus = line("capture.boundaries=[1,4]", "capture.dtype=float32")
    work(run, corpus)
    found = samples(run, corpus)
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
    first, second = samples(run, corpus), samples(other, corpus)
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
        captured.aux[-1, 0] = float("nan")
        return captured

    work(run, corpus, ["000000"])
    monkeypatch.setattr(TransformersEngine, "_capture", broken)
    other, _ = line("capture.boundaries=[1,3]")
    work(other, corpus, ["000000"])
    commit = other.features(corpus.fingerprint)[0].read_commit("000000-0000")
    assert [failure["reason"] for failure in commit.facts["failed"]] == ["the states are not finite"] * 2


def test_an_engine_that_fails_is_started_again_a_set_number_of_times(line, monkeypatch) -> None:
    run, corpus = line()
    generate, calls = TransformersEngine.generate, []

    def failing(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 1:
            raise EngineError("gone")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(TransformersEngine, "generate", failing)
    run.config.hardware.max_inflight = 1
    (row,) = work(run, corpus, ["000000"])
    assert row["engine_starts"] == [2]

    def dead(self, *args, **kwargs):
        raise EngineError("gone for good")

    monkeypatch.setattr(TransformersEngine, "generate", dead)
    extractor = Extractor(run, corpus)
    with pytest.raises(EngineError, match="gone for good"):
        extractor({"unit": ["000001"]})
    assert extractor.starts == ATTEMPTS
