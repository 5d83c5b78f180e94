"""Hidden states -> drafter."""

from typing import Any

from eagle3_ray.extract import extracted
from eagle3_ray.prepare import Corpus, prepare
from eagle3_ray.run import Run
from eagle3_ray.train.trainer import train_drafter
from ray_jobs import stage
from ray_jobs.cluster import cluster


def train(run: Run, corpus: Corpus) -> dict[str, Any]:
    features, _ = extracted(run, corpus)
    return train_drafter(run.config, features, features.description(), run.drafter(features))


def main(run: Run) -> None:
    corpus = prepare(run, run.config.prompts)
    with cluster(run.config):
        train(run, corpus)


if __name__ == "__main__":
    stage(main)
