"""The whole line: prompts to a drafter that SGLang serves, with its measured accept length.

Exits with 1, after all is written, where training and serving features differ, or float32 answers are not the target's
own.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from eagle3_ray.card import publish_card
from eagle3_ray.config import ConfigError
from eagle3_ray.engines.base import EngineError
from eagle3_ray.evaluate import evaluate, heldout
from eagle3_ray.export import export
from eagle3_ray.extract import extract, extracted
from eagle3_ray.prepare import prepare
from eagle3_ray.report import report, summarise
from eagle3_ray.run import Run
from eagle3_ray.train.trainer import train_drafter
from eagle3_ray.verify import verify, watching
from ray_jobs import stage
from ray_jobs.cluster import cluster
from ray_jobs.evaluate import say as say_evaluated
from ray_jobs.verify import say as say_verified

Result = TypeVar("Result")


def main(run: Run) -> None:
    if run.config.engine.name != "sglang":
        raise ConfigError(f"engine.name: the pipeline ends in SGLang; {run.config.engine.name} has single stages only")
    if run.config.drafter.path:
        raise ConfigError("drafter.path: another's drafter is only verified and evaluated, each by its own command")
    if run.config.features.folder:
        raise ConfigError("features.folder: the pipeline extracts; train, export, evaluate and verify each work on it")
    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Result], *args: Any) -> Result:
        start = time.monotonic()
        result = function(*args)
        seconds[name] = round(time.monotonic() - start, 1)
        return result

    corpus = timed("prepare", prepare, run, run.config.prompts)
    prompts = heldout(run)
    with cluster(run.config):
        timed("extract", extract, run, corpus)
        features, _ = extracted(run, corpus)
        drafter = run.drafter(features)
        timed("train", train_drafter, run.config, features, features.description(), drafter)
        exported = timed("export", export, run, features, drafter)
        watch = watching(run, corpus, features, drafter)
        try:
            evaluation = timed("evaluate", evaluate, run, prompts, drafter, watch)
        except EngineError:  # of a drafter that cannot be served: verify says why
            if watch:
                say_verified(verify(run, corpus, features, drafter))
            raise
        verification = timed("verify", verify, run, corpus, features, drafter) if run.config.verify.samples else None
    if verification:
        say_verified(verification)  # first: nothing that fails from here on shall hide it
    publish_card(run, features, drafter, exported, evaluation)
    summary = summarise(run, corpus, features, drafter, evaluation, verification, seconds)
    report(run, summary)
    say_evaluated(evaluation)
    print(f"accept length  {summary['accept_length']}")
    print(f"drafter        {summary['drafter_path']}")
    print(f"report         {summary['report_path']}")
    misaligned = verification is not None and verification["verdict"] != "aligned"
    sys.exit(misaligned or evaluation["disagreement"] is not None)


if __name__ == "__main__":
    stage(main)
