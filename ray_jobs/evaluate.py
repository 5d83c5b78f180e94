"""Drafter -> its accept length in real SGLang serving. Exits with 1 where float32 answers are not the target's own."""

import sys
from typing import Any

from eagle3_ray.card import publish_card
from eagle3_ray.evaluate import evaluate, heldout
from eagle3_ray.prepare import prepare
from eagle3_ray.run import Run, exported
from ray_jobs import stage
from ray_jobs.cluster import cluster


def main(run: Run) -> None:
    features, _ = run.features(prepare(run, run.config.prompts).fingerprint)
    prompts = heldout(run)
    with cluster(run.config):
        summary = evaluate(run, prompts, drafter := run.drafter(features))
    if not run.config.drafter.path:
        publish_card(run, features, drafter, exported(run, drafter), summary)
    say(summary)
    sys.exit(summary["disagreement"] is not None)


def say(summary: dict[str, Any]) -> None:
    print(f"evaluate: accept length {summary['accept_length']} over {summary['verify_steps']} verify steps")
    for name, row in summary["by_suite"].items():
        print(f"  {name}: {row['accept_length']}")
        if row["turns_answered"] != row["turns_asked"]:
            print(f"    only {row['turns_answered']} of {row['turns_asked']} turns were answered, for want of context")
    if summary["refused"]:
        print(
            f"  {len(summary['refused'])} conversations were refused, the first for: {summary['refused'][0]['reason']}"
        )
    for row in summary["by_drafter"][1:]:
        failed = row["drafter"] in summary["failed"]
        print(f"  {row['drafter']}: {row['faults'][0] + '; run again to retry' if failed else row['accept_length']}")
    for name, found in summary["simulated"].items():
        if found:
            length, more = found["accept_length"], found["served_minus_simulated"]
            print(f"  simulated ({name}): accept length {length:.4f}; served minus simulated {more:+.4f}")
        else:
            print(f"  simulated ({name}): not compared, since {summary['not_simulated'][name]}")
    if summary["identical_share"] is not None:
        print(f"  identical to the target's own greedy answers: {summary['identical_share']:.2%} of the conversations")
    if summary["first_divergence"]:
        at = ", ".join(f"{token} ({share})" for share, token in summary["first_divergence"].items())
        print(f"  the others part at generated token {at}")
    if summary["disagreement"]:
        print(f"  {summary['disagreement']}")


if __name__ == "__main__":
    stage(main)
