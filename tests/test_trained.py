"""What a served drafter is compared with, without an engine: its folder, what is in force, and its samples."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import compose
from safetensors.torch import load_file, save_file
from stores import fill

from eagle3_ray.capture import CaptureSpec
from eagle3_ray.config import ConfigError, DrafterConfig
from eagle3_ray.drafter.checkpoint import export
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.drafter.target import TargetPieces
from eagle3_ray.drafter.trained import Trained, folder_faults, folder_warnings, in_force_faults
from eagle3_ray.prepare import Prompt
from eagle3_ray.proof import choose, cut, sample_faults
from eagle3_ray.run import Run, exported
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.store.shards import Features, target_rows
from eagle3_ray.train.trainer import train_drafter
from eagle3_ray.verify import verification_key, verify, watching

TARGET = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_attention_heads": 2, "head_dim": 16}
TARGET |= {"num_key_value_heads": 1, "max_position_embeddings": 128, "rope_theta": 1e4, "rms_norm_eps": 1e-5}
PIECES = TargetPieces(torch.randn(64, 32), torch.randn(64, 32), torch.ones(32))


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    """Also exported, to tmp_path/export."""
    drafter = Drafter(drafter_config(DrafterConfig(), TARGET, 3, 16), torch.arange(0, 64, 4))
    export(tmp_path / "export", drafter, [1, 3, 5], "bfloat16")
    weights = {name: t.clone() for name, t in drafter.state_dict().items() if name != "embed_tokens.weight"}
    return Trained(json.loads(json.dumps(drafter.config.to_dict())), weights)


def edited(folder: Path, edit: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]) -> Path:
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    edit(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def test_an_export_has_no_fault(trained: Trained, tmp_path: Path) -> None:
    assert folder_faults(trained, tmp_path / "export", "bfloat16") == []


def halved(weights: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> None:
    """As a tool that knows float16 alone converts them; with `config` it says so there, too."""
    if config is not None:
        config["dtype"] = "float16"
    weights |= {name: t.half() for name, t in weights.items() if t.is_floating_point()}


FAULTS: list[tuple[Callable[[dict[str, Any], dict[str, torch.Tensor]], Any], str]] = [
    (lambda config, _: config.pop("eagle_config"), "config.json has no eagle_config with layer ids"),
    (lambda config, _: config.update(rms_norm_eps=1e-6), "rms_norm_eps is 1e-06, trained was 1e-05"),
    (lambda config, _: config.update(dtype="float16"), "dtype is float16, exported was bfloat16"),
    (lambda config, _: config.update(torch_dtype="float16"), "torch_dtype is float16, exported was bfloat16"),
    (
        lambda config, weights: halved(weights, config),
        "dtype is float16, exported was bfloat16; embed_tokens.weight (and",
    ),
    (lambda _, weights: halved(weights), "embed_tokens.weight (and 13 more) is stored in float16, exported was bfloat"),
    (lambda config, _: config.pop("norm_output"), "norm_output is None, trained was False"),
    (
        lambda config, _: config.update(rope_scaling={"rope_type": "linear", "factor": 4.0}),
        "rope_scaling is {'rope_type': 'linear', 'factor': 4.0}: the RoPE that SGLang reads is "
        "{'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 10000.0}, trained was {'rope_type': 'default', 'rope",
    ),
    (
        lambda config, _: (config.pop("rope_parameters"), config.update(rope_theta=5e5)),
        "rope_parameters is None, rope_theta is 500000.0: the RoPE that SGLang reads is {'rope_theta': 500000.0",
    ),
    (lambda config, _: config.update(rope_scaling={"rope_type": "linear"}), 'reads is unreadable ("Missing required'),
    (
        lambda config, _: config.update(original_max_position_embeddings=64),
        "original_max_position_embeddings is 64; the",
    ),
    (lambda config, _: config.update(use_aux_norm=True), "use_aux_norm is True; the export wrote no such key"),
    (lambda _, weights: weights.update(d2t=torch.arange(0, 64, 4)), "d2t holds the target's ids themselves"),
    (lambda _, weights: weights.update(d2t=torch.arange(16) + 3), "d2t holds other values than were trained"),
    (lambda _, weights: weights.update(t2d=torch.ones(128).bool()), "t2d is [128], trained was [64]"),
    (lambda _, weights: weights.pop("fc.weight"), "model.safetensors has no fc.weight"),
    (lambda _, weights: weights["norm.weight"].mul_(2), "norm.weight holds other values than were trained"),
]


@pytest.mark.parametrize(("edit", "words"), FAULTS)
def test_a_changed_folder_is_called_by_what_changed(
    edit: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any], words: str, trained: Trained, tmp_path: Path
) -> None:
    (fault,) = folder_faults(trained, edited(tmp_path / "export", edit), "bfloat16")
    assert words in fault


@pytest.mark.parametrize(
    "words",
    [
        {"rope_theta": 1e4},
        {"rope_parameters": None, "rope_theta": 10000},
        {"rope_scaling": {"type": "default", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": None},
    ],
)
def test_the_trained_rope_in_other_words_is_no_fault(words: dict[str, Any], trained: Trained, tmp_path: Path) -> None:
    assert folder_faults(trained, edited(tmp_path / "export", lambda config, _: config.update(words)), "bfloat16") == []


@pytest.mark.parametrize(("name", "damage"), [
    ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-100])),
    ("model.safetensors", lambda path: path.write_bytes(b"")),
    ("model.safetensors", lambda path: path.unlink()),
    ("config.json", lambda path: path.write_bytes(path.read_bytes()[:-10])),
    ("config.json", lambda path: path.write_bytes(b"\xff")),
    ("config.json", lambda path: path.unlink()),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_a_fault(
    name: str, damage: Callable[[Path], Any], trained: Trained, tmp_path: Path
) -> None:
    damage(tmp_path / "export" / name)
    (fault,) = folder_faults(trained, tmp_path / "export", "bfloat16")
    assert fault.startswith(f"{name} cannot be read: ")


def in_force(**changes: Any) -> dict[str, torch.Tensor]:
    """As a scheduler with a vocabulary padded to 80 rows tells it."""
    at = torch.tensor([0, 40, 79])
    embedding = torch.cat([PIECES.embedding, torch.zeros(16, 32)])
    tensors = {"draft_ids": torch.arange(0, 64, 4), "embedding": embedding[at].bfloat16(), "embedding.at": at}
    return tensors | changes


def test_what_is_in_force_is_compared_row_by_row(trained: Trained) -> None:
    head = {"head": trained.weights["lm_head.weight"][[0, 15]].bfloat16(), "head.at": torch.tensor([0, 15])}
    assert in_force_faults(in_force(**head), trained, PIECES, "bfloat16") == []
    (fault,) = in_force_faults(in_force(**(head | {"head": head["head"] + 1})), trained, PIECES, "bfloat16")
    assert "the drafter's head in force is not the one" in fault
    (fault,) = in_force_faults(in_force(embedding=torch.randn(3, 32)), trained, PIECES, "bfloat16")
    assert "the drafter's embedding in force is not the one" in fault
    (fault,) = in_force_faults(in_force(draft_ids=torch.arange(16)), trained, PIECES, "bfloat16")
    assert "first ids are [0, 1, 2, 3], trained were [0, 4, 8, 12]" in fault
    without = in_force()
    del without["draft_ids"]
    assert "SGLang uses none" in in_force_faults(without, trained, PIECES, "bfloat16")[0]


def test_the_whole_vocabulary_needs_no_map_in_force() -> None:
    drafter = Drafter(drafter_config(DrafterConfig(), TARGET, 3, 64), torch.arange(64))
    weights = {name: t for name, t in drafter.state_dict().items() if name != "embed_tokens.weight"}
    whole, without = Trained(drafter.config.to_dict(), weights), in_force()
    del without["draft_ids"]
    for tensors in (without, in_force(draft_ids=torch.arange(64))):
        assert in_force_faults(tensors, whole, PIECES, "bfloat16") == []
    weights["d2t"] = torch.arange(64).flip(0) - torch.arange(64)
    (fault,) = in_force_faults(without, whole, PIECES, "bfloat16")
    assert "SGLang uses none, trained were [63, 62, 61, 60]" in fault


@pytest.mark.parametrize("served", ["float16", "float32"])
def test_weights_that_another_dtype_serves_are_the_trained_ones(served: str, trained: Trained) -> None:
    cast = {name: getattr(torch, served) for name in ("embedding", "head")}
    head = trained.weights["lm_head.weight"][[0, 15]].bfloat16()
    tensors = in_force(head=head.to(cast["head"]), **{"head.at": torch.tensor([0, 15])})
    tensors["embedding"] = in_force()["embedding"].to(cast["embedding"])
    assert in_force_faults(tensors, trained, PIECES, "bfloat16") == []


def test_a_random_embedding_is_a_fault_where_it_is_served_and_a_warning_where_it_is_not(tmp_path: Path) -> None:
    for hidden, folder in ((None, tmp_path / "same"), (48, tmp_path / "own")):
        settings = DrafterConfig(hidden_size=hidden, head_dim=16)
        drafter = Drafter(drafter_config(settings, TARGET, 3, 16), torch.arange(0, 64, 4))
        if hidden is None:
            drafter.embed_tokens.weight.data.copy_(PIECES.embedding)
        export(folder, drafter, [1, 3, 5], "bfloat16")
        state = drafter.state_dict().items()
        weights = {name: t.clone() for name, t in state if drafter.own_embedding or name != "embed_tokens.weight"}
        kept = Trained(json.loads(json.dumps(drafter.config.to_dict())), weights)
        assert folder_faults(kept, folder, "bfloat16") == folder_warnings(folder, PIECES) == []
        edited(folder, lambda _, weights: weights["embed_tokens.weight"].normal_())
        faults = ["embed_tokens.weight holds other values than were trained"] if drafter.own_embedding else []
        assert folder_faults(kept, folder, "bfloat16") == faults
        warnings = folder_warnings(folder, PIECES)
        assert (len(warnings), "is not the target's" in str(warnings)) == ((0, False) if faults else (1, True))


def features(ids: list[int], mask: list[int]) -> Features:
    marked = torch.tensor(mask).bool()
    rows = target_rows(marked)
    return Features("a", torch.tensor(ids), marked, torch.zeros(len(ids), 6), torch.zeros(len(rows), 2), rows)


PROMPT = Prompt("a", "d", [[1, 7, 8], [2, 1, 9]])  # the second segment begins with the end token that an answer brings
SAMPLES = [
    ([1, 7, 8, 5, 2, 1, 9, 6, 2], [0, 0, 0, 1, 1, 0, 0, 1, 1], None),
    ([1, 7, 8, 5, 4, 2, 1, 9, 6], [0, 0, 0, 1, 1, 0, 0, 0, 1], None),  # an answer without an end token
    ([1, 7, 8, 5, 2], [0, 0, 0, 1, 1], None),  # there was no room for the second answer
    ([1, 7, 8, 5, 2, 1, 9], [0, 0, 0, 1, 1, 0, 0], "no answer: token 7 is its last, its answer begins at token 7"),
    ([1, 7, 8, 5, 2, 1], [0, 0, 0, 1, 1, 0], "no answer: token 6 is its last, its answer begins at token 7"),
    ([1, 7], [0, 0], "no answer: token 2 is its last, its answer begins at token 3"),
    ([1, 7, 8, 5, 2, 1, 9, 6, 2], [0, 0, 0, 1, 1, 0, 0, 1, 0], "it ends at token 8, the answer at token 9"),
    ([1, 7, 3, 5, 2], [0, 0, 0, 1, 1], "another chat template or tokenizer: token 2 is 3, not 8"),
    ([1, 7, 8, 5, 2, 1, 4, 6, 2], [0, 0, 0, 1, 1, 0, 0, 1, 1], "chat template or tokenizer: token 6 is 4, not 9"),
    ([1, 7, 8, 5, 2, 1, 9, 6, 2], [0, 0, 1, 1, 0, 0, 1, 1, 0], "the loss mask is shifted: it begins at token 2"),
    ([1, 7, 8, 5, 2, 1, 9, 6, 2], [1, 0, 0, 0, 1, 1, 0, 0, 1], "the loss mask is shifted: it begins at token 0"),
    ([1, 7, 8, 5, 2, 1, 9, 6, 2], [0, 0, 0, 1, 1, 0, 0, 0, 1], "it begins at token 8, the answer at token 7"),
]  # fmt: skip


@pytest.mark.parametrize(("ids", "mask", "fault"), SAMPLES)
def test_a_sample_must_be_its_prompt_and_the_answers(ids: list[int], mask: list[int], fault: str | None) -> None:
    corpus: Any = SimpleNamespace(units=["u"], read=lambda unit: [PROMPT])
    found = [f"{of['kind']}: {of['words']}" for of in sample_faults(corpus, [features(ids, mask)])]
    assert (found == []) if fault is None else (len(found) == 1 and fault in found[0]), found


def test_rows_that_are_not_the_masks_are_a_fault() -> None:
    corpus: Any = SimpleNamespace(units=["u"], read=lambda unit: [PROMPT])
    sample = features([1, 7, 8, 5, 6, 2], [0, 0, 0, 1, 1, 1])
    for rows in (sample.last_rows - 1, sample.last_rows[:1], sample.last_rows[:0]):
        (fault,) = sample_faults(corpus, [dataclasses.replace(sample, last_rows=rows)])
        assert fault["kind"] == "the training targets are shifted"
    other: Any = SimpleNamespace(units=["u"], read=lambda unit: [])
    assert sample_faults(other, [sample])[0]["words"] == "the corpus has no such prompt"


def test_samples_are_chosen_by_the_settings(tmp_path: Path) -> None:
    _, stored = fill(Filesystem(str(tmp_path / "store")), tmp_path, units=2, samples=3)

    def chosen(*overrides: str) -> list[Features]:
        run: Any = SimpleNamespace(config=compose(f"store.root={tmp_path / 'store'}", *overrides))
        return choose(run, stored)

    assert len(chosen("verify.samples=4")) == 4
    assert len(chosen("verify.samples=99")) == 6
    lengths = [len(sample.input_ids) for sample in chosen("verify.samples=99")]
    assert lengths == [4, 6, 8, 5, 7, 9]


def test_a_cut_sample_keeps_its_first_answer_and_targets_of_tokens_that_it_has() -> None:
    sample = features(list(range(100)), [0] * 40 + [1] * 60)  # target rows 40 to 98
    assert cut(sample, 100) is cut(sample, 200) is sample
    for tokens, length in ((99, 99), (73, 73), (72, 72), (50, 72), (3, 72)):  # 32 tokens of the answer at least
        short = cut(sample, tokens)
        assert len(short.input_ids) == len(short.loss_mask) == len(short.aux) == length
        assert short.last_rows.tolist() == list(range(40, length - 1)) == target_rows(short.loss_mask).tolist()
        assert len(short.last_hidden) == len(short.last_rows)


def test_another_ones_drafter_is_told_by_its_files(trained: Trained, tmp_path: Path) -> None:
    def opened(path: Path | None) -> Run:
        config = compose(f"store.root={tmp_path / 'store'}", f"drafter.path={path or 'null'}")
        return Run(config, Filesystem(str(tmp_path / "store")), TARGET, {}, CaptureSpec((1, 2, 3), 32, "float32"))

    features: Any = SimpleNamespace(folder="features/f")
    theirs = opened(tmp_path / "export")
    assert set(exported(theirs, "")["files"]) == {"config.json", "model.safetensors"}
    before = theirs.drafter(features)
    assert before != opened(None).drafter(features)
    edited(tmp_path / "export", lambda config, _: config.update(rms_norm_eps=1e-6))
    after = theirs.drafter(features)
    assert after != before
    edited(tmp_path / "export", lambda _, weights: weights["fc.weight"].neg_())  # of the same size
    assert theirs.drafter(features) not in (before, after)
    with pytest.raises(ConfigError, match="drafter.path: no drafter at"):
        opened(tmp_path / "none").drafter(features)
    with pytest.raises(ConfigError, match="can only be served"):
        train_drafter(theirs.config, SimpleNamespace(files=theirs.files), {}, "drafters/d")  # type: ignore[arg-type]


def test_a_kept_verdict_is_of_the_files_that_lie_there_now(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "store" / "d").mkdir(parents=True)
    folder = (tmp_path / "export").rename(tmp_path / "store" / "d" / "export")
    config = compose(f"store.root={tmp_path / 'store'}", "engine.version=0.5.23")
    run = Run(config, Filesystem(str(tmp_path / "store")), TARGET, {}, CaptureSpec((1, 2, 3), 32, "float32"))
    commits = [SimpleNamespace(unit="000000", sha256="a")]
    features: Any = SimpleNamespace(folder="features/f", commits=lambda: commits)
    run.files.write_json("d/export.json", {"dtype": "bfloat16"})

    def kept() -> bool:
        return watching(run, None, features, "d") is None  # type: ignore[arg-type]

    assert not kept()
    run.files.write_json(f"{verification_key(run, features, 'd')}/summary.json", {"verdict": "aligned"})
    assert kept() and verify(run, None, features, "d") == {"verdict": "aligned"}  # type: ignore[arg-type]
    (folder / "README.md").write_text("a card, after the evaluation")
    assert kept()
    weights, text = (folder / "model.safetensors").read_bytes(), (folder / "config.json").read_text()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert not kept()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(text)
    assert kept()
    (folder / "config.json").write_text(text.replace("10000.0", "20000.0"))
    assert not kept()
    (folder / "config.json").write_text(text)
    assert kept()
    commits[0].sha256 = "b"  # the features were taken anew
    assert not kept()
    run.files.write_json(
        f"{verification_key(run, features, 'd')}/summary.json", {"verdict": "misaligned", "failed": "died"}
    )
    assert not kept()
