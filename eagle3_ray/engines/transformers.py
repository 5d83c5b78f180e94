"""The same contract with plain Transformers: the reference, and the engine where sglang has no wheel."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from eagle3_ray.capture import CaptureSpec, engine_version, target_config, text_config
from eagle3_ray.config import Config, SamplingConfig
from eagle3_ray.engines.base import Captured, EngineError, RequestError, Response, TargetEngine


class TransformersEngine(TargetEngine):
    """A `transformers` causal LM in this process, one sequence at a time. Slow, and plain to read."""

    def __init__(self, config: Config, folder: Path, spec: CaptureSpec | None) -> None:
        import transformers

        if transformers.__version__ != engine_version(config):
            raise EngineError(
                f"engine.version is {engine_version(config)}, this node has transformers {transformers.__version__}"
            )
        self.spec = spec
        self.context_length = text_config(target_config(folder))["max_position_embeddings"]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, config.engine.dtype), trust_remote_code=config.target.trust_remote_code
        ).eval()
        self.model.to(config.hardware.device)
        self.info = {
            "engine": f"{type(self).__module__}.{type(self).__qualname__}",
            "version": transformers.__version__,
            "scheduler_pids": [],
            "layer_ids": None,
            "hooked": {},
        }
        self._lock = threading.Lock()
        ends = self.model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]
        torch.manual_seed(config.sampling.seed)

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingConfig) -> list[Response]:
        return [self._generate(prompt, sampling) for prompt in prompts]

    def _generate(self, prompt: list[int], sampling: SamplingConfig) -> Response:
        if not prompt or len(prompt) + sampling.max_new_tokens > self.context_length:
            raise RequestError(f"a prompt of {len(prompt)} tokens does not fit the context of {self.context_length}")
        options: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            top_k = sampling.top_k if sampling.top_k > 0 else 0
            options = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": top_k}
        # Nothing else of the target's generation_config: its penalties are not applied by SGLang either
        generation = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens, eos_token_id=self.ends, pad_token_id=self.ends[0], **options
        )
        with self._lock, torch.inference_mode():
            ids = torch.tensor([prompt], device=self.model.device)  # [1, T]
            output = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
        answer = output[0, len(prompt) :].tolist()
        return Response(answer, "stop" if answer and answer[-1] in self.ends else "length")

    def capture(self, sequences: Sequence[list[int]]) -> list[Captured]:
        return [self._capture(ids) for ids in sequences]

    def _capture(self, ids: list[int]) -> Captured:
        assert self.spec is not None
        if not ids:
            raise RequestError("an empty sequence has no states")
        with self._lock, torch.inference_mode():
            # The base model's last entry is after the final norm; the entries before it are boundaries 0 to n-1
            states = self.model.base_model(
                torch.tensor([ids], device=self.model.device), output_hidden_states=True, use_cache=False
            ).hidden_states  # n+1 of [1, T, H]
        aux = torch.cat([states[boundary][0] for boundary in self.spec.boundaries], dim=-1)  # [T, A*H]
        return Captured(aux=aux.cpu(), last_hidden=states[-1][0].cpu())  # [T, A*H], [T, H]

    def next_tokens(self, ids: list[int]) -> list[tuple[float, int]]:
        with self._lock, torch.inference_mode():
            logits = self.model(torch.tensor([ids], device=self.model.device)).logits[0]  # [T, V]
        best = logits.float().log_softmax(dim=-1).max(dim=-1)  # of [T]
        return list(zip(best.values.tolist(), best.indices.tolist(), strict=True))

    def close(self) -> None:
        del self.model
