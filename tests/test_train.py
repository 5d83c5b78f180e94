"""Training: its order, its resume, its independence of the number of workers, and the stage on a real Ray."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save, save_file
from stores import listed

from eagle3_ray.config import (
    CaptureConfig,
    ClusterConfig,
    Config,
    ConfigError,
    DrafterConfig,
    EngineConfig,
    EvaluateConfig,
    ExportConfig,
    FeaturesConfig,
    HardwareConfig,
    PromptsConfig,
    SamplingConfig,
    StoreConfig,
    TargetConfig,
    TrainConfig,
    VerifyConfig,
)
from eagle3_ray.drafter.checkpoint import export, load
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.drafter.target import TargetPieces, initialise
from eagle3_ray.drafter.vocabulary import count_tokens, draft_vocabulary
from eagle3_ray.report import training_curves
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Damaged, Filesystem
from eagle3_ray.store.shards import Features, Response, target_rows, write_features, write_responses
from eagle3_ray.strict_json import fingerprint
from eagle3_ray.train.features import WINDOW, batches, epoch_order, heldout, positions, stream
from eagle3_ray.train.loop import Training
from eagle3_ray.train.nonfinite import NonFiniteError
from eagle3_ray.train.trainer import UNTRAINED, export_drafter, train_drafter

H, V = 16, 50
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "intermediate_size": 32,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
SHAPES = [
    DrafterConfig(num_hidden_layers=2, norm_before_fc=True, fc_norm=True, norm_output=True),
    DrafterConfig(hidden_size=24),
    DrafterConfig(attention="mla"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are tiny: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def settings(**changes: Any) -> TrainConfig:
    small: dict[str, Any] = {"steps": 20, "batch_size": 4, "max_length": 64, "heldout": 0, "ttt_steps": 3, "lr": 1e-2}
    return TrainConfig(
        **small | {"dtype": "float32", "use_gpu": False, "checkpoint_every": 5, "max_failures": 1} | changes
    )


def pieces() -> TargetPieces:
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(V, H, generator=generator)
    return TargetPieces(table, table, torch.ones(H))


def sample(number: int) -> Features:
    """A prompt and an answer of random lengths; the last hidden state points at the next token's row of the head."""
    generator = torch.Generator().manual_seed(number)
    length = int(torch.randint(8, 24, (1,), generator=generator))
    ids = torch.randint(2, 30, (length,), generator=generator, dtype=torch.int32)
    mask = torch.arange(length) >= length // 3
    if number % 7 == 3:
        mask[:] = False  # nothing to train on
    rows = target_rows(mask)
    head = pieces().head
    last_hidden = head[ids[rows + 1].long()] + 0.1 * torch.randn(len(rows), H, generator=generator)
    aux = torch.randn(length, 3 * H, generator=generator)
    aux[:, -H:] = head[ids.long()]
    return Features(f"s{number}", ids, mask, aux, last_hidden, rows)


def counting(number: int) -> Features:
    """A sample whose every token is the one before plus one: what comes next can be learnt."""
    made = sample(number)
    made.input_ids = 2 + (number + torch.arange(len(made.input_ids), dtype=torch.int32)) % 28  # [T]
    made.last_hidden = pieces().head[made.input_ids[made.last_rows + 1].long()]  # [R, H]
    made.aux[:, -H:] = pieces().head[made.input_ids.long()]  # [T, 3H]
    return made


def training(shape: DrafterConfig | None = None, **changes: Any) -> Training:
    config = drafter_config(shape or DrafterConfig(), TARGET, num_aux=3, draft_vocab_size=32)
    drafter = Drafter(config, torch.arange(32))
    initialise(drafter, pieces(), seed=0)
    return Training(settings(**changes), drafter, pieces().head, torch.device("cpu"))


# ---------------------------------------------------------------- order


def test_epoch_has_each_sample_once_and_depends_on_seed_and_epoch():
    sizes = [3, 1, 4, 2] * 5
    every = [(shard, i) for shard, size in enumerate(sizes) for i in range(size)]
    order = epoch_order(0, 0, sizes)
    assert sorted(order) == every
    assert order == epoch_order(0, 0, sizes)
    assert order != epoch_order(0, 1, sizes) != epoch_order(1, 1, sizes)
    first = {shard for shard, _ in order[: sum(sorted(sizes)[:WINDOW])]}
    assert len(first) <= WINDOW  # reads stay within a window of shards


def test_held_out_samples_are_never_trained_on_and_all_others_are():
    sizes = [3, 1, 4, 2] * 5
    held = heldout(0, sizes, 7)
    assert len(set(held)) == 7
    assert held == heldout(0, sizes, 7) != heldout(1, sizes, 7)
    every = {(shard, i) for shard, size in enumerate(sizes) for i in range(size)}
    assert sorted(epoch_order(0, 2, sizes, held)) == sorted(every - set(held))
    batches = list(islice(positions(settings(), sizes, 0, 1, 0, held), 2 * 43))  # 43 samples are left, 4 a batch
    seen = [pair for batch in batches for pair in batch]
    assert sorted(seen[:43]) == sorted(every - set(held))
    assert sorted(seen) == sorted([*(every - set(held))] * 8)
    assert len(heldout(0, sizes, 50)) == 12  # a quarter, at most


@pytest.mark.parametrize("consumed", [0, 4, 36])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_any_number_of_workers_sees_the_same_batches(world: int, consumed: int):
    config, sizes = settings(), [3, 1, 4, 2]
    endless = [pair for epoch in range(8) for pair in epoch_order(config.seed, epoch, sizes)]
    shares = [islice(positions(config, sizes, rank, world, consumed), 10) for rank in range(world)]
    for number, batch in enumerate(zip(*shares, strict=True)):
        start = consumed + 4 * number
        for rank, share in enumerate(batch):
            assert share == endless[start : start + 4][rank::world]


def test_stream_reads_the_store_in_that_order(tmp_path: Path):
    features = store(tmp_path, samples=30, unit=2)
    commits = features.commits()
    config = settings()
    names = [[f"s{2 * shard + i}" for shard, i in share] for share in islice(positions(config, [2] * 15, 0, 1, 8), 12)]
    read = islice(stream(config, features, commits, Cache(tmp_path / "cache"), 0, 1, consumed=8), 12)
    assert [[s.id for s in share] for share in read] == names


def test_an_error_of_the_reader_thread_is_raised(tmp_path: Path):
    features = store(tmp_path, samples=4, unit=2)
    commits = features.commits()
    Path(features.files.url(commits[1].shard)).unlink()
    with pytest.raises(Exception, match="missing"):
        list(islice(stream(settings(), features, commits, Cache(tmp_path / "cache"), 0, 1, 0), 5))


def test_micro_batches_hold_at_most_max_length_tokens_and_no_tail():
    tail = sample(1)
    tail.loss_mask[-3:] = False
    length = len(tail.input_ids)
    made = batches([sample(0), sample(2), tail, sample(3)], max_length=40, dtype=torch.float32)
    assert [name for batch in made for name in batch.ids] == ["s0", "s2", "s1"]  # s3 has no response
    assert all(len(batch.input_ids) <= 40 for batch in made)
    assert made[-1].lengths[-1] == length - 3


# ---------------------------------------------------------------- steps


def run(trainer: Training, steps: int, consumed: int = 0) -> list[list[float]]:
    losses = []
    for share in islice(positions(trainer.config, [30], 0, 1, consumed), steps):
        metrics, _ = trainer.step([sample(i) for _, i in share])
        losses.append(metrics.means()["loss"])
    return losses


def test_training_learns():
    losses = run(training(), 20)
    assert sum(losses[-1]) < 0.7 * sum(losses[0])


@pytest.mark.parametrize("shape", SHAPES, ids=["two layers, norms", "own width", "mla"])
def test_every_shape_learns_and_is_exported(shape: DrafterConfig, tmp_path: Path):
    trainer = training(shape)
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    losses = run(trainer, 20)
    assert sum(losses[-1]) < 0.95 * sum(losses[0])  # the one of its own width starts from nothing
    weights = trainer.weights()
    assert ("embed_tokens.weight" in weights) == (shape.hidden_size is not None)
    changed = {name for name in weights if not torch.equal(weights[name], before[name])}
    assert changed == weights.keys() - {"d2t", "t2d"}
    config, features = stage(tmp_path)
    features.files.write("d/weights/model.safetensors", save(weights))
    features.files.write("d/weights/config.json", json.dumps(trainer.drafter.config.to_dict()).encode())
    export_drafter(config, features.files, "d", [1, 3, 5], tmp_path / "out", "float32")
    exported = load(tmp_path / "out").state_dict()
    for name, tensor in ({"embed_tokens.weight": pieces().embedding} | weights).items():
        assert torch.equal(exported[name], tensor), name


def test_micro_batches_change_nothing():
    whole, cut = training(), training(max_length=24)  # every sample is shorter than 24
    a, b = run(whole, 4), run(cut, 4)
    torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-5, rtol=1e-5)


def test_a_batch_without_a_valid_slot_changes_no_weight():
    trainer = training()
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    metrics, _ = trainer.step([sample(3), sample(10)])
    assert metrics.slots.sum() == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.weights().items())


def test_resume_is_bit_identical(tmp_path: Path):
    whole, first, second = training(), training(), training()
    run(whole, 20)
    run(first, 10)
    save_file(first.state(), tmp_path / "state.safetensors")
    second.restore(load_file(tmp_path / "state.safetensors"), taken=10)
    run(second, 10, consumed=40)
    for name, tensor in whole.state().items():
        assert torch.equal(tensor, second.state()[name]), name


@pytest.mark.parametrize(
    "change",
    [{"lr": 2e-2}, {"warmup_share": 0.5}, {"min_lr_share": 1.0}, {"weight_decay": 0.1}, {"max_grad_norm": 0.01}]
    + [{"ttt_steps": 2}, {"steps": 8}, {"batch_size": 3}, {"max_length": 12}, {"seed": 1}, {"dtype": "bfloat16"}]
    + [{"loss": "lk_alpha"}, {"loss": "lk_lambda"}, {"step_decay": 0.8}],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_changes_the_weights(change: dict[str, Any]):
    plain, changed = training(), training(**change)
    run(plain, 6)
    run(changed, 6)
    assert not torch.equal(plain.weights()["lm_head.weight"], changed.weights()["lm_head.weight"])


def test_accept_length_of_an_untrained_and_a_trained_drafter():
    samples = [sample(i) for i in range(30)]
    trainer = training(steps=60)
    before = trainer.accept_length(samples, num_steps=3)
    run(trainer, 60)
    after = trainer.accept_length(samples, num_steps=3)
    assert after["completion_tokens"] == before["completion_tokens"] == sum(int(s.loss_mask.sum()) for s in samples)
    assert 1 <= before["accept_length"] < after["accept_length"] <= 4


def test_a_trained_drafter_used_wrongly_is_told_from_one_used_rightly():
    """On other boundaries, or with its vocabulary mapped otherwise: by the limit below which a start is refused."""
    trainer, samples = training(steps=120), [counting(number) for number in range(48)]
    for share in islice(positions(trainer.config, [24], 0, 1, 0), 120):
        trainer.step([samples[i] for _, i in share])

    def ratio(drafter: Drafter) -> float:
        alone = Training(trainer.config, drafter, pieces().head, torch.device("cpu"))
        walked = alone.accept_length(samples[24:], num_steps=3)
        return walked["accept_length"] / walked["never_right"]

    assert ratio(trainer.drafter) > 2
    shifted = copy.deepcopy(trainer.drafter)
    shifted.d2t += 1
    assert ratio(shifted) < UNTRAINED
    swapped = copy.deepcopy(trainer.drafter)
    swapped.fc.weight.data = swapped.fc.weight.roll(H, dims=1)
    assert ratio(swapped) < UNTRAINED


def _worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    trainer = training(loss="lk_lambda", step_decay=0.7)
    for share in islice(positions(trainer.config, [30], rank, world, 0), 8):
        metrics, _ = trainer.step([sample(i) for _, i in share])
    save_file({**trainer.weights(), "metrics": metrics.stacked()}, f"{folder}/{rank}.safetensors")
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, pytest.param(5, marks=pytest.mark.full)])  # of 5, one has an empty share
def test_workers_train_what_one_worker_does(tmp_path: Path, world: int):
    mp.spawn(_worker, args=(world, str(tmp_path)), nprocs=world)
    alone = training(loss="lk_lambda", step_decay=0.7)
    for share in islice(positions(alone.config, [30], 0, 1, 0), 8):
        metrics, _ = alone.step([sample(i) for _, i in share])
    for rank in range(world):
        weights = load_file(tmp_path / f"{rank}.safetensors")
        torch.testing.assert_close(weights.pop("metrics"), metrics.stacked(), atol=1e-5, rtol=1e-5)
        for name, tensor in alone.weights().items():
            torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=0, msg=name)


DESCRIPTION = {"responses": "rr", "boundaries": [2, 4, 6]}
DESCRIPTION |= {"engine": "sglang", "engine_version": "0.5.23", "engine_dtype": "float32"}
FEATURES = fingerprint(DESCRIPTION)


def store(root: Path, samples: int, unit: int, make: Callable[[int], Features] = sample) -> Units:
    """A store of features, and of the responses they belong to, in two domains."""
    files = Filesystem(str(root / "store"))
    features, responses = Units(files, "features", FEATURES), Units(files, "responses", "rr")
    for first in range(0, samples, unit):
        group = [make(number) for number in range(first, first + unit)]
        path = root / "shard"
        write_features(path, group, FEATURES)
        features.commit(f"u{first:04}", path, listed(group))
        answers = [response(s) for s in group]
        write_responses(path, answers, "rr")
        responses.commit(f"u{first:04}", path, listed(answers))
    return features


def response(s: Features) -> Response:
    return Response(s.id, s.input_ids, s.loss_mask, ["stop"], "odd" if int(s.id[1:]) % 2 else "even")


# ---------------------------------------------------------------- the stage, on a real Ray


@pytest.fixture(scope="module")
def ray_up() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=True)  # Ray Train asks it whether its controller lives
    yield
    ray.shutdown()


def stage(root: Path, make: Callable[[int], Features] = sample, **changes: Any) -> tuple[Config, Units]:
    """A target's folder, a store, and the configuration of a drafter's training."""
    target = root / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET))
    made = pieces()
    save_file(
        {"model.embed_tokens.weight": made.embedding, "model.norm.weight": made.norm}, target / "model.safetensors"
    )
    config = Config(
        run="r",
        target=TargetConfig("tiny", str(target)),
        prompts=PromptsConfig(source="none"),
        sampling=SamplingConfig(),
        capture=CaptureConfig(),
        engine=EngineConfig(),
        hardware=HardwareConfig(),
        store=StoreConfig(root=str(root / "store")),
        drafter=DrafterConfig(draft_vocab_size=32),
        train=settings(**changes),
        export=ExportConfig(),
        evaluate=EvaluateConfig(source="none"),
        verify=VerifyConfig(),
        features=FeaturesConfig(),
        cluster=ClusterConfig(),
    )
    return config, store(root, samples=30, unit=3, make=make)


@pytest.mark.parametrize("part", ["input_ids", "aux", "last_hidden"])
def test_samples_of_another_target_are_refused_in_words(part: str) -> None:
    config = settings()
    drafter = Drafter(drafter_config(DrafterConfig(), TARGET, num_aux=3, draft_vocab_size=32), torch.arange(32))
    training = Training(config, drafter, pieces().head, torch.device("cpu"))
    one = sample(0)
    setattr(one, part, one.input_ids + V if part == "input_ids" else getattr(one, part)[:, 1:])
    for use in (lambda: training.step([one]), lambda: training.accept_length([one], 3)):
        with pytest.raises(Damaged, match="sample s0 has .*; the target has states of 48 and 16 and 50 tokens"):
            use()


def kill_worker_after(path: Path, killed: list[int]) -> None:
    """SIGKILL one training worker of this process's own Ray as soon as `path` exists; no other Ray's is looked at."""
    while not path.exists():
        time.sleep(0.05)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "RayTrainWorker" in "".join(process.cmdline()):
                process.kill()
                killed.append(process.pid)
                return


@pytest.mark.full
def test_a_worker_killed_among_two_changes_nothing(tmp_path: Path, ray_up: None):
    config, features = stage(tmp_path, steps=60, checkpoint_every=15, num_workers=2)
    killed: list[int] = []
    state = Path(features.files.url("drafters/d/state"))
    thread = threading.Thread(target=kill_worker_after, args=(state / "00000030.safetensors", killed), daemon=True)
    thread.start()
    summary = train_drafter(config, features, DESCRIPTION, "drafters/d")
    assert len(killed) == 1
    assert (summary["steps"], summary["consumed"], summary["units"], summary["samples"]) == (60, 240, 10, 30)
    assert summary["draft_vocab_size"] == 32
    assert 0.9 < summary["coverage"] <= 1
    assert sorted(path.name for path in state.iterdir()) == ["00000045.safetensors", "00000060.safetensors"]
    assert list(state.parent.glob("tensorboard/events*"))

    counts = count_tokens((sample(i) for i in range(30)), V)  # type: ignore[misc]
    ids = draft_vocabulary(counts, 32, always=[1])
    drafter = Drafter(drafter_config(config.drafter, TARGET, num_aux=3, draft_vocab_size=32), ids)
    initialise(drafter, pieces(), seed=0)
    alone = Training(config.train, drafter, pieces().head, torch.device("cpu"))
    for share in islice(positions(config.train, [3] * 10, 0, 1, 0), 60):
        alone.step([sample(3 * shard + i) for shard, i in share])
    train_drafter(config, features, DESCRIPTION, "drafters/undisturbed")
    weights, undisturbed = (
        load_file(features.files.url(f"drafters/{name}/weights/model.safetensors")) for name in ("d", "undisturbed")
    )
    for name, tensor in alone.weights().items():
        assert torch.equal(weights[name], undisturbed[name]), name
        # sums of another order, which AdamW scales up where gradients are small: 1.05e-4 was seen, at a rate of 1e-2
        torch.testing.assert_close(weights[name], tensor, atol=5e-4, rtol=0, msg=name)

    assert train_drafter(config, features, DESCRIPTION, "drafters/d") == summary  # finished: not trained again
    export_drafter(config, features.files, "drafters/d", [1, 3, 5], tmp_path / "out", "float32")
    assert torch.equal(load(tmp_path / "out").lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(load(tmp_path / "out").embed_tokens.weight, pieces().embedding)

    features.files.delete("drafters/d/summary.json")
    config.train.lr = 0.5
    with pytest.raises(ConfigError, match="train.lr: 0.5"):
        train_drafter(config, features, DESCRIPTION, "drafters/d")


@pytest.mark.full  # the pipeline of `make test` trains none, either
def test_no_steps_export_the_initial_drafter(tmp_path: Path, ray_up: None):
    """Of a vocabulary by probability, which is counted in a Ray task too."""
    config, features = stage(tmp_path, steps=0, heldout=4)
    config.drafter.vocabulary, config.drafter.draft_vocab_size = "probability", 12
    summary = train_drafter(config, features, DESCRIPTION, "drafters/zero")
    assert (summary["steps"], summary["consumed"]) == (0, 0)
    assert summary["heldout"]["samples"] == 4
    assert summary["heldout"]["before"] == summary["heldout"]["after"]
    rows = torch.cat([sample(number).last_hidden for number in range(30)])  # [R, H]
    assert json.loads(features.files.read("drafters/zero/start.json"))["counted_rows"] == len(rows)
    export_drafter(config, features.files, "drafters/zero", [1, 3, 5], tmp_path / "out", "bfloat16")
    drafter = load(tmp_path / "out")
    assert torch.equal(drafter.fc.weight[:, -H:], torch.eye(H))
    assert drafter.lm_head.weight.shape == (12, H)
    likely = (rows @ pieces().head.T).softmax(-1).sum(0)  # [V]
    likely[1] = 1e9  # it ends an answer
    assert set(drafter.draft_ids.tolist()) == set(likely.topk(12).indices.tolist())


def published(root: Path, config: Config, drafter: Drafter) -> None:
    """Export the drafter below `root`, and have the configuration start from it."""
    export(root, drafter, [1, 3, 5], "float32")
    config.drafter.start_from, config.drafter.vocabulary = str(root), "start"


def test_a_start_that_does_not_fit_stops_before_the_first_step(tmp_path: Path, ray_up: None):
    config, features = stage(tmp_path, make=counting, steps=20, heldout=6)
    drafter = training().drafter
    initialise(drafter, pieces(), seed=5, settings=DrafterConfig(initial_fc="random", initial_lm_head="random"))
    published(tmp_path / "random", config, drafter)
    for _ in range(2):  # so does the second try
        with pytest.raises(
            ConfigError, match=r"drafter.start_from: '.*/random' has a walked accept length of 1\.\d+ on 6"
        ):
            train_drafter(config, features, DESCRIPTION, "drafters/d")
    assert not features.files.list("drafters/d/state")
    assert not features.files.exists("drafters/d/summary.json")


def broken_at_14(number: int) -> Features:
    made = sample(number)
    if number == 14:
        made.aux[1, 5] = torch.inf
    return made


def test_a_rate_far_too_high_is_an_error_that_names_it_and_no_drafter(tmp_path: Path, ray_up: None):
    config, features = stage(tmp_path, lr=1e30, heldout=4, checkpoint_every=1)
    with pytest.raises(NonFiniteError, match="parameters.*not finite.*Suspected: lr, since .*train.lr=1e"):
        train_drafter(config, features, DESCRIPTION, "drafters/d")
    folder = Path(features.files.url("drafters/d"))
    assert [path.stem for path in (folder / "nonfinite").iterdir()] == ["00000001"]
    assert not any((folder / name).exists() for name in ("state", "weights", "summary.json"))


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_training_stops_at_broken_features_and_goes_on_when_told_to_skip(
    tmp_path: Path, ray_up: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], workers: int
):
    with monkeypatch.context() as older:  # a store of before states were checked
        older.setattr("eagle3_ray.store.shards.finite", lambda states: True)
        config, features = stage(tmp_path, make=broken_at_14, steps=10, checkpoint_every=2, num_workers=workers)
    order = [3 * shard + i for share in islice(positions(config.train, [3] * 10, 0, 1, 0), 7) for shard, i in share]
    bad = order.index(14) // 4 + 1  # the step that has it, counted from 1
    files, folder = features.files, Path(features.files.url("drafters/d"))
    for _ in range(2):  # so does the second try
        with pytest.raises(NonFiniteError) as stopped:
            train_drafter(config, features, DESCRIPTION, "drafters/d")
    said = str(stopped.value)
    assert f"step {bad}: the features are not finite" in said
    assert "Suspected: features, since sample s14 of unit u0012 holds 1 values of aux that are not finite" in said
    assert "train.on_nonfinite is stop" in said and "train.on_nonfinite=skip" in said
    (kept,) = (folder / "nonfinite").iterdir()
    record = json.loads(kept.read_text())
    assert kept.stem == f"{bad:08d}" and kept.as_posix() in said
    assert sorted(int(one["id"][1:]) for one in record["samples"]) == sorted(order[4 * bad - 4 : 4 * bad])
    assert (record["settings"]["lr"], record["parameters"]["not_finite"], record["moments"]["not_finite"]) == (
        1e-2,
        [],
        [],
    )
    saved = {int(path.stem): path for path in (folder / "state").iterdir()}
    assert max(saved) == (bad - 1) // 2 * 2
    assert all(tensor.isfinite().all() for tensor in load_file(saved[max(saved)]).values())
    assert not files.exists("drafters/d/summary.json") and not (folder / "weights").exists()

    config.train.on_nonfinite = "skip"
    summary = train_drafter(config, features, DESCRIPTION, "drafters/d")
    assert (summary["steps"], summary["skipped"], summary["consumed"]) == (10, [bad], 40)
    assert f"train: skipped step {bad}: the features are not finite" in capfd.readouterr().out
    assert all(math.isfinite(loss) for loss in summary["loss"])
    ids = draft_vocabulary(count_tokens((sample(i) for i in range(30)), V), 32, always=[1])  # type: ignore[misc]
    drafter = Drafter(drafter_config(config.drafter, TARGET, num_aux=3, draft_vocab_size=32), ids)
    initialise(drafter, pieces(), seed=0)
    alone = Training(config.train, drafter, pieces().head, torch.device("cpu"))
    for share in islice(positions(config.train, [3] * 10, 0, 1, 0), 10):
        alone.step([broken_at_14(3 * shard + i) for shard, i in share])
    assert alone.skipped == [bad]
    weights = load_file(folder / "weights" / "model.safetensors")
    for name, tensor in alone.weights().items():
        # of one worker bit for bit, though it was interrupted
        torch.testing.assert_close(weights[name], tensor, atol=5e-4 * (workers - 1), rtol=0, msg=name)


@pytest.mark.full
def test_training_goes_on_from_a_published_drafter(tmp_path: Path, ray_up: None):
    config, features = stage(tmp_path, make=counting, steps=120, heldout=6, num_workers=2, checkpoint_every=50)
    first = train_drafter(config, features, DESCRIPTION, "drafters/first")["heldout"]
    assert first["before"]["accept_length"] < UNTRAINED * first["before"]["never_right"]
    assert first["after"]["accept_length"] > UNTRAINED * first["after"]["never_right"]
    export_drafter(config, features.files, "drafters/first", [1, 3, 5], tmp_path / "first", "float32")
    curve = training_curves(SimpleNamespace(files=features.files), "drafters/first")["heldout/accept_length"]  # type: ignore[arg-type]
    assert [step for step, _ in curve] == [0, 50, 100, 120]
    assert [curve[0][1], curve[-1][1]] == pytest.approx([first[at]["accept_length"] for at in ("before", "after")])
    assert curve[0][1] < curve[1][1]
    config.drafter.start_from, config.drafter.vocabulary = str(tmp_path / "first"), "start"
    second = train_drafter(config, features, DESCRIPTION, "drafters/second")["heldout"]
    assert second["before"] == first["after"]  # the same samples are held out
    before, after = (features.files.url(f"drafters/{name}/weights/model.safetensors") for name in ("first", "second"))
    assert not torch.equal(load_file(before)["lm_head.weight"], load_file(after)["lm_head.weight"])
