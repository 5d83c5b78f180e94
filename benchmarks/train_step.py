"""A training step, against a plain trainer's: `python benchmarks/train_step.py`.

Both sides train a drafter of SmolLM2-135M's shape (draft vocabulary 8,192, fp32, two threads, AdamW, clipped gradients)
on the same samples; `baselines/plain.py` says what plain means. At the start they must give the same loss, accuracies
and gradients on two samples of unequal length. A timed step has one sample of exactly T tokens, so that nothing is
padded, which spares the plain side most: two turns, each 40% prompt and 60% response. Its features are random numbers
of the right shape, whose likeliest token is in the draft vocabulary 97 times of 100; nothing else of them decides a
time. Every step has a sample never seen before, since we keep the target's tokens of an earlier epoch.

A case is a length and a number of training-time test steps. Each measurement is a process of its own: one step warms
up, the next are timed; memory is the process's peak less what it held before its first step (weights, the target's
head, torch itself), and the whole peak beside it. The sides alternate. Both allocate huge pages: on a virtual machine,
faults of small pages can cost the plain side, which allocates most, a quarter of its speed.

The last line is one JSON object: the ratios at 2048x7, with the plain side's speed over a public trainer's (PUBLIC; far
below 1, the comparison is void, or the machine slow), and every case. `--long` is our side alone, to 16k tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from baselines.plain import Padded, Plain, pad
from torch import Tensor

from eagle3_ray.config import DrafterConfig, TrainConfig
from eagle3_ray.drafter.loss import target_argmax, targets, ttt_loss
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.store.shards import Features, target_rows
from eagle3_ray.train.features import batches
from eagle3_ray.train.loop import Training

H, VOCAB, DRAFT = 576, 49152, 8192
SHAPE: dict[str, Any] = {
    "hidden_size": H,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "max_position_embeddings": 32768,
}
CASES = ["512x4", "512x7", "2048x4", "2048x7", "4096x4", "4096x7"]
LONG = ["512x7", "1024x7", "2048x7", "4096x7", "8192x7", "16384x7"]
PUBLIC = {
    "512x7": (357, 1.1),
    "2048x7": (187, 4.0),
    "2048x4": (328, 2.6),
}  # tok/s, GB of a public trainer, two such cores
THREADS, TIMED = 2, 2
GIB = 2**30


def drafter() -> Drafter:
    torch.manual_seed(0)
    made = Drafter(drafter_config(DrafterConfig(), SHAPE, num_aux=3, draft_vocab_size=DRAFT), torch.arange(DRAFT))
    for parameter in made.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0, 0.02)
    return made


def plain(ours: Drafter) -> Plain:
    made = Plain(H, 9, 3, 64, 1536, VOCAB, DRAFT, SHAPE["rope_theta"], SHAPE["rms_norm_eps"])
    made.load_state_dict(ours.state_dict())
    return made


def target_head() -> Tensor:
    return torch.randn(VOCAB, H, generator=torch.Generator().manual_seed(1)) * 0.05  # [V, H]


def sample(number: int, length: int, head: Tensor) -> Features:
    generator = torch.Generator().manual_seed(number)
    turn = torch.arange(length) % (length // 2) / (length // 2)  # [T]: how far through its turn a token is
    mask = turn >= 0.4  # [T]
    rows = target_rows(mask)  # [R]
    said = torch.randint(DRAFT, (len(rows),), generator=generator)  # [R]
    outside = torch.rand(len(rows), generator=generator) >= 0.97  # [R]
    said = torch.where(outside, said + DRAFT, said)
    return Features(
        id=f"s{number}",
        input_ids=torch.randint(VOCAB, (length,), generator=generator).int(),
        loss_mask=mask,
        aux=torch.randn(length, 3 * H, generator=generator),
        last_hidden=torch.randn(len(rows), H, generator=generator) + 20 * head[said],
        last_rows=rows,
    )


def padded(samples: list[Features]) -> Padded:
    last = [torch.zeros(len(s.input_ids), H).index_copy(0, s.last_rows.long(), s.last_hidden) for s in samples]
    return pad([s.input_ids.long() for s in samples], [s.loss_mask for s in samples], [s.aux for s in samples], last)


def assert_same_step() -> None:
    """Loss, accuracies and every gradient of both sides, in one batch of two samples of unequal length."""
    head, steps, ours = target_head(), 4, drafter()
    theirs = plain(ours)
    samples = [sample(0, 60, head), sample(1, 42, head)]
    (batch,) = batches(samples, 1000, torch.float32)
    goal = targets(batch, target_argmax(batch.last_hidden, head), ours, steps)
    loss, metrics, _ = ttt_loss(ours, batch, goal, head[ours.draft_ids], goal.count())
    expected, losses, accuracies = theirs.loss(padded(samples), head, steps)
    loss.backward()
    expected.backward()
    means = metrics.means()
    torch.testing.assert_close(loss, expected, atol=0, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(means["loss"]), losses, atol=0, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(means["greedy_accuracy"]), accuracies)
    other = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, other[name].grad, atol=1e-6, rtol=1e-3, msg=name)


def our_step(steps: int, length: int, head: Tensor) -> Callable[[Features], Any]:
    config = TrainConfig(max_length=length, ttt_steps=steps, dtype="float32", use_gpu=False)
    training = Training(config, drafter(), head, torch.device("cpu"))
    return lambda one: training.step([one])


def plain_step(steps: int, length: int, head: Tensor) -> Callable[[Features], Any]:
    model = plain(drafter())
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step(one: Features) -> None:
        loss, _, _ = model.loss(padded([one]), head, steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(side: str, case: str) -> dict[str, float]:
    """In this process: tokens a second, GiB of memory that the steps added, and GiB of all at the peak."""
    torch.set_num_threads(THREADS)
    length, steps = map(int, case.split("x"))
    head = target_head()
    step = {"ours": our_step, "plain": plain_step}[side](steps, length, head)
    samples = [sample(number, length, head) for number in range(TIMED + 1)]
    before = psutil.Process().memory_info().rss
    seconds = []
    for one in samples:
        start = time.perf_counter()
        step(one)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rate = length / statistics.median(seconds[1:])
    return {"tokens_per_s": rate, "gib": (peak - before) / GIB, "peak_gib": peak / GIB}


def in_own_process(side: str, case: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", side, case]
    huge = os.environ | {"THP_MEM_ALLOC_ENABLE": "1"}  # of torch's CPU allocator
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=huge)
    return json.loads(ended.stdout.splitlines()[-1])


def compared(case: str, repeats: int) -> dict[str, Any]:
    """Medians of each side, and of the ratios of neighbouring runs."""
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "plain": []}
    for _ in range(repeats):
        for side, found in runs.items():
            found.append(in_own_process(side, case))
    row: dict[str, Any] = {"case": case}
    for side, found in runs.items():
        row[side] = {key: round(statistics.median(run[key] for run in found), 3) for key in found[0]}
    pairs = list(zip(runs["ours"], runs["plain"], strict=True))
    row["speed"] = round(statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs), 3)
    row["memory"] = round(statistics.median(a["gib"] / b["gib"] for a, b in pairs), 3)
    row["peak_memory"] = round(statistics.median(a["peak_gib"] / b["peak_gib"] for a, b in pairs), 3)
    if case in PUBLIC:
        row["plain_vs_public"] = round(row["plain"]["tokens_per_s"] / PUBLIC[case][0], 3)
    return row


def line(name: str, found: dict[str, float]) -> str:
    return f"{name} {found['tokens_per_s']:6.0f} tok/s {found['gib']:5.2f} GiB (whole {found['peak_gib']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="+", default=CASES, help="LENGTHxSTEPS")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--long", action="store_true", help="our side alone, by length")
    parser.add_argument("--one", nargs=2, metavar=("SIDE", "CASE"), help="one measurement, in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(*args.one)))
        return
    if args.long:
        rows = {case: in_own_process("ours", case) for case in (LONG if args.cases == CASES else args.cases)}
        for case, found in rows.items():
            print(line(f"{case:>8}: ours", found))
        print(json.dumps({"long": rows}))
        return
    assert_same_step()
    print("both sides: the same loss, accuracies and gradients", flush=True)
    result: dict[str, Any] = {"cases": []}
    for case in args.cases:
        row = compared(case, args.repeats)
        rate, memory = PUBLIC.get(case, (None, None))
        public = f"   a public trainer {rate} tok/s, {memory} GB" if rate else ""
        sides = f"{line('ours', row['ours'])}   {line('plain', row['plain'])}"
        print(f"{case:>8}: {sides}   speed {row['speed']:.2f} memory {row['memory']:.2f}{public}", flush=True)
        result["cases"].append(row)
        if case == "2048x7":
            result |= {"speed_vs_plain": row["speed"], "memory_vs_plain": row["memory"]}
            result |= {"peak_memory_vs_plain": row["peak_memory"], "plain_vs_public": row["plain_vs_public"]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
