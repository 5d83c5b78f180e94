"""The drafter's accept length, measured in real SGLang serving on held-out prompts.

Accept length is SGLang's: completion tokens / verify steps, the bonus token counted. Beside it the same prompts are
answered by the target alone: under greedy decoding in fp32 every answer must be the same, token by token.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from eagle3_ray.capture import engine_version, fingerprint
from eagle3_ray.config import ConfigError, PromptsConfig, SamplingConfig
from eagle3_ray.engines.base import Answered, RequestError, answer, each
from eagle3_ray.engines.sglang import SGLangEngine, context_length
from eagle3_ray.prepare import Corpus, Prompt, prepare
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


def evaluate(run: Run, corpus: Corpus, drafter: str) -> dict[str, Any]:
    """Serve the exported drafter at `<drafter>/export/` on `corpus`; the summary is kept beside the drafter.

    Ray must be running: each engine takes the place of one of hardware's actors. ConfigError unless engine.name is
    sglang, since nothing else serves the drafter.
    """
    config = run.config
    if config.engine.name != "sglang":
        raise ConfigError(f"engine.name: evaluation is served by sglang, not by {config.engine.name}")
    dtype = config.evaluate.dtype or config.engine.dtype
    description = {
        "prompts": corpus.fingerprint,
        "engine_version": engine_version(config),
        "dtype": dtype,
        "exported": run.read_json(f"{drafter}/export/config.json"),
        **{name: getattr(config.evaluate, name) for name in SETTINGS},
    }
    key = f"{drafter}/evaluations/{fingerprint(description)}.json"
    summary = run.read_json(key)
    if summary is not None:
        return summary
    start = time.monotonic()
    hardware = config.hardware
    served = ray.remote(num_cpus=hardware.cpus_per_actor, num_gpus=hardware.gpus_per_actor, max_retries=1)(serve)
    speculating = ray.get(served.remote(run, corpus, drafter))
    plain = ray.get(served.remote(run, corpus, None)) if config.evaluate.baseline else None
    summary = {
        **{name: value for name, value in description.items() if name != "exported"},
        **measure(speculating["answers"]),
        "greedy_identical": None if plain is None else identical(speculating["answers"], plain["answers"]),
        "by_domain": {
            domain: measure([row for row in speculating["answers"] if row["domain"] == domain])
            for domain in sorted({row["domain"] for row in speculating["answers"]})
        },
        "engine": speculating["engine"],
        "seconds": round(time.monotonic() - start, 1),
        "answers": [
            {name: row[name] for name in ("id", "domain", "completion_tokens", "verify_steps")}
            for row in speculating["answers"]
        ],
    }
    if summary["greedy_identical"] is False:
        summary["different_answers"] = different(speculating["answers"], plain["answers"] if plain else [])
    run.write_json(key, summary)
    return summary


def serve(run: Run, corpus: Corpus, drafter: str | None) -> dict[str, Any]:
    """One engine's greedy answers to the whole corpus, with the drafter or (None) without. Runs as a Ray task."""
    config = run.config
    settings = config.evaluate
    config = dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, dtype=settings.dtype or config.engine.dtype)
    )
    args = dict(config.hardware.serve_args)
    with tempfile.TemporaryDirectory(prefix="eagle3-ray-") as scratch:
        if drafter is not None:
            args |= {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": str(local_folder(run, f"{drafter}/export", Path(scratch))),
                "speculative_num_steps": settings.num_steps,
                "speculative_eagle_topk": settings.topk,
                "speculative_num_draft_tokens": settings.num_draft_tokens,
            }
        sampling = SamplingConfig(max_new_tokens=settings.max_new_tokens)
        room = context_length(config, run.folder)
        engine = SGLangEngine(config, run.folder, None, args)
        try:
            prompts = [prompt for unit in corpus.units for prompt in corpus.read(unit)]

            def respond(prompt: Prompt) -> dict[str, Any]:
                return _row(prompt, answer(engine, prompt.segments, sampling, room))

            results = each(respond, prompts, settings.batch_size)
            return {"engine": engine.info, "answers": [row for row in results if not isinstance(row, RequestError)]}
        finally:
            engine.close()


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


def measure(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Accept length and acceptance by draft position, over all answers together."""
    tokens, steps = sum(row["completion_tokens"] for row in rows), sum(row["verify_steps"] for row in rows)
    longest = max((len(row["histogram"]) for row in rows), default=0)
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


def identical(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Whether both hold the same answers, token by token."""
    return {row["id"]: row["token_ids"] for row in some} == {row["id"]: row["token_ids"] for row in others}


def different(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers that differ, and the token at which they first do."""
    by_id = {row["id"]: row["token_ids"] for row in others}
    found = []
    for row in some:
        mine, other = row["token_ids"], by_id.get(row["id"], [])
        if mine != other:
            shared = [a == b for a, b in zip(mine, other, strict=False)] + [False]
            at = shared.index(False)
            found.append({"id": row["id"], "first_different_token": at})
    return found


def local_folder(run: Run, key: str, scratch: Path) -> Path:
    """A folder of the store as a local path: itself, or a copy below `scratch`."""
    if run.files.local:
        return Path(run.files.url(key))
    for name in run.files.list(key):
        run.files.download(name, scratch / name)
    return scratch / key
