"""The Ray Data stage: an actor pool, one engine an actor, that answers the prompts and then captures the states.

A row of the data set names one response unit. Its actor generates and commits the responses, cuts them by bytes into
capture units, and captures and commits those. An actor has two units at work, so that the engine's batch stays full
while one of them ends. What is committed is never done again, so a unit may come back at any time: after a crash it
costs what was in flight. Tensors stay in the actor, which writes its shards itself; the rows that come back through Ray
say only what was done.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
import torch

from eagle3_ray.config import ConfigError
from eagle3_ray.engines import start_engine
from eagle3_ray.engines.base import RequestError, TargetEngine, answer
from eagle3_ray.engines.sglang import context_length
from eagle3_ray.engines.sglang_nodes import actor_options
from eagle3_ray.leftovers import own_folder, remove
from eagle3_ray.prepare import Corpus
from eagle3_ray.probe import check_norms, probe, probe_sequences
from eagle3_ray.progress import Progress
from eagle3_ray.restarts import FAILED_STARTS, RestartingEngine
from eagle3_ray.run import Run
from eagle3_ray.secrets import Sealed
from eagle3_ray.store.cache import node_cache, scratch
from eagle3_ray.store.commits import Commit, Units
from eagle3_ray.store.precision import stored
from eagle3_ray.store.shards import (
    Features,
    Response,
    target_rows,
    write_features,
    write_responses,
)
from eagle3_ray.store.uploads import Uploads

UNITS = 2  # that one actor works at once


class ExtractError(RuntimeError):
    """The stage cannot go on, or is not done."""


def extract(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Generate and capture all of `corpus` that is not committed yet; returns the stage's summary.

    Ray must be running. Raises ExtractError when more than prompts.max_bad_share of the samples failed. ConfigError
    with features.folder, whose features another extraction took.
    """
    if run.config.features.folder:
        raise ConfigError(f"features.folder: {run.config.features.folder!r} is extracted; extract makes features anew")
    start = time.monotonic()
    responses, description = run.responses(corpus.fingerprint)
    responses.describe(description)
    features, description = run.features(corpus.fingerprint)
    features.describe(description | {"shard_bytes": run.config.store.shard_bytes})
    todo = _missing_units(run, corpus, responses, features)
    worked: list[dict[str, Any]] = []
    if todo:
        progress = Progress("extract", len(corpus.units), "units", done=len(corpus.units) - len(todo))
        for row in _rows(run, corpus, todo):
            worked.append(row)
            progress.add(1, f"{row['samples']} samples, {row['tokens']} tokens")
            if sum(row["failed"] for row in worked) > run.config.prompts.max_bad_share * corpus.summary["prompts"]:
                break  # checked below
    summary = None if worked else run.read_json(f"{features.folder}/summary.json")
    if summary is None:
        summary = _summary(run, corpus, responses, features) | {
            "seconds": round(time.monotonic() - start, 1),
            "engine_starts": sum(row["engine_starts"] for row in worked),
        }
        run.write_json(f"{features.folder}/summary.json", summary)
    _check_failures(run, corpus, summary)
    return summary


def extracted(run: Run, corpus: Corpus) -> tuple[Units, list[Commit]]:
    """The features of a corpus that is wholly extracted; ExtractError where it is not."""
    responses, _ = run.responses(corpus.fingerprint)
    features, _ = run.features(corpus.fingerprint)
    missing = _missing_units(run, corpus, responses, features)
    if missing:
        raise ExtractError(f"{len(missing)} of {len(corpus.units)} units are not extracted; run ray_jobs.extract first")
    _check_failures(run, corpus, _summary(run, corpus, responses, features))
    return features, features.commits()


def _check_failures(run: Run, corpus: Corpus, summary: dict[str, Any]) -> None:
    if summary["failed"] > run.config.prompts.max_bad_share * corpus.summary["prompts"]:
        raise ExtractError(
            f"{summary['failed']} of {corpus.summary['prompts']} samples failed, more than "
            f"prompts.max_bad_share={run.config.prompts.max_bad_share}: {summary['reasons']}"
        )


def _missing_units(run: Run, corpus: Corpus, responses: Units, features: Units) -> list[str]:
    answered, captured = {commit.unit: commit for commit in responses.commits()}, set(features.committed())

    def done(unit: str) -> bool:
        return unit in answered and all(name in captured for name, _ in capture_units(run, answered[unit]))

    return [unit for unit in corpus.units if not done(unit)]


def capture_units(run: Run, commit: Commit) -> list[tuple[str, list[int]]]:
    """Cut one response unit by bytes: (name, sample numbers) of each capture unit. A function of the commit alone."""
    cuts: list[list[int]] = [[]]
    size = 0
    for number, sample in enumerate(commit.samples):
        sample_bytes = sample["tokens"] * run.spec.row_bytes
        if cuts[-1] and size + sample_bytes > run.config.store.shard_bytes:
            cuts.append([])
            size = 0
        cuts[-1].append(number)
        size += sample_bytes
    return [(f"{commit.unit}-{i:04d}", cut) for i, cut in enumerate(cuts) if cut]


def _rows(run: Run, corpus: Corpus, todo: list[str]) -> Iterator[dict[str, Any]]:
    """The data set: one row a unit, in blocks of one, through the actor pool."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # one line of our own instead
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    # `max_restarts` can be given in no other way until Ray 2.64
    warnings.filterwarnings("ignore", message=".*ray_remote_args.*")
    hardware = run.config.hardware
    actors = min(hardware.num_actors, len(todo))
    units = min(UNITS, len(todo) // actors)  # with more, the first actor that is up takes what the others wait for
    dataset = ray.data.from_items([{"unit": unit} for unit in todo], override_num_blocks=len(todo)).map_batches(
        Extractor,
        fn_constructor_kwargs={"run": Sealed(run), "corpus": corpus},
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(
            min_size=min(hardware.min_actors or actors, actors),
            max_size=actors,
            max_tasks_in_flight_per_actor=units,
            max_concurrent_calls_per_actor=units,
            enable_true_multi_threading=True,
        ),
        num_cpus=hardware.cpus_per_actor,
        num_gpus=hardware.gpus_per_actor or None,
        **actor_options(hardware),
        max_restarts=3,
        max_task_retries=3,  # Ray's own default would retry a poison unit for ever
    )
    yield from dataset.iter_rows()


class Extractor:
    """One actor of the pool, called with a unit from several threads at once. They share one engine, which starts with
    the first request and again after it died."""

    def __init__(self, run: Run | Sealed[Run], corpus: Corpus) -> None:
        run = run.inside if isinstance(run, Sealed) else run
        self.engine = RestartingEngine(self._start)
        self.staging, _ = own_folder(scratch(run.config.store))
        self.uploads = Uploads(run.config.store, self.staging)
        self.run, self.corpus = run, corpus
        self.responses, _ = run.responses(corpus.fingerprint)
        self.features, _ = run.features(corpus.fingerprint)
        self.context_length = context_length(run.config, run.folder)
        self.told_starts, self.telling = 0, threading.Lock()
        self.info: dict[str, Any] = {}  # of the last engine, its probe included
        # Two queues: a capture must not wait behind all the generation of the next unit
        inflight = run.config.hardware.max_inflight
        self.generating, self.capturing = ThreadPoolExecutor(inflight), ThreadPoolExecutor(inflight)

    def __del__(self) -> None:
        """Ray Data drops the instance when the pool ends."""
        self.engine.close()
        self.generating.shutdown(wait=False)
        self.capturing.shutdown(wait=False)
        self.uploads.close()
        remove(self.staging)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        (unit,) = [str(unit) for unit in batch["unit"]]
        if not self.responses.has(unit):
            self._generate(unit)
        commit = self.responses.read_commit(unit)
        failed = len(commit.facts["failed"])
        uploads = []
        for name, numbers in capture_units(self.run, commit):
            if not self.features.has(name):
                bad, upload = self._capture(name, commit, numbers)
                failed += bad
                uploads.append(upload)
        for upload in uploads:
            upload.result()
        with self.telling:
            starts, self.told_starts = self.engine.starts - self.told_starts, self.engine.starts
        row = {
            "unit": unit,
            "samples": len(commit.samples),
            "failed": failed,
            "tokens": sum(sample["tokens"] for sample in commit.samples),
            "engine_starts": starts,
        }
        return {name: [value] for name, value in row.items()}

    def _generate(self, unit: str) -> None:
        """Answer the unit's prompts and commit the responses."""
        sampling, prompts = self.run.config.sampling, self.corpus.read(unit)

        def respond(engine: TargetEngine, number: int) -> Response:
            prompt = prompts[number]
            answered = answer(engine, prompt.segments, sampling, self.context_length)
            return Response(
                id=prompt.id,
                input_ids=torch.tensor(answered.token_ids, dtype=torch.int32),
                loss_mask=torch.tensor(answered.loss_mask),
                finish_reasons=answered.finish_reasons,
                domain=prompt.domain,
                seed=sampling.seed,
            )

        prompts.sort(key=lambda prompt: -len(prompt.segments))  # turns come one by one: the longest start first
        progress = Progress(f"unit {unit}", len(prompts), "conversations answered")
        results = self.engine.work(self.responses, unit, list(range(len(prompts))), respond, self.generating, progress)
        good = [result for result in results if isinstance(result, Response)]
        samples = [
            {
                "id": response.id,
                "domain": response.domain,
                "tokens": len(response.input_ids),
                "generated": int(response.loss_mask.sum()),
                "finish_reasons": response.finish_reasons,
            }
            for response in good
        ]
        size = sum(response.input_ids.nbytes + response.loss_mask.nbytes for response in good)
        self.uploads.commit(
            self.responses,
            unit,
            lambda shard: write_responses(shard, good, self.responses.fingerprint),
            size,
            samples,
            failed=_failed(prompts, results),
        ).result()

    def _capture(self, name: str, commit: Commit, numbers: list[int]) -> tuple[int, Future[bool]]:
        """Capture the states of some of a response unit's samples; returns how many failed, and the commit to come."""
        reader = self.responses.open(commit, node_cache(self.run.config.store))

        def states(engine: TargetEngine, number: int) -> Features:
            response = reader.response(number)
            (captured,) = engine.capture([response.input_ids.tolist()])
            check_norms(self.run, captured, self.info["probe"]["norms"])
            rows = target_rows(response.loss_mask)  # [R]
            return Features(
                id=response.id,
                input_ids=response.input_ids,
                loss_mask=response.loss_mask,
                last_rows=rows,
                **stored(captured.aux, captured.last_hidden[rows], self.run.spec.dtype),
            )

        progress = Progress(f"unit {name}", len(numbers), "conversations captured")
        results = self.engine.work(self.features, name, numbers, states, self.capturing, progress)
        good = [(n, result) for n, result in zip(numbers, results, strict=True) if isinstance(result, Features)]
        samples = [commit.samples[n] | {"targets": len(result.last_rows)} for n, result in good]
        fingerprint, compression = self.features.fingerprint, self.run.config.store.compression
        failed = _failed([reader.response(n) for n in numbers], results)
        upload = self.uploads.commit(
            self.features,
            name,
            lambda shard: write_features(shard, [result for _, result in good], fingerprint, compression),
            sum(result.aux.nbytes + result.last_hidden.nbytes for _, result in good),
            samples,
            failed=failed,
            engine=self.info,
        )
        return len(failed), upload

    def _start(self, failed: int) -> TargetEngine:
        """Nothing is captured before the engine is known to be the one that the stored features are from.

        After a failure other prompts are captured: one of the first may be what kills it.
        """
        engine = start_engine(self.run.config, self.run.folder, self.run.spec)
        try:
            prompts = self.corpus.read(self.corpus.units[0])
            prompts = prompts[failed * len(prompts) // FAILED_STARTS :]
            found = probe(self.run, engine, probe_sequences([prompt.segments[0] for prompt in prompts]))
            self.features.record("engine", engine.info.get("resolved", {}))
            self.info = engine.info | {"probe": found}
        except BaseException:
            engine.close()
            raise
        return engine


def _failed(items: Any, results: Any) -> list[dict[str, str]]:
    return [
        {"id": item.id, "reason": str(result)}
        for item, result in zip(items, results, strict=True)
        if isinstance(result, RequestError)
    ]


def _summary(run: Run, corpus: Corpus, responses: Units, features: Units) -> dict[str, Any]:
    """What the commits say."""
    captured, answered = features.commits(), responses.commits()
    samples = [sample for commit in captured for sample in commit.samples]
    failed = [failure for commit in (*answered, *captured) for failure in commit.facts["failed"]]
    return {
        "responses": responses.fingerprint,
        "features": features.fingerprint,
        "boundaries": list(run.spec.boundaries),
        "samples": len(samples),
        "failed": len(failed),
        "reasons": dict(Counter(failure["reason"] for failure in failed).most_common(5)),
        "tokens_captured": sum(sample["tokens"] for sample in samples),
        "tokens_generated": sum(sample["generated"] for sample in samples),
        "targets": sum(sample["targets"] for sample in samples),
        "finish_reasons": dict(Counter(reason for sample in samples for reason in sample["finish_reasons"])),
        "domains": dict(sorted(Counter(sample["domain"] for sample in samples).items())),
        "bytes_stored": sum(commit.size for commit in (*answered, *captured)),
        "engines": list({json.dumps(commit.facts["engine"]): commit.facts["engine"] for commit in captured}.values()),
    }
