"""Drafter -> its accept length in real SGLang serving."""

from eagle3_ray.card import publish_card
from eagle3_ray.evaluate import evaluate, heldout
from eagle3_ray.prepare import prepare
from eagle3_ray.run import Run, exported
from ray_jobs import stage
from ray_jobs.cluster import cluster


def main(run: Run) -> None:
    features, _ = run.features(prepare(run, run.config.prompts).fingerprint)
    prompts = heldout(run)
    with cluster(run.config.cluster):
        summary = evaluate(run, prompts, drafter := run.drafter(features))
    if not run.config.drafter.path:
        publish_card(run, features, drafter, exported(run, drafter), summary)
    print(f"evaluate: accept length {summary['accept_length']} over {summary['verify_steps']} verify steps")
    for name, row in summary["by_suite"].items():
        print(f"  {name}: {row['accept_length']}")
    for row in summary["by_drafter"][1:]:
        print(f"  {row['drafter']}: {row['accept_length']}")


if __name__ == "__main__":
    stage(main)
