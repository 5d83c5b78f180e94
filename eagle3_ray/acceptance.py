"""What served answers say about a drafter: counts in, figures out.

Accept length is SGLang's: completion tokens / verify steps, the bonus token counted. A row is one conversation:
its id, domain, turns (asked), answers (the token ids of each), completion_tokens, verify_steps, and histogram, whose
entry i counts the verify steps that accepted exactly i drafts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LOOPING = 0.5  # an answer with a smaller share of distinct bigrams says most of its pairs of tokens again
RESAMPLES, SEED = 1000, 0  # of the bootstrap

SPEED = ("output_tokens_per_s", "output_tokens_per_s_plain", "speedup")  # measured by `figures`
Row = dict[str, Any]


def measure(rows: list[Row], num_steps: int) -> dict[str, Any]:
    """The figures of all rows together; None where nothing was counted.

    A verify step yields its accepted drafts and one token of the target, so at most num_steps + 1; an answer's first
    token comes from prefill, without one. SGLang's histogram also counts drafts that were accepted behind an answer's
    end and cut off with it.
    """
    tokens, steps = sum(row["completion_tokens"] for row in rows), sum(row["verify_steps"] for row in rows)
    longest = num_steps + 1
    exactly = [sum(row["histogram"][i] for row in rows if i < len(row["histogram"])) for i in range(longest)]
    at_least = [sum(exactly[i:]) for i in range(longest)]
    answers = [ids for row in rows for ids in row["answers"]]
    distinct = [share for share in map(distinct_bigrams, answers) if share is not None]
    return {
        "conversations": len(rows),
        "turns_asked": sum(row["turns"] for row in rows),
        "turns_answered": len(answers),  # fewer where the context had no room for a further answer
        "completion_tokens": tokens,
        "verify_steps": steps,
        "accept_length": round(tokens / steps, 4) if steps else None,
        "accept_length_ci95": interval(rows),
        "tokens_per_verify_step": round((tokens - len(answers)) / steps, 4) if steps else None,
        # position k's share of the verify steps whose positions before k were all accepted
        "accept_length_by_step": [
            round(at_least[i] / at_least[i - 1], 4) if at_least[i - 1] else None for i in range(1, longest)
        ],
        "distinct_bigram_share": round(sum(distinct) / len(distinct), 4) if distinct else None,
        "looping_answers": sum(share < LOOPING for share in distinct),
    }


def distinct_bigrams(ids: list[int]) -> float | None:
    """The share of an answer's pairs of neighbouring tokens that are not a repetition; None below two tokens.

    A target that repeats itself is easy to draft for: a high accept length with a low share is a loop's.
    """
    pairs = list(zip(ids, ids[1:], strict=False))
    return len(set(pairs)) / len(pairs) if pairs else None


def interval(rows: list[Row]) -> list[float] | None:
    """The middle 95% of the accept lengths of resampled conversations (the percentile bootstrap); None below two.

    Conversations and not verify steps are drawn, since the steps of one answer are alike.
    """
    counts = np.array(
        [(row["completion_tokens"], row["verify_steps"]) for row in rows if row["verify_steps"]]
    )  # [n, 2]
    if len(counts) < 2:
        return None
    draw = np.random.default_rng(SEED)
    lengths = []
    for _ in range(RESAMPLES):
        tokens, steps = counts[draw.integers(len(counts), size=len(counts))].sum(0)
        lengths.append(tokens / steps)
    return [round(float(end), 4) for end in np.quantile(lengths, [0.025, 0.975])]


def agreement(rows: list[Row], others: list[Row]) -> dict[str, Any]:
    """How far two sides said the same: the identical share of conversations, and where the others part.

    `first_divergence` has quantiles over the conversations that both sides answered, and differently.
    """
    found = different(rows, others)
    both = {row["id"] for row in rows} & {row["id"] for row in others}
    asked = {row["id"] for row in rows} | {row["id"] for row in others}
    at = [row["first_different_token"] for row in found if row["id"] in both]
    quantiles = {f"{q:.0%}": int(np.quantile(at, q, method="lower")) for q in (0.1, 0.5, 0.9)} if at else None
    return {
        "greedy_identical": not found,
        "identical_share": round(1 - len(found) / len(asked), 4) if asked else None,
        "first_divergence": quantiles,
        "different_answers": found,
    }


def different(some: list[Row], others: list[Row]) -> list[dict[str, Any]]:
    """The conversations that differ, or that only one side answered, and which generated token is the first to differ.

    Tokens are counted from 0, over all answers of a conversation.
    """
    first, second = ({row["id"]: [t for ids in row["answers"] for t in ids] for row in rows} for rows in (some, others))
    found = []
    for name in sorted(first.keys() | second.keys()):
        mine, other = first.get(name, []), second.get(name, [])
        if mine != other:
            same = [a == b for a, b in zip(mine, other, strict=False)] + [False]
            found.append({"id": name, "first_different_token": same.index(False)})
    return found
