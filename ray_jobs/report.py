"""The report of a run, made anew from its summary."""

from eagle3_ray.config import ConfigError
from eagle3_ray.report import report
from eagle3_ray.run import Run
from ray_jobs import stage


def main(run: Run) -> None:
    summary = run.read_json(f"runs/{run.config.run}/summary.json")
    if summary is None:
        raise ConfigError(f"run: no summary of {run.config.run!r} in {run.files.root}; run ray_jobs.pipeline first")
    report(run, summary)
    print(summary["report_path"])


if __name__ == "__main__":
    stage(main)
