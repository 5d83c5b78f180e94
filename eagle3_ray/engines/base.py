"""What every engine offers: generate and capture, on one loaded target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from eagle3_ray.config import SamplingConfig
from eagle3_ray.conversations import join


class EngineError(RuntimeError):
    """The engine failed. The message holds the end of its log."""


class RequestError(ValueError):
    """The engine refused one request (over-long, empty); the others are not touched."""


@dataclass(frozen=True)
class Response:
    """One answer: ids as the engine generated them, the end-of-sequence token included where it made one."""

    token_ids: list[int]
    finish_reason: str  # stop | length
    speculation: dict[str, Any] = field(default_factory=dict)  # of a speculating engine: its own counts


@dataclass(frozen=True)
class Captured:
    """The states of one sequence of T tokens, a row a token."""

    aux: torch.Tensor  # [T, A*H]
    last_hidden: torch.Tensor  # [T, H], after the target's final norm


class TargetEngine(ABC):
    """One loaded target. Its calls are thread-safe, and calls from many threads share the engine's batch."""

    info: dict[str, Any]  # class, version, scheduler pids, layer ids, what the plugin answered

    @abstractmethod
    def generate(self, prompts: Sequence[list[int]], sampling: SamplingConfig) -> list[Response]:
        """Answer each prompt (token ids)."""

    @abstractmethod
    def capture(self, sequences: Sequence[list[int]]) -> list[Captured]:
        """The states of each sequence: one row a token, or RequestError; never a short record."""

    @abstractmethod
    def next_tokens(self, ids: list[int]) -> list[tuple[float, int]]:
        """After each token of `ids`: the target's likeliest next one, log-probability first."""

    @abstractmethod
    def close(self) -> None:
        """Free the engine's processes and memory."""


@dataclass(frozen=True)
class Answered:
    """A whole conversation, answered: ids, which of them the engine generated, and how each answer ended."""

    token_ids: list[int]
    loss_mask: list[bool]  # what the engine generated, the end-of-sequence token included
    finish_reasons: list[str]
    responses: list[Response]


def answer(engine: TargetEngine, segments: list[list[int]], sampling: SamplingConfig, context_length: int) -> Answered:
    """Answer a conversation turn by turn, each on the generated turns before it.

    `segments` are the ids before each answer (`conversations.segments`). The conversation ends early where the context
    has no room for a whole further answer; the first prompt without room is a RequestError.
    """
    ids: list[int] = []
    mask: list[bool] = []
    responses: list[Response] = []
    for segment in segments:
        added = join(ids, segment)
        if len(ids) + len(added) + sampling.max_new_tokens > context_length:
            if not responses:
                raise RequestError(
                    f"{len(added)} prompt tokens and sampling.max_new_tokens={sampling.max_new_tokens} exceed the "
                    f"context of {context_length}"
                )
            break
        (response,) = engine.generate([ids + added], sampling)
        ids = ids + added + response.token_ids
        mask += [False] * len(added) + [True] * len(response.token_ids)
        responses.append(response)
    return Answered(ids, mask, [response.finish_reason for response in responses], responses)


Item = TypeVar("Item")
Result = TypeVar("Result")


def each(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int, done: Callable[[int], None] | None = None
) -> list[Result | RequestError]:
    """Run `function` on every item, `threads` at a time and in order; a refused request is returned, not raised.

    `done(1)` is called after each, in any thread.
    """

    def attempt(item: Item) -> Result | RequestError:
        try:
            return function(item)
        except RequestError as error:
            return error
        finally:
            if done:
                done(1)

    with ThreadPoolExecutor(max(1, min(threads, len(items)))) as pool:
        return list(pool.map(attempt, items))
