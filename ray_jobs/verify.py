"""Drafter, features and serving engine -> whether training features equal serving features. Exits with 1 if not."""

import sys

from eagle3_ray.config import ConfigError
from eagle3_ray.prepare import prepare
from eagle3_ray.run import Run
from eagle3_ray.verify import elsewhere, verify
from ray_jobs import stage
from ray_jobs.cluster import cluster


def main(run: Run) -> None:
    if not run.config.verify.samples:
        raise ConfigError("verify.samples: 0 leaves nothing to verify")
    if run.config.features.path:
        with cluster(run.config):
            summary = elsewhere(run)
        say(summary)
        sys.exit(summary["verdict"] != "aligned")
    corpus = prepare(run, run.config.prompts)
    features, _ = run.features(corpus.fingerprint)
    with cluster(run.config):
        summary = verify(run, corpus, features, run.drafter(features), anew=True)
    say(summary)
    sys.exit(summary["verdict"] != "aligned")


def say(summary: dict) -> None:
    print(f"verify: {summary['verdict']}")
    for cause in summary["causes"]:
        print(f"  {cause}")
    for warning in summary.get("warnings", []):
        print(f"  warning: {warning}")
    if "summary_path" in summary:
        print(f"  {summary['summary_path']}")


if __name__ == "__main__":
    stage(main)
