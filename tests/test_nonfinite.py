"""Numbers that cannot be right: training makes no update with them, says where they come from, and stops or goes on."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from test_cli import command
from test_train import counting, one_thread, pieces, positions, sample, training  # noqa: F401

from eagle3_ray.drafter.loss import Metrics
from eagle3_ray.store.commits import Commit
from eagle3_ray.store.filesystem import StoreError
from eagle3_ray.store.precision import stored
from eagle3_ray.store.shards import Features, write_features
from eagle3_ray.train.loop import Training
from eagle3_ray.train.nonfinite import MOST, examine, sentence

COMMITS = [
    Commit(f"u{i}", f"features/f/shards/u{i}", "", 0, [{"id": f"s{3 * i + k}"} for k in range(3)], {})
    for i in range(10)
]
BAD = 14  # a sample of unit u4


def strict(text: str) -> Any:
    """JSON as the standard has it, which knows no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def numbers(trainer: Training) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.state().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def inf_in_aux(made: Features) -> None:
    made.aux[1, 5] = math.inf


def nan_in_aux(made: Features) -> None:
    made.aux[2, 0] = math.nan


def nan_in_a_target(made: Features) -> None:
    """Its likeliest token is then the first of all, which no vocabulary need hold: the loss is finite."""
    made.last_hidden[:, 3] = math.nan


def huge(made: Features) -> None:
    made.aux[1, 5] = 1e25  # a norm's square of it is not finite, and the row becomes zeros


def other_answer(number: int) -> Features:
    """States in the usual range that say another token than `counting` has."""
    made = counting(number)
    made.last_hidden = pieces().head[2 + (made.input_ids[made.last_rows + 1].long() + 9) % 28]  # [R, H]
    return made


FAULTS = [inf_in_aux, nan_in_aux, nan_in_a_target, huge]


def batches_of(trainer: Training, fault: Callable[[Features], None], steps: int, consumed: int = 0) -> Any:
    """Shares of the 30 samples, of which BAD has a fault."""
    for share in islice(positions(trainer.config, [30], 0, 1, consumed), steps):
        made = [sample(i) for _, i in share]
        for one in made:
            if one.id == f"s{BAD}":
                fault(one)
        yield made


def at_fault(trainer: Training, batches: Any) -> tuple[list[Features], Metrics, dict[str, float]]:
    """Steps up to the first with a fault."""
    for made in batches:
        metrics, facts = trainer.step(made)
        if trainer.fault:
            return made, metrics, facts
    raise AssertionError("no step had a fault")


def examined(trainer: Training, made: list[Features], metrics: Metrics, facts: dict[str, float]) -> dict[str, Any]:
    others = [sample(i) for i in range(6)]
    record = examine(trainer, made, others, COMMITS, metrics, facts)
    return strict(json.dumps(record, allow_nan=False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_batch_with_broken_features_makes_no_update_and_its_sample_is_named(
    fault: Callable[[Features], None], dtype: str
) -> None:
    trainer = training(dtype=dtype)
    before: dict[str, torch.Tensor] = {}
    for made in batches_of(trainer, fault, 10):
        before = numbers(trainer)
        metrics, facts = trainer.step(made)
        assert (trainer.fault is not None) == (f"s{BAD}" in {one.id for one in made})
        if trainer.fault:
            break
    after = numbers(trainer)
    assert after.pop("skipped_steps").tolist() == [*before.pop("skipped_steps").tolist(), trainer.taken]
    assert same(before, after) and trainer.finite()
    record = examined(trainer, made, metrics, facts)
    assert record["suspected"] == "features"
    assert f"sample s{BAD} of unit u4" in record["because"]
    assert {one["id"] for one in record["samples"]} == {one.id for one in made}
    assert (record["step"], record["settings"]["loss_spike"]) == (trainer.taken, 20.0)
    assert record["stops_because"] == "train.on_nonfinite is stop"
    for word in ("features", f"s{BAD}", f"step {trainer.taken}", "train.on_nonfinite=skip"):
        assert word in sentence(record)


def test_float32_states_that_bfloat16_cannot_hold_are_found_as_they_are_trained_on() -> None:
    def large(made: Features) -> None:
        made.aux[1, 5] = torch.finfo(torch.float32).max

    trainer = training(dtype="bfloat16")
    record = examined(trainer, *at_fault(trainer, batches_of(trainer, large, 10)))
    assert "holds 1 values of aux that are not finite" in record["because"]


def test_a_rate_that_is_far_too_high_ends_before_any_number_is_lost() -> None:
    trainer = training(lr=1e30, on_nonfinite="skip")
    record = examined(trainer, *at_fault(trainer, batches_of(trainer, lambda made: None, 20)))
    assert (record["suspected"], record["settings"]["lr"]) == ("lr", 1e30)
    assert "train.lr=1e+30" in sentence(record)
    assert "parameters finite again" in record["stops_because"]
    assert all(tensor.isfinite().all() for tensor in trainer.state().values()) and not trainer.finite()


def test_a_rate_that_is_somewhat_too_high_is_a_spike() -> None:
    trainer = training(lr=100.0)
    made, metrics, facts = at_fault(trainer, batches_of(trainer, lambda made: None, 20))
    assert "more than train.loss_spike=20 times the usual" in str(trainer.fault)
    record = examined(trainer, made, metrics, facts)
    assert record["suspected"] == "lr"


def test_ordinary_training_trips_nothing() -> None:
    trainer = training(lr=0.3)
    for made in batches_of(trainer, lambda made: None, 20):
        trainer.step(made)
    assert (trainer.skipped, len(trainer.losses)) == ([], 20)


def test_one_sample_whose_targets_are_unlike_all_others_is_named() -> None:
    trainer = training(lr=3e-2, loss_spike=1.5)
    for number in range(20):
        trainer.step([counting((4 * number + i) % 12) for i in range(4)])
    trainer.losses = deque(list(trainer.losses)[-4:])
    made = [counting(2), counting(5), other_answer(BAD), counting(6)]
    metrics, facts = trainer.step(made)
    assert "more than train.loss_spike=1.5 times" in str(trainer.fault)
    record = examined(trainer, made, metrics, facts)
    assert (record["suspected"], f"sample s{BAD} of unit u4" in record["because"]) == ("sample", True)


def test_skipping_ends_after_some_steps_in_a_row_and_where_parameters_are_lost() -> None:
    trainer = training(on_nonfinite="skip", steps=100)
    for number in range(MOST + 1):
        made = [sample(7 * number)]
        inf_in_aux(made[0])
        record = examined(trainer, made, *trainer.step(made))
        assert bool(record["stops_because"]) == (number + 1 >= MOST)
    assert f"{MOST + 1} steps in a row were skipped" in record["stops_because"]
    trainer.step([sample(2)])
    assert trainer.fault is None
    trainer.parameters["fc.weight"].data[0, 0] = math.nan
    made = [sample(4), sample(5)]
    record = examined(trainer, made, *trainer.step(made))
    assert "parameters" in record["stops_because"]
    assert record["because"] == "1 of 13 parameters, or their squares, are not finite: fc.weight"


@pytest.mark.parametrize("at", [1, 3, 8, 12])
def test_resume_behind_skipped_steps_is_bit_identical(tmp_path: Path, at: int) -> None:
    """The first step is skipped, another one, and all that are not well below a mean that the checkpoint must bring."""

    def steps(trainer: Training, first: int, last: int) -> None:
        for number, share in enumerate(islice(positions(trainer.config, [30], 0, 1, 0), last)):
            made = [sample(i) for _, i in share]
            if number in (0, 5):
                inf_in_aux(next(one for one in made if one.loss_mask.any()))
            if number >= first:
                trainer.step(made)

    whole, first, second, forgetful = (training(loss_spike=0.97) for _ in range(4))
    steps(whole, 0, 16)
    assert {1, 6} < set(whole.skipped) < set(range(1, 17))
    steps(first, 0, at)
    save_file(first.state(), tmp_path / "state.safetensors")
    second.restore(load_file(tmp_path / "state.safetensors"), taken=at)
    steps(second, at, 16)
    assert same(whole.state(), second.state())
    assert whole.losses == second.losses
    if first.losses:
        forgetful.restore({**first.state(), "recent_losses": torch.empty(0)}, taken=at)
        steps(forgetful, at, 16)
        assert forgetful.skipped != whole.skipped


def test_a_checkpoint_of_before_goes_on(tmp_path: Path) -> None:
    """It has no recent losses and no skipped steps."""
    first, second = training(), training()
    for made in batches_of(first, lambda made: None, 3):
        first.step(made)
    state = {name: tensor for name, tensor in first.state().items() if name not in ("recent_losses", "skipped_steps")}
    second.restore(state, taken=3)
    assert same(second.weights(), first.weights())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("name", ["aux", "last_hidden"])
def test_no_shard_is_written_of_states_that_are_not_finite(tmp_path: Path, name: str, dtype: str) -> None:
    """The last line of defence, behind the check of each captured sample."""
    for value in (math.inf, math.nan):
        made = sample(2)
        getattr(made, name)[1, 5] = value
        broken = replace(made, **stored(made.aux, made.last_hidden, dtype))
        with pytest.raises(StoreError, match=f"sample s2: its {name} is not finite"):
            write_features(tmp_path / "shard", [broken], "ff")
        assert not (tmp_path / "shard").exists()


def _worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    trainer = training(on_nonfinite="skip")
    for share in islice(positions(trainer.config, [30], rank, world, 0), 10):
        made = [sample(i) for _, i in share]
        for one in made:
            if one.id == f"s{BAD}":
                inf_in_aux(one)
        metrics, facts = trainer.step(made)
        if trainer.fault:
            record = examined(trainer, made, metrics, facts)
            Path(folder, f"{rank}-{trainer.taken}.json").write_text(json.dumps(record))
    save_file(trainer.weights(), f"{folder}/{rank}.safetensors")
    dist.destroy_process_group()


@pytest.mark.full
def test_two_workers_skip_alike_and_tell_of_all_samples(tmp_path: Path) -> None:
    mp.spawn(_worker, args=(2, str(tmp_path)), nprocs=2)
    one, other = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert same(one, other)
    alone = training(on_nonfinite="skip")
    for made in batches_of(alone, inf_in_aux, 10):
        alone.step(made)
    for name, tensor in alone.weights().items():
        torch.testing.assert_close(one[name], tensor, atol=1e-5, rtol=0, msg=name)
    (step,) = alone.skipped
    records = [json.loads((tmp_path / f"{rank}-{step}.json").read_text()) for rank in range(2)]
    assert records[0] == records[1]
    assert len(records[0]["samples"]) == 4
    assert {one["worker"] for one in records[0]["samples"]} == {0, 1}
    assert f"sample s{BAD} of unit u4" in records[0]["because"]


@pytest.mark.full
def test_the_command_ends_with_one_names_the_setting_and_leaves_only_strict_json(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "What is {n} and {n}?"}}\n' for n in range(12)))
    settings = [f"target.path={tiny_llama_folder}", f"prompts.source={tmp_path}/p.jsonl", "engine=transformers"]
    settings += ["sampling.max_new_tokens=12", "capture.boundaries=[2,4,6]", "prompts.unit_size=6"]
    settings += ["train.lr=1e30", "train.steps=20", "train.cpus_per_worker=1", "drafter.draft_vocab_size=4096"]
    assert (ended := command("extract", *settings, home=tmp_path / "home")).returncode == 0, ended.stderr
    ended = command("train", *settings, home=tmp_path / "home")
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1, said
    for words in ("Suspected: lr", "train.lr=1e+30", "train.on_nonfinite is stop", "NonFiniteError"):
        assert words in said
    ended = command("export", *settings, home=tmp_path / "home")
    assert ended.returncode == 2 and "no finished drafter" in ended.stderr
    written = [path for path in (tmp_path / "home").rglob("*.json") if "ray" not in path.parent.parts]
    assert any(path.parent.name == "nonfinite" for path in written)
    for path in written:
        strict(path.read_text())
