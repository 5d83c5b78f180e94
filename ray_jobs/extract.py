"""Token ids -> responses and hidden states."""

from eagle3_ray.extract import extract
from eagle3_ray.prepare import prepare
from eagle3_ray.run import Run
from ray_jobs import stage
from ray_jobs.cluster import cluster


def main(run: Run) -> None:
    corpus = prepare(run, run.config.prompts)
    with cluster(run.config):
        extract(run, corpus)


if __name__ == "__main__":
    stage(main)
