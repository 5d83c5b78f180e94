"""The drafter's accept length, measured in real SGLang serving on held-out prompts.

Accept length is SGLang's: completion tokens / verify steps, the bonus token counted. Beside it the same prompts are
answered by the target alone: under greedy decoding in fp32 every answer must be the same, token by token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from eagle3_ray.capture import deciding_args, engine_version, fingerprint
from eagle3_ray.config import ConfigError, PromptsConfig, SamplingConfig
from eagle3_ray.engines.base import Answered, RequestError, answer, each
from eagle3_ray.engines.sglang import SGLangEngine, context_length
from eagle3_ray.engines.sglang_nodes import actor_options
from eagle3_ray.prepare import Corpus, Prompt, prepare
from eagle3_ray.progress import Progress
from eagle3_ray.run import Run

SETTINGS = ("max_new_tokens", "num_steps", "topk", "num_draft_tokens", "batch_size", "baseline")


def heldout(run: Run) -> Corpus:
    """The held-out prompts, prepared as the corpus is."""
    config = run.config
    source = PromptsConfig(
        source=config.evaluate.source,
        limit=config.evaluate.limit,
        max_prompt_tokens=config.prompts.max_prompt_tokens,
        unit_size=config.prompts.unit_size,
        max_bad_share=config.prompts.max_bad_share,
    )
    try:
        return prepare(run, source)
    except ConfigError as error:
        raise ConfigError(str(error).replace("prompts.source", "evaluate.source", 1)) from None


def evaluate(
    run: Run, corpus: Corpus, drafter: str, watch: Callable[[SGLangEngine, Path], Any] | None = None
) -> dict[str, Any]:
    """Serve the exported drafter at `<drafter>/export/` on `corpus`; the summary is kept beside the drafter.

    `watch` is called with the serving engine and the folder it serves, before the first answer. Ray must
    be running: each engine takes the place of one of hardware's actors. ConfigError unless engine.name is sglang, since
    nothing else serves the drafter.
    """
    config = run.config
    if config.engine.name != "sglang":
        raise ConfigError(f"engine.name: evaluation is served by sglang, not by {config.engine.name}")
    dtype = config.evaluate.dtype or config.engine.dtype
    exported = run.read_json(f"{drafter}/export.json")
    if exported is None:
        raise ConfigError(f"no exported drafter at {run.files.url(drafter)}; run ray_jobs.export first")
    description = {
        "prompts": corpus.fingerprint,
        "engine_version": engine_version(config),
        "dtype": dtype,
        "exported": exported,
        **deciding_args(config, "serve"),
        **{name: getattr(config.evaluate, name) for name in SETTINGS},
    }
    key = f"{drafter}/evaluations/{fingerprint(description)}/summary.json"
    summary = run.read_json(key)
    if summary is not None:
        return summary
    start = time.monotonic()
    hardware = config.hardware
    takes = {"num_cpus": hardware.cpus_per_actor, "num_gpus": hardware.gpus_per_actor, **actor_options(hardware)}
    served = ray.remote(**takes, max_retries=1)(serve)
    answers = [served.remote(run, corpus, drafter, watch)]
    if config.evaluate.baseline:
        answers.append(served.remote(run, corpus, None))  # at the same time, where there is room for two engines
    speculating, plain = (*ray.get(answers), None)[:2]
    for served_engine in (speculating, plain or speculating):
        _check_refused(run, served_engine["refused"], len(served_engine["answers"]))
    steps = config.evaluate.num_steps
    summary = {
        **{name: value for name, value in description.items() if name != "exported"},
        **measure(speculating["answers"], steps),
        "greedy_identical": None if plain is None else not different(speculating["answers"], plain["answers"]),
        "different_answers": different(speculating["answers"], plain["answers"]) if plain else [],
        "refused": speculating["refused"],
        "by_domain": {
            domain: measure([row for row in speculating["answers"] if row["domain"] == domain], steps)
            for domain in sorted({row["domain"] for row in speculating["answers"]})
        },
        "engine": speculating["engine"],
        "seconds": round(time.monotonic() - start, 1),
        "answers": [
            {name: row[name] for name in ("id", "domain", "completion_tokens", "verify_steps")}
            for row in speculating["answers"]
        ],
    }
    run.write_json(key, summary)
    return summary


class EvaluateError(RuntimeError):
    """Too few answers to measure anything."""


def _check_refused(run: Run, refused: list[dict[str, str]], answered: int) -> None:
    if not answered or len(refused) > run.config.prompts.max_bad_share * (answered + len(refused)):
        raise EvaluateError(
            f"{len(refused)} of {answered + len(refused)} held-out conversations were refused, more than "
            f"prompts.max_bad_share={run.config.prompts.max_bad_share}: {refused[:3]}"
        )


@contextlib.contextmanager
def serving(run: Run, drafter: str | None, watched: bool) -> Iterator[tuple[SGLangEngine, Path]]:
    """An engine as it will serve, with the drafter or (None) without, and the local folder that it serves."""
    config = run.config
    settings = config.evaluate
    config = dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, dtype=settings.dtype or config.engine.dtype)
    )
    args: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="eagle3-ray-") as scratch:
        folder = Path(scratch)
        if drafter is not None:
            folder = local_folder(run, f"{drafter}/export", folder)
            args |= {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": str(folder),
                "speculative_num_steps": settings.num_steps,
                "speculative_eagle_topk": settings.topk,
                "speculative_num_draft_tokens": settings.num_draft_tokens,
            }
        engine = SGLangEngine(config, run.folder, None, args, watched)
        try:
            yield engine, folder
        finally:
            engine.close()


def serve(
    run: Run, corpus: Corpus, drafter: str | None, watch: Callable[[SGLangEngine, Path], Any] | None = None
) -> dict[str, Any]:
    """One engine's greedy answers to the whole corpus, with the drafter or (None) without. Runs as a Ray task."""
    config = run.config
    settings = config.evaluate
    sampling = SamplingConfig(max_new_tokens=settings.max_new_tokens)
    room = context_length(config, run.folder) - settings.num_draft_tokens  # of both engines, to answer the same
    with serving(run, drafter, watched=watch is not None) as (engine, folder):
        if watch:
            watch(engine, folder)
        prompts = [prompt for unit in corpus.units for prompt in corpus.read(unit)]

        def respond(prompt: Prompt) -> dict[str, Any]:
            return _row(prompt, answer(engine, prompt.segments, sampling, room))

        name = "evaluate without the drafter" if drafter is None else "evaluate"
        progress = Progress(name, len(prompts), "conversations")
        results = each(respond, prompts, settings.batch_size, progress.add)
        return {
            "engine": engine.info,
            "answers": [row for row in results if not isinstance(row, RequestError)],
            "refused": [
                {"id": prompt.id, "reason": str(row)}
                for prompt, row in zip(prompts, results, strict=True)
                if isinstance(row, RequestError)
            ],
        }


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
        "token_ids": answered.token_ids,
        "completion_tokens": sum(len(response.token_ids) for response in answered.responses),
        "verify_steps": sum(response.speculation.get("spec_verify_ct", 0) for response in answered.responses),
        "histogram": histogram,  # [i]: verify steps that accepted exactly i drafts
    }


def measure(rows: list[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Accept length and acceptance by draft position, over all answers together.

    SGLang's histogram also counts drafts that were accepted behind an answer's end and cut off with it.
    """
    tokens, steps = sum(row["completion_tokens"] for row in rows), sum(row["verify_steps"] for row in rows)
    longest = num_steps + 1
    exactly = [sum(row["histogram"][i] for row in rows if i < len(row["histogram"])) for i in range(longest)]
    at_least = [sum(exactly[i:]) for i in range(longest)]
    return {
        "conversations": len(rows),
        "completion_tokens": tokens,
        "verify_steps": steps,
        "accept_length": round(tokens / steps, 4) if steps else None,
        # position k's share of the verify steps whose positions before k were all accepted
        "accept_length_by_step": [
            round(at_least[i] / at_least[i - 1], 4) if at_least[i - 1] else None for i in range(1, longest)
        ],
    }


def different(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversations that differ, or that only one side answered, and the token at which they first do."""
    first, second = ({row["id"]: row["token_ids"] for row in rows} for rows in (some, others))
    found = []
    for name in sorted(first.keys() | second.keys()):
        mine, other = first.get(name, []), second.get(name, [])
        if mine != other:
            same = [a == b for a, b in zip(mine, other, strict=False)] + [False]
            found.append({"id": name, "first_different_token": same.index(False)})
    return found


def local_folder(run: Run, key: str, scratch: Path) -> Path:
    """A folder of the store as a local path: itself, or a copy below `scratch`."""
    if run.files.local:
        return Path(run.files.url(key))
    for name in run.files.list(key):
        run.files.download(name, scratch / name)
    return scratch / key
