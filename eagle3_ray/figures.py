"""An evaluation's figures: what each engine answered, set side by side.

`summarised` takes the answers of every engine that drafted and of the target alone, and gives all that a summary says
of them. Two figures are held against what they must be: in float32 greedy answers with a drafter are the target's own,
and a walk without serving comes to the accept length that was served.
"""

from __future__ import annotations

from typing import Any

from eagle3_ray.acceptance import SPEED, Row, agreement, measure
from eagle3_ray.config import Drafting
from eagle3_ray.run import Run

COMPARED = ["accept_length", "accept_length_ci95", "tokens_per_verify_step", *SPEED, "identical_share"]


def summarised(
    run: Run,
    drafter: str,
    served: dict[Drafting, dict[str, Any]],
    plain: dict[str, Any] | None,
    rivals: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """What `serve` brought, as figures: those of the first drafting in full, of all of them as a table; `rivals` are
    other drafters' answers with the same drafting, by their path, or {"failed": why}."""
    drafting, speculating = next(iter(served.items()))
    rows, alone = speculating["answers"], plain["answers"] if plain else []
    by_drafting = [{**one._asdict(), **_figures(run, one, given, plain)} for one, given in served.items()]
    by_drafter = [
        {"drafter": path, "faults": [given["failed"]], **dict.fromkeys([*COMPARED, "greedy_identical"])}
        if "failed" in given
        else {"drafter": path, "faults": given["faults"], **_figures(run, drafting, given, plain)}
        for path, given in {own_path(run, drafter): speculating, **rivals}.items()
    ]
    by = "accept_length" if run.config.hardware.device == "cpu" else "output_tokens_per_s"
    best, best_drafter = (max(table, key=lambda row: row[by] or 0) for table in (by_drafting, by_drafter))
    return {
        **_figures(run, drafting, speculating, plain),
        "refused": speculating["refused"],
        "by_suite": {
            suite: _acceptance(run, drafting, _of(rows, "suite", suite), _of(alone, "suite", suite) if plain else None)
            for suite in dict.fromkeys(row["suite"] for row in rows)
        },
        "by_domain": {
            domain: measure(_of(rows, "domain", domain), drafting.num_steps)
            for domain in sorted({row["domain"] for row in rows})
        },
        "by_drafting": [{name: row[name] for name in [*Drafting._fields, *COMPARED]} for row in by_drafting],
        "best_drafting": {name: best[name] for name in Drafting._fields} | {"by": by},
        "by_drafter": [{name: row[name] for name in ["drafter", "faults", *COMPARED]} for row in by_drafter],
        "best_drafter": {"drafter": best_drafter["drafter"], "by": by},
        "failed": [path for path, given in rivals.items() if "failed" in given],
        "disagreement": _disagreement(run, by_drafting, by_drafter[1:]),
        **_simulated(run, drafter, drafting, speculating, plain),
        "engine": speculating["engine"],
        "answers": [
            {name: row[name] for name in ("id", "domain", "completion_tokens", "verify_steps")} for row in rows
        ],
    }


def own_path(run: Run, drafter: str) -> str:
    """The folder or URL of the drafter that is evaluated first: this run's, or drafter.path."""
    return (run.config.drafter.path or run.files.url(f"{drafter}/export")).rstrip("/")


def _of(rows: list[Row], name: str, value: str) -> list[Row]:
    return [row for row in rows if row[name] == value]


def _figures(run: Run, drafting: Drafting, served: dict[str, Any], plain: dict[str, Any] | None) -> dict[str, Any]:
    """Acceptance, agreement and speed of one engine that drafted, against the one that did not."""
    alone = plain["answers"] if plain else None
    return {**_acceptance(run, drafting, served["answers"], alone), **_speed(run, served, plain)}


def _acceptance(run: Run, drafting: Drafting, rows: list[Row], plain: list[Row] | None) -> dict[str, Any]:
    unknown: dict[str, Any] = {
        "greedy_identical": None,
        "identical_share": None,
        "first_divergence": None,
        "different_answers": [],
    }
    compared = plain is not None and run.config.evaluate.temperature == 0
    return {**measure(rows, drafting.num_steps), **(agreement(rows, plain or []) if compared else unknown)}


def _disagreement(run: Run, by_drafting: list[dict[str, Any]], rivals: list[dict[str, Any]]) -> str | None:
    """Which engines' greedy answers are not the target's own, in float32, where they must be; None: none."""
    if (run.config.evaluate.dtype or run.config.engine.dtype) != "float32":
        return None
    named = {f"{[row[name] for name in Drafting._fields]}": row for row in by_drafting}
    parted = [
        f"{len(row['different_answers'])} of {row['conversations']} conversations of {name}, the earliest at generated "
        f"token {min(one['first_different_token'] for one in row['different_answers'])}"
        for name, row in {**named, **{row["drafter"]: row for row in rivals}}.items()
        if row["greedy_identical"] is False
    ]
    if not parted:
        return None
    return f"greedy answers in float32 are not those without speculation, as they must be: {'; '.join(parted)}"


def _speed(run: Run, served: dict[str, Any], plain: dict[str, Any] | None) -> dict[str, Any]:
    """Output tokens a second over the time from the first request to the last answer.

    None on a CPU, where they mean nothing, and None of an engine that also captures, which slows it down.
    """

    def rate(of: dict[str, Any] | None) -> float | None:
        if of is None or run.config.hardware.device == "cpu":
            return None
        return round(sum(row["completion_tokens"] for row in of["answers"]) / of["seconds"], 1)

    fast, slow = rate(served), rate(None if run.config.evaluate.simulate else plain)
    return dict(zip(SPEED, (fast, slow, round(fast / slow, 3) if fast and slow else None), strict=True))


# ---------------------------------------------------------------- walked without serving


def _simulated(
    run: Run, drafter: str, drafting: Drafting, served: dict[str, Any], plain: dict[str, Any] | None
) -> dict[str, Any]:
    """`simulated`: walked accept lengths, and how much more was served; `not_simulated`: why one is None.

    `answers` is of the very conversations that were served, `heldout` training's, of other prompts.
    """
    trained = (run.read_json(f"{drafter}/summary.json") or {}).get("heldout") or {}
    why = {"answers": _why_no_answers(run), "heldout": _why_no_heldout(run, drafting, trained)}
    walked = {"answers": plain and plain["walked"], "heldout": trained.get("after")}
    tokens = sum(row["completion_tokens"] for row in served["answers"])
    length = tokens / max(1, sum(row["verify_steps"] for row in served["answers"]))
    simulated = {
        name: {**found, "served_minus_simulated": round(length - found["accept_length"], 4)}
        if found and not why[name]
        else None
        for name, found in walked.items()
    }
    return {"simulated": simulated, "not_simulated": {name: reason for name, reason in why.items() if reason}}


def _why_no_answers(run: Run) -> str | None:
    if run.config.evaluate.simulate:
        return None
    on_gpu = ", which leaves the engine without the drafter free to measure speed"
    return f"evaluate.simulate is false{'' if run.config.hardware.device == 'cpu' else on_gpu}"


def _why_no_heldout(run: Run, drafting: Drafting, trained: dict[str, Any]) -> str | None:
    """Why training's walk says nothing of this serving: both must be greedy, and draft alike."""
    settings, sampling = run.config.evaluate, run.config.sampling
    if run.config.drafter.path:
        return "of another's drafter (drafter.path) no training is known"
    if not trained.get("samples"):
        return "no sample was held out from training (train.heldout)"
    if settings.temperature:
        return f"evaluate.temperature is {settings.temperature}, and a walk is greedy"
    if sampling.temperature:
        return f"sampling.temperature is {sampling.temperature}: what training walks over are no greedy answers"
    if (drafting.num_steps, drafting.topk) != (trained["draft_steps"], 1):
        return (
            f"training walks chains of {trained['draft_steps']} drafts; here evaluate.num_steps is "
            f"{drafting.num_steps} and evaluate.topk {drafting.topk}"
        )
    return None
