"""Corpus -> token ids, in response units."""

from eagle3_ray.prepare import prepare
from ray_jobs import stage

if __name__ == "__main__":
    stage(lambda run: prepare(run, run.config.prompts))
