"""Drafter -> the folder that SGLang serves."""

from eagle3_ray.export import export
from eagle3_ray.prepare import prepare
from eagle3_ray.run import Run
from ray_jobs import stage
from ray_jobs.cluster import cluster


def main(run: Run) -> None:
    features, _ = run.features(prepare(run, run.config.prompts).fingerprint)
    with cluster(run.config):
        print(export(run, features, run.drafter(features)))


if __name__ == "__main__":
    stage(main)
