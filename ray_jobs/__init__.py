"""One thin Hydra entry point a stage: `python -m ray_jobs.STAGE [override …]`.

`stage` composes conf/, checks it against eagle3_ray.config, and runs one function on the opened run; `command` only
composes. The exit code is 2 for a configuration that cannot work, before any engine starts, 1 for a failure after that,
and 130 or 143 for SIGINT or SIGTERM.
"""

from __future__ import annotations

import sys

from ray_jobs import interrupts

if sys.argv[0] == "-m":  # of `python -m ray_jobs.STAGE`: what is imported from here on takes seconds
    interrupts.catch()

# ruff: noqa: E402
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle3_ray.config import Config, ConfigError, StoreCommand
from eagle3_ray.printed import without_secrets
from eagle3_ray.run import Run, open_run

ROOT = Path(__file__).resolve().parent.parent
ConfigStore.instance().store(name="schema", node=Config)  # conf/config.yaml builds on it
ConfigStore.instance().store(name="store_schema", node=StoreCommand)  # and conf/store_command.yaml on this
OmegaConf.register_new_resolver("same", lambda one, other: one == other, replace=True)
OmegaConf.register_new_resolver("repo", lambda path: str(ROOT / path), replace=True)


def stage(function: Callable[[Run], Any]) -> None:
    """Run `function` on the checked configuration of this command line."""
    command("config", lambda composed: function(open_run(typed(composed))))


def command(config: str, function: Callable[[DictConfig], Any]) -> None:
    """Compose conf/<config>.yaml with this command line, and run `function` on it."""
    composed_well = False

    @hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name=config)
    def main(composed: DictConfig) -> None:
        nonlocal composed_well
        composed_well = True
        learn(OmegaConf.to_container(composed))
        try:
            with interrupts.interruptible():
                function(composed)
        except (ConfigError, OmegaConfBaseException) as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(2)

    with without_secrets(sys.argv[1:]) as learn:
        try:
            with interrupts.interruptible():
                main()
        except SystemExit as end:  # of a faulty command line Hydra says what is wrong and exits with 1
            sys.exit(2 if end.code == 1 and not composed_well else end.code)


def typed(composed: DictConfig) -> Config:
    """The composed settings as dataclasses."""
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    return config
