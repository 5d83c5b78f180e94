"""The demo's target, as a Hugging Face folder: what the config, the tokenizer and the weights must say."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from examples import smollm2


@pytest.fixture(scope="module")
def folder():
    return smollm2.make_smollm2()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_config_is_smollm2_135m(folder):
    config = AutoConfig.from_pretrained(folder)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (9, 3, 49152)
    assert (config.tie_word_embeddings, config.rope_parameters["rope_theta"]) == (True, 100_000.0)
    assert config.architectures == ["LlamaForCausalLM"] and config.dtype == torch.bfloat16
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 (not a dict)


def test_chat_ends_with_the_token_that_generation_stops_at(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"


def test_chat_template_renders(tokenizer):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    )


def test_special_tokens_are_single_ids_and_text_comes_back(tokenizer):
    text = "<|im_start|>user\n  Don't count  120\tapples: äöü 中文 🙂\n\n<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert (ids[0], ids[-2]) == (1, 2) and ids.count(1) == ids.count(2) == 1
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 49152


def test_digits_stand_alone_and_apart_from_the_spaces_before_them(tokenizer):
    assert tokenizer.tokenize("is  120") == ["is", "ĠĠ", "1", "2", "0"]


def test_rotary_rows_go_back_to_halves():
    heads, dim = 2, 8
    original = np.arange(heads * dim * 3).reshape(heads * dim, 3)
    # what llama.cpp's converter does to q and k: rows j and j + D/2 become neighbours
    stored = np.concatenate([original[h * dim :][[0, 4, 1, 5, 2, 6, 3, 7]] for h in range(heads)])
    assert np.array_equal(smollm2.split_rotary_halves(stored, heads), original)


def test_a_whole_folder_is_left_alone_and_another_is_never_overwritten(folder, tmp_path):
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2.make_smollm2(folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "model.safetensors").write_bytes(b"half of it")
    with pytest.raises(FileExistsError, match="delete it or name another folder"):
        smollm2.make_smollm2(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_unexpected_weights_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "write_checkpoint", lambda gguf, made: (made / "model.safetensors").write_bytes(b"x"))
    with pytest.raises(ValueError, match="came out with sha256"):
        smollm2.make_smollm2(tmp_path / "target")
    assert not list(tmp_path.iterdir())
