"""The drafter's acceptance, measured in real SGLang serving on held-out prompts.

The same prompts are answered by the target alone: under greedy decoding in fp32 every answer must be the same, token by
token. Beside what was served stands what a walk says without serving (`train/simulate.py`): over training's held-out
samples, and, with evaluate.simulate, over the very answers of the target alone. `figures.py` sets them side by side.

An engine answers all suites, one after the other. Other draftings (evaluate.sweep) and other drafters
(evaluate.drafters) get engines of their own; the target alone answers once for all of them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import torch

from eagle3_ray.capture import deciding_args, engine_version
from eagle3_ray.config import (
    ConfigError,
    Drafting,
    PromptsConfig,
    SamplingConfig,
    SuiteConfig,
    draftings,
    suites,
)
from eagle3_ray.drafter.checkpoint import check_folder
from eagle3_ray.drafter.target import load_pieces
from eagle3_ray.drafter.trained import read_another, read_trained
from eagle3_ray.engines.base import Answered, RequestError, TargetEngine, answer, each
from eagle3_ray.engines.sglang import SGLangEngine, context_length
from eagle3_ray.engines.sglang_nodes import actor_options
from eagle3_ray.figures import own_path, summarised
from eagle3_ray.prepare import Corpus, Prompt, prepare
from eagle3_ray.progress import Progress
from eagle3_ray.run import Run, exported
from eagle3_ray.serving import serving
from eagle3_ray.store.shards import Features, target_rows
from eagle3_ray.strict_json import fingerprint
from eagle3_ray.train.simulate import simulate, totals

SETTINGS = ["temperature", "num_steps", "topk", "num_draft_tokens", "sweep", "batch_size", "baseline", "simulate"]


def heldout(run: Run) -> dict[str, Corpus]:
    """The held-out prompts by suite, each prepared as the corpus is."""
    config = run.config
    kwargs = {**run.target["chat_template_kwargs"], **config.evaluate.chat_template_kwargs}
    run = dataclasses.replace(run, target=run.target | {"chat_template_kwargs": kwargs})
    return {name: _prepared(run, name, suite) for name, suite in suites(config.evaluate).items()}


def _prepared(run: Run, name: str, suite: SuiteConfig) -> Corpus:
    prompts = run.config.prompts
    source = PromptsConfig(
        source=suite.source,
        split=suite.split,
        subset=suite.subset,
        limit=suite.limit,
        max_prompt_tokens=prompts.max_prompt_tokens,
        unit_size=prompts.unit_size,
        max_bad_share=prompts.max_bad_share,
    )
    setting = f"evaluate.suites.{name}" if run.config.evaluate.suites else "evaluate"
    try:
        return prepare(run, source)
    except ConfigError as error:
        raise ConfigError(str(error).replace("prompts.source", f"{setting}.source", 1)) from None


def evaluate(
    run: Run, corpora: dict[str, Corpus], drafter: str, watch: Callable[[SGLangEngine, Path], Any] | None = None
) -> dict[str, Any]:
    """Serve the exported drafter at `<drafter>/export/` on the suites; the summary is kept beside the drafter.

    `watch` is called with the first engine that drafts and the folder it serves, before the first answer. Ray must be
    running: each engine takes the place of one of hardware's actors. ConfigError unless engine.name is sglang, since
    nothing else serves the drafter.
    """
    config = run.config
    if config.engine.name != "sglang":
        raise ConfigError(f"engine.name: evaluation is served by sglang, not by {config.engine.name}")
    description = described(run, corpora, drafter)
    key = f"{drafter}/evaluations/{fingerprint(description)}/summary.json"
    summary = run.read_json(key)
    if summary is not None and not summary["failed"]:  # an engine may fail for reasons that pass
        return summary
    start = time.monotonic()
    hardware = config.hardware
    takes = {"num_cpus": hardware.cpus_per_actor, "num_gpus": hardware.gpus_per_actor, **actor_options(hardware)}
    served = ray.remote(**takes, max_retries=1)(serve)
    chosen, rivals = draftings(config.evaluate), _rivals(run, drafter)
    # All at the same time, where there is room for engines
    asked = [served.remote(run, corpora, drafter, one, watch if one == chosen[0] else None) for one in chosen]
    others = {path: served.remote(rival, corpora, drafter, chosen[0]) for path, rival in rivals.items()}
    alone = served.remote(run, corpora, drafter, None) if config.evaluate.baseline else None
    results, plain = ray.get(asked), alone and ray.get(alone)
    rivalling = {path: _answers_or_failure(other) for path, other in others.items()}
    for found in [*results, *([plain] if plain else []), *rivalling.values()]:
        if "failed" not in found:
            _check_refused(run, found)
    summary = {
        **{name: value for name, value in description.items() if name not in ("exported", "rivals")},
        "suites": {
            name: {**dataclasses.asdict(suite), "prompts": corpora[name].fingerprint}
            for name, suite in suites(config.evaluate).items()
        },
        "source": config.evaluate.source,
        "chat_template_kwargs": {**run.target["chat_template_kwargs"], **config.evaluate.chat_template_kwargs},
        **summarised(run, drafter, dict(zip(chosen, results, strict=True)), plain, rivalling),
        "seconds": round(time.monotonic() - start, 1),
    }
    run.write_json(key, summary)
    return summary


def described(run: Run, corpora: dict[str, Corpus], drafter: str) -> dict[str, Any]:
    """All that decides an evaluation's figures."""
    config = run.config
    return {
        "suites": {
            name: {"prompts": corpora[name].fingerprint, "max_new_tokens": suite.max_new_tokens}
            for name, suite in suites(config.evaluate).items()
        },
        "target": run.target,
        "engine_version": engine_version(config),
        "dtype": config.evaluate.dtype or config.engine.dtype,
        "exported": exported(run, drafter),
        "rivals": [exported(rival, "") for rival in _rivals(run, drafter).values()],
        **deciding_args(config, "serve"),
        **{name: getattr(config.evaluate, name) for name in SETTINGS},
    }


def _answers_or_failure(asked: ray.ObjectRef) -> dict[str, Any]:
    """Of another's drafter, which SGLang may not serve at all: the answers of all others are kept."""
    try:
        return ray.get(asked)
    except ray.exceptions.RayError as error:
        return {"failed": f"the serving engine failed: {str(error).strip().splitlines()[-1]}"}


def _rivals(run: Run, drafter: str) -> dict[str, Run]:
    """The run as it would be with each of evaluate.drafters in place of its own, once."""
    config = run.config
    paths = dict.fromkeys(path.rstrip("/") for path in config.evaluate.drafters)
    paths.pop(own_path(run, drafter), None)
    return {
        path: dataclasses.replace(
            run, config=dataclasses.replace(config, drafter=dataclasses.replace(config.drafter, path=path))
        )
        for path in paths
    }


class EvaluateError(RuntimeError):
    """Too few answers to measure anything."""


def _check_refused(run: Run, served: dict[str, Any]) -> None:
    """EvaluateError where an engine refused too many conversations of a suite: none may vanish in silence."""
    for suite in suites(run.config.evaluate):
        refused = [row for row in served["refused"] if row["suite"] == suite]
        answered = sum(row["suite"] == suite for row in served["answers"])
        if not answered or len(refused) > run.config.prompts.max_bad_share * (answered + len(refused)):
            raise EvaluateError(
                f"{len(refused)} of {answered + len(refused)} conversations of {suite} were refused, more than "
                f"prompts.max_bad_share={run.config.prompts.max_bad_share}: {refused[:3]}"
            )


# ---------------------------------------------------------------- an engine's part


def serve(
    run: Run,
    corpora: dict[str, Corpus],
    drafter: str,
    drafting: Drafting | None,
    watch: Callable[[SGLangEngine, Path], Any] | None = None,
) -> dict[str, Any]:
    """One engine's answers to all suites, with the drafter or (None) without. Runs as a Ray task."""
    config = run.config
    settings = config.evaluate
    walking = drafting is None and settings.simulate
    sampling = {
        name: SamplingConfig(max_new_tokens=suite.max_new_tokens or 0, temperature=settings.temperature)
        for name, suite in suites(settings).items()
    }
    most = max(one.num_draft_tokens for one in draftings(settings))
    room = context_length(config, run.folder) - most  # of all engines, to answer the same
    spec, watched = run.spec if walking else None, watch is not None
    with serving(run, drafter, drafting, spec, watched) as (engine, folder):
        if watch:
            watch(engine, folder)
        asked = _asked(corpora)

        def respond(question: tuple[str, Prompt]) -> dict[str, Any]:
            suite, prompt = question
            return {"suite": suite, **_row(prompt, answer(engine, prompt.segments, sampling[suite], room))}

        of = f" of {config.drafter.path}" if config.drafter.path and settings.drafters else ""
        name = f"evaluate {list(drafting)}{of}" if drafting else "evaluate without the drafter"
        progress = Progress(name, len(asked), "conversations")
        start = time.monotonic()
        results = each(respond, asked, settings.batch_size, progress.add)
        seconds = time.monotonic() - start
        rows = [row for row in results if not isinstance(row, RequestError)]
        torch.set_num_threads(config.hardware.cpus_per_actor)  # for the walk; Ray's OMP_NUM_THREADS may say less
        return {
            "engine": engine.info,
            "answers": rows,
            "seconds": seconds,
            "faults": check_folder(folder, run.model) if drafting else [],
            "walked": walk_answers(run, engine, drafter, rows, draftings(settings)[0]) if walking else None,
            "refused": [
                {"suite": suite, "id": prompt.id, "reason": str(row)}
                for (suite, prompt), row in zip(asked, results, strict=True)
                if isinstance(row, RequestError)
            ],
        }


def _asked(corpora: dict[str, Corpus]) -> list[tuple[str, Prompt]]:
    """Every prompt and its suite. Several suites may have the same ids: theirs begin with the suite."""
    return [
        (name, dataclasses.replace(prompt, id=f"{name}/{prompt.id}") if len(corpora) > 1 else prompt)
        for name, corpus in corpora.items()
        for unit in corpus.units
        for prompt in corpus.read(unit)
    ]


def _row(prompt: Prompt, answered: Answered) -> dict[str, Any]:
    """What one conversation's answers took."""
    histogram: list[int] = []
    for response in answered.responses:
        counts = response.speculation.get("spec_correct_drafts_histogram") or []
        histogram = [
            (histogram[i] if i < len(histogram) else 0) + (counts[i] if i < len(counts) else 0)
            for i in range(max(len(histogram), len(counts)))
        ]
    return {
        "id": prompt.id,
        "domain": prompt.domain,
        "turns": len(prompt.segments),  # asked; `answers` has fewer where the context had no room for a further one
        "token_ids": answered.token_ids,
        "loss_mask": answered.loss_mask,
        "answers": [response.token_ids for response in answered.responses],
        "completion_tokens": sum(len(response.token_ids) for response in answered.responses),
        "verify_steps": sum(response.speculation.get("spec_verify_ct", 0) for response in answered.responses),
        "histogram": histogram,  # [i]: verify steps that accepted exactly i drafts
    }


def walk_answers(
    run: Run, engine: TargetEngine, drafter: str, rows: list[dict[str, Any]], drafting: Drafting
) -> dict[str, Any]:
    """The drafter walked over the rows' conversations, in fp32 on the CPU: the engine has the GPU.

    It is the one that training left, not the exported copy: whatever happened to that shows in the difference.
    """
    progress = Progress("evaluate: walk", len(rows), "conversations")

    def samples() -> Iterator[Features]:
        for row in rows:
            yield _captured(engine, row)
            progress.add(1)

    target = dataclasses.replace(run.config.target, weights=None)  # the files that the engine runs
    pieces = load_pieces(target, torch.float32)
    if run.config.drafter.path:
        made = read_another(run.config, run.model, len(run.spec.boundaries))
    else:
        made = read_trained(run.files, drafter)
    return totals(simulate(made.drafter(pieces), samples(), pieces.head, drafting))


def _captured(engine: TargetEngine, row: dict[str, Any]) -> Features:
    """Copied out of the engine's shared memory, whose room the next one may need."""
    (states,) = engine.capture([row["token_ids"]])
    mask = torch.tensor(row["loss_mask"])  # [T]
    kept = target_rows(mask)  # [R]
    return Features(
        id=row["id"],
        input_ids=torch.tensor(row["token_ids"], dtype=torch.int32),
        loss_mask=mask,
        aux=states.aux.clone(),
        last_hidden=states.last_hidden[kept],
        last_rows=kept,
    )
