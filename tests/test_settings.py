"""Every setting's limits: each number has bounds that hold, each text its choices or form, and names stay names."""

from __future__ import annotations

import copy
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from conftest import ROOT, compose
from omegaconf import OmegaConf

from eagle3_ray.config import (
    STORE_ACTIONS,
    Config,
    ConfigError,
    FeaturesConfig,
    StoreCommand,
    StoreConfig,
    SuiteConfig,
    check,
)
from eagle3_ray.limits import FORMS, Limits, limits_of
from eagle3_ray.run import check_values
from ray_jobs import typed
from ray_jobs.store import ACTIONS

# Texts that no set of choices can hold: paths, URLs and names of data sets and models
FREE = {
    "target.name", "target.path", "target.revision", "target.weights", "prompts.source", "prompts.split",
    "prompts.subset", "engine.version", "hardware.capture_dir", "store.root", "store.scratch_dir",
    "drafter.start_from", "drafter.path", "evaluate.source", "evaluate.split", "evaluate.subset",
    "evaluate.suites.a.source", "evaluate.suites.a.split", "evaluate.suites.a.subset", "evaluate.drafters",
    "features.path", "cluster.address", "to", "target_path",
}  # fmt: skip


def command() -> StoreCommand:
    return StoreCommand(store=StoreConfig("/store"), action="ls")


COMPOSED = compose()


def run() -> Config:
    config = copy.deepcopy(COMPOSED)
    config.evaluate.suites = {"a": SuiteConfig("a.jsonl")}
    return config


def given(override: str) -> Config:
    """The demo's settings and one more, typed as Hydra types it; in a hundredth of the time."""
    merged = OmegaConf.merge(OmegaConf.structured(COMPOSED), OmegaConf.from_dotlist([override]))
    return typed(merged)  # type: ignore[arg-type]


def leaves(cls: type, name: str = "") -> Iterator[tuple[str, set[type], Limits]]:
    """Every setting: its dotted name, the types in its declaration, and its limits."""
    for setting, declared in get_type_hints(cls).items():
        path = f"{name}.{setting}" if name else setting
        types = set(flat(declared))
        inner = [one for one in types if is_dataclass(one)]
        for below in inner:
            yield from leaves(below, f"{path}.a" if dict in types else path)  # of any suite: one is called a
        if not inner or dict in types:
            yield path, types, limits_of(cls, setting)


def flat(declared: Any) -> Iterator[Any]:
    """`dict[str, Any] | None` -> dict, str, Any, NoneType."""
    yield getattr(declared, "__origin__", declared)
    for argument in get_args(declared):
        yield from flat(argument)


SETTINGS = {path: (types, limits) for cls in (Config, StoreCommand) for path, types, limits in leaves(cls)}
NUMBERS = {path: one for path, one in SETTINGS.items() if one[0] & {int, float}}
TEXTS = {path: one for path, one in SETTINGS.items() if str in one[0] and dict not in one[0]}


def test_the_walk_sees_the_whole_schema() -> None:
    known = {"train.lr", "capture.boundaries", "evaluate.sweep", "evaluate.suites.a.limit", "cluster.num_cpus"}
    assert known | {"older_than_hours", "hardware.min_actors"} <= NUMBERS.keys() and len(NUMBERS) > 50
    assert {"run", "action", "fingerprint", "evaluate.dtype", "features.folder"} <= TEXTS.keys()


@pytest.mark.parametrize("path", NUMBERS)
def test_every_number_has_a_lower_bound_at_least(path: str) -> None:
    _, limits = NUMBERS[path]
    assert limits.at_least is not None or limits.above is not None, f"{path} has no bounds"


@pytest.mark.parametrize("path", TEXTS)
def test_every_text_has_choices_or_a_form_unless_it_is_free(path: str) -> None:
    _, limits = TEXTS[path]
    assert (path in FREE) == (not limits.choices and limits.form is None)


def test_a_default_is_within_its_limits() -> None:
    check(run())
    check(command())
    check(compose("hardware=gpu8", "target=kimi_k25", "train=gpu", "evaluate=suites", "store=s3", "store.root=s3://b"))


def with_value(path: str, value: Any) -> Config | StoreCommand:
    """Settings that are fine but for this one."""
    settings = run() if path.split(".")[0] in {one.name for one in fields(Config)} else command()
    types = SETTINGS[path][0]
    if list in types:
        value = [[value]] if path == "evaluate.sweep" else [value]
    *groups, name = path.split(".")
    place: Any = settings
    for group in groups:
        place = place[group] if isinstance(place, dict) else getattr(place, group)
    assert hasattr(place, name)
    setattr(place, name, value)
    return settings


def refusal(path: str, value: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        check(with_value(path, value))
    return str(refused.value)


@pytest.mark.parametrize("path", NUMBERS)
def test_each_bound_holds_to_the_last_value(path: str) -> None:
    types, limits = NUMBERS[path]

    def beside(bound: float, direction: float) -> float:
        if float in types:
            return math.nextafter(float(bound), direction)
        return bound + (1 if direction > 0 else -1)

    least, most = limits.at_least, limits.at_most
    if least is not None:
        assert refusal(path, beside(least, -math.inf)).startswith(f"{path}: {beside(least, -math.inf)} is less than")
        check(with_value(path, least))
    if limits.above is not None:
        assert refusal(path, limits.above) == f"{path}: {limits.above} is not above {limits.above}"
        check(with_value(path, beside(limits.above, math.inf)))
    if most is not None:
        assert refusal(path, beside(most, math.inf)) == f"{path}: {beside(most, math.inf)} is more than {most}"
        check(with_value(path, most))
    if limits.below is not None:
        assert refusal(path, limits.below) == f"{path}: {limits.below} is not below {limits.below}"
        check(with_value(path, beside(limits.below, -math.inf)))
    if limits.also is not None:
        check(with_value(path, limits.also))
    if type(None) in types:
        settings = with_value(path, 1)
        if list not in types:
            settings = with_value(path, None)
        check(settings)


@pytest.mark.parametrize("path", [path for path, (types, _) in NUMBERS.items() if float in types])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_is_nan_or_infinite(path: str, value: float) -> None:
    assert refusal(path, value) == f"{path}: {value} is not a finite number"


@pytest.mark.parametrize("path", [path for path, (_, limits) in TEXTS.items() if limits.choices])
def test_each_choice_is_taken_and_no_other(path: str) -> None:
    choices = TEXTS[path][1].choices
    for choice in choices:
        check(with_value(path, choice))
    for other in ("other", "", choices[0].upper(), f"{choices[0]} "):
        assert refusal(path, other) == f"{path}: {other!r} is none of {', '.join(choices)}"


def test_each_action_of_the_store_command_can_be_chosen() -> None:
    assert set(STORE_ACTIONS) == ACTIONS.keys()


def test_what_somebody_elses_settings_hold_is_not_ours_to_bound() -> None:
    config = run()
    config.engine.args = {"mem_fraction_static": -1.0, "x": math.nan, "y": {"z": [math.inf]}}
    config.store.storage_options = {"timeout": -1}
    check(config)


# Nearly all of them were once accepted, to fail in a worker's traceback or to train in the wrong direction
CANNOT_WORK = [
    *(("train.lr", value) for value in ("-1e-3", "0", "nan", "inf", "-inf")),
    *(("train.max_grad_norm", value) for value in ("-1", "0", "nan", "inf")),
    *(("train.warmup_share", value) for value in ("1.5", "-1", "nan")),
    *(("train.min_lr_share", value) for value in ("3", "-0.1", "nan")),
    *(("train.weight_decay", value) for value in ("-1", "nan")),
    *(("train.step_decay", value) for value in ("0", "1.5", "nan")),
    *(("train.max_failures", value) for value in ("-7", "-1")),
    *(("train.seed", value) for value in ("-1", str(2**64))),
    *(("train.cpus_per_worker", value) for value in ("0",)),
    *(("sampling.top_p", value) for value in ("1.5", "0", "nan")),
    *(("sampling.top_k", value) for value in ("0", "-5", str(2**31))),
    *(("sampling.temperature", value) for value in ("-1", "nan", "inf")),
    *(("sampling.seed", value) for value in ("-1", str(2**32))),
    *(("hardware.cpus_per_actor", value) for value in ("0", "-1")),
    *(("hardware.gpus_per_actor", value) for value in ("-1",)),
    *(("hardware.min_actors", value) for value in ("0",)),
    *(("hardware.start_timeout_s", value) for value in ("0", "nan", "inf", "1e10")),
    *(("hardware.stall_timeout_s", value) for value in ("0", "nan")),
    *(("drafter.intermediate_size", value) for value in ("0",)),
    *(("drafter.num_attention_heads", value) for value in ("0",)),
    *(("drafter.num_key_value_heads", value) for value in ("0",)),
    *(("drafter.hidden_size", value) for value in ("0",)),
    *(("drafter.head_dim", value) for value in ("-2", "0", "1")),
    *(("evaluate.limit", value) for value in ("0", "-1")),
    *(("evaluate.temperature", value) for value in ("nan",)),
    *(("prompts.limit", value) for value in ("0", "-1")),
    *(("prompts.max_bad_share", value) for value in ("1.5", "-1", "nan")),
    *(("cluster.num_cpus", value) for value in ("0", "-1")),
    *(("capture.boundaries", value) for value in ("[-1,2]",)),
    *(("evaluate.sweep", value) for value in ("[[0,1,2]]",)),
]


@pytest.mark.parametrize(("setting", "value"), CANNOT_WORK)
def test_a_setting_that_cannot_work_is_refused_by_its_name_and_value(setting: str, value: str) -> None:
    config = given(f"{setting}={value}")
    with pytest.raises(ConfigError) as refused:
        check_values(config)
    told = str(refused.value)
    assert told.startswith(f"{setting}: ")
    seen = re.split(r"[: ]+", told)[1]
    assert seen in value or float(seen) == float(value) or math.isnan(float(value))


def test_what_has_a_meaning_of_its_own_is_taken() -> None:
    for override in ("sampling.top_k=-1", "train.max_failures=0", "train.warmup_share=0", "train.min_lr_share=0"):
        check_values(given(override))
    for override in ("train.lr=1e30", "train.steps=0", "verify.samples=0", "train.warmup_share=1"):
        check_values(given(override))


def test_a_cache_that_holds_no_shard_is_refused_by_runs_and_store_commands(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="store.cache_bytes: 9 is less than"):
        check_values(given("store.cache_bytes=9"))
    ended = ray_jobs("store", f"store.root={tmp_path}", "action=ls", "store.cache_bytes=9")
    assert ended.returncode == 2 and "store.cache_bytes: 9 is less than" in ended.stderr


# Names that become part of a key

NAMES = ["demo", "a", "0", "Run-1.2_x", "a" * 100]
NO_NAMES = [
    "../../x", "..", ".", "a..b", ".hidden", "-x", "_x", "", "a/b", "/abs", "a b", "a\nb", "a\n", "a\0", "é", "a" * 101,
    "s3://b", "a\\b", "~",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_taken(name: str) -> None:
    config = replace(run(), run=name, features=FeaturesConfig(folder=f"features/{name}"))
    config.evaluate.suites = {name: SuiteConfig("a.jsonl")}
    check(config)
    check(replace(config, features=FeaturesConfig(folder=name)))
    for fingerprint in (name, f"features/{name}", f"responses/{name}", "features/"):
        check(replace(command(), fingerprint=fingerprint))


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_could_leave_the_root_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(replace(run(), run=name))
    assert str(refused.value).startswith(f"run: {name!r} is not a name: letters, digits")
    config = run()
    config.evaluate.suites = {name: SuiteConfig("a.jsonl")}
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert str(refused.value).startswith(f"evaluate.suites: {name!r} is not a name")
    for folder in (name, f"features/{name}"):
        with pytest.raises(ConfigError) as refused:
            check(replace(run(), features=FeaturesConfig(folder=folder)))
        assert str(refused.value) == f"features.folder: {folder!r} is not features/<fingerprint>"
    if name:
        with pytest.raises(
            ConfigError, match="^fingerprint: .* is not features/<fingerprint>, or the beginning of one"
        ):
            check(replace(command(), fingerprint=f"features/{name}"))


@pytest.mark.parametrize("folder", ["responses/a", "features/a/b", "features//a", "/features/a", "features/features/a"])
def test_features_lie_in_the_store_s_folder_of_features(folder: str) -> None:
    with pytest.raises(ConfigError, match="^features.folder: "):
        check(replace(run(), features=FeaturesConfig(folder=folder)))


def test_every_form_is_used() -> None:
    assert {limits.form for _, limits in SETTINGS.values()} - {None} == FORMS.keys()


# The commands


def ray_jobs(stage: str, *overrides: str, home: Path = Path("/nonexistent")) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EAGLE3_RAY_HOME": str(home), "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", f"ray_jobs.{stage}", *overrides]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize(
    ("stage", "overrides", "told"),
    [
        ("prepare", ["train.max_grad_norm=-1"], "error: train.max_grad_norm: -1.0 is not above 0"),
        ("prepare", ["run=../../x"], "error: run: '../../x' is not a name"),
        ("report", ["run=../../x"], "error: run: '../../x' is not a name"),
        ("store", ["action=stat", "fingerprint=features/../x"], "error: fingerprint: 'features/../x' is not features/"),
        ("store", ["action=gc", "older_than_hours=nan"], "error: older_than_hours: nan is not a finite number"),
    ],
)
def test_a_command_refuses_it_with_2_and_writes_nothing(
    tmp_path: Path, stage: str, overrides: list[str], told: str
) -> None:
    ended = ray_jobs(stage, *overrides, home=tmp_path / "home")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stderr.startswith(told) and "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_bounds_are_of_numbers_and_choices_of_texts() -> None:
    for path, (types, limits) in SETTINGS.items():
        bounds = {limits.at_least, limits.above, limits.at_most, limits.below, limits.also} - {None}
        assert not bounds or types & {int, float}, path
        assert not limits.choices or str in types, path
