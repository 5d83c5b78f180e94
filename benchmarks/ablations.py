"""What each choice of the trainer is worth in accept length: `python -m benchmarks.ablations --store FOLDER`.

A row (`ablation_rows.py`) changes one thing of the demo's training and takes as many optimizer steps. Responses and
features are taken once, by the project's own stages (SGLang, fp32), with the boundaries of all rows; a row trains on
columns of them, in this process, with the product's own pieces. It is measured by the walk of the evaluation over
held-out samples that no row of that seed trains on, always with our own slots and on the states that serving hands
over. Rows are compared within a seed.

`--own-answers` names a second corpus: JSONL of {id, source, messages} with an assistant's turn after each user's. One
row trains on those answers, another on what the target answers to the same prompts; both are measured on the target's
answers to held-out prompts of that file. The file's answers are cut to sampling.max_new_tokens, as the target's.

Each finished row and seed is a line of FOLDER/ablations.jsonl, and is not run again: the same command goes on.
`--write` makes the document of these lines (`ablation_table.py`); with `--seeds 0` that is all that is done. The last
line is one JSON object, row -> mean accept length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ablation_data import Corpus, answered, opened, with_own_answers
from benchmarks.ablation_rows import FILE, ROWS, SERVED, SHIFTED, Row, slots_of
from benchmarks.ablation_table import by_row, document, latest, read
from eagle3_ray.capture import target_config, target_folder, text_config
from eagle3_ray.config import PLACEMENT, Config, DrafterConfig
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.drafter.target import TargetPieces, initialise, load_pieces
from eagle3_ray.drafter.vocabulary import (
    count_probability,
    count_tokens,
    draft_vocabulary,
    end_tokens,
    tokenizer_ids,
)
from eagle3_ray.progress import Progress
from eagle3_ray.store.shards import Features, Response
from eagle3_ray.train.features import epoch_order, heldout, positions
from eagle3_ray.train.loop import Training
from eagle3_ray.train.trainer import WALKED

HELDOUT = 64  # samples of a seed, or a quarter of the corpus


def measured(row: Row, seed: int, corpus: Corpus, config: Config, pieces: TargetPieces) -> dict[str, Any]:
    """Train the row's drafter, and walk it over the held-out samples of the seed."""
    train = replace(config.train, seed=seed, **row.train)
    settings = replace(config.drafter, **row.drafter)
    folder = target_folder(config.target)
    sizes = [len(shard) for shard in corpus.answered]
    held = heldout(seed, sizes, train.heldout)
    texts = [corpus.text(row, pair) for pair in epoch_order(seed, 0, sizes, set(held))]
    ids = vocabulary(texts, settings, pieces.head, folder)  # [Vd]
    shape = drafter_config(settings, text_config(target_config(folder)), len(row.trained), len(ids))
    drafter = Drafter(shape, ids)
    initialise(drafter, pieces, seed, settings)
    training = Training(train, drafter, pieces.head, torch.device("cpu"))
    if not (row.fp8 or row.own):
        training._argmax = corpus.argmax
    began, tokens = time.monotonic(), 0.0
    with slots_of(row):
        for share in islice(positions(train, sizes, 0, 1, 0, set(held)), train.steps):
            _, facts = training.step([corpus.trained(row, pair) for pair in share])
            tokens += facts["tokens"]
    seconds = time.monotonic() - began
    walked = training.accept_length([corpus.served(row, pair) for pair in held], WALKED)
    return {**walked, "heldout": len(held), "tokens": int(tokens), "seconds": round(seconds, 1)}


def vocabulary(texts: list[Features], settings: DrafterConfig, head: Tensor, folder: Path) -> Tensor:
    """[Vd]: the product's draft vocabulary, counted on what is trained on and not on the held-out samples."""
    said = count_tokens((Response(s.id, s.input_ids, s.loss_mask, []) for s in texts), len(head))  # [V]
    known, special = tokenizer_ids(folder)
    always = {*end_tokens(folder), *(number for number in special if said[number])}
    by_probability = settings.vocabulary == "probability"
    counts = count_probability((s.last_hidden for s in texts), head) if by_probability else said  # [V]
    return draft_vocabulary(counts, settings.draft_vocab_size, always, known)


def base_of(config: Config) -> dict[str, Any]:
    """What all rows share: a result of another base is none of this study."""
    train = {k: v for k, v in asdict(config.train).items() if k not in PLACEMENT and k != "seed"}
    return {"train": train, "drafter": asdict(config.drafter), "sampling": asdict(config.sampling)}


def study(corpora: dict[str, Corpus], config: Config, names: list[str], seeds: int, results: Path) -> None:
    """Run what `results` has not: seed by seed, so that a study cut short has whole comparisons."""
    base, pieces = base_of(config), load_pieces(config.target, torch.float32)
    done = {
        (line["row"], line["seed"])
        for line in read(results)
        if line["base"] == base and line["row"] in names and line["corpus"] == corpora[ROWS[line["row"]].corpus].facts
    }
    runs = [(name, seed) for seed in range(seeds) for name in names]
    todo = [run for run in runs if run not in done]
    progress = Progress("ablations", len(runs), "runs", done=len(runs) - len(todo), every_s=0.0)
    for name, seed in todo:
        corpus = corpora[ROWS[name].corpus]
        found = measured(ROWS[name], seed, corpus, config, pieces)
        line = {"row": name, "seed": seed, **found, "corpus": corpus.facts, "base": base}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        rate = found["tokens"] / max(found["seconds"], 1e-9)
        note = f"{found['seconds']:.0f} s of training, {rate:.0f} tok/s"
        progress.add(1, f"{name} seed {seed}: {found['accept_length']:.3f}, {note}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, required=True, help="responses, features and results")
    parser.add_argument("--rows", default="", help="NAME,… of: " + ", ".join(ROWS))
    parser.add_argument("--seeds", type=int, default=3, help="0 trains nothing")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of every row")
    parser.add_argument("--own-answers", type=Path, help="JSONL of {messages} with the assistant's turns")
    parser.add_argument("--write", type=Path, metavar="docs/ablations.md")
    args = parser.parse_args()
    names = (
        args.rows.split(",") if args.rows else [n for n, row in ROWS.items() if args.own_answers or row.corpus != FILE]
    )
    for name in names:
        if name not in ROWS or (ROWS[name].corpus == FILE and not args.own_answers):
            parser.error(f"--rows: {name!r} is no row" if name not in ROWS else f"--rows: {name} needs --own-answers")
    store, results = args.store.resolve(), args.store.resolve() / "ablations.jsonl"
    if args.seeds:
        store.mkdir(parents=True, exist_ok=True)
        common = [f"store.root={store}", f"train.steps={args.steps}", f"train.heldout={HELDOUT}"]
        demo = opened(*common, f"capture.boundaries={sorted(SERVED + SHIFTED)}")
        corpora = {"demo": answered(demo)}
        if any(ROWS[name].corpus == FILE for name in names):
            source = args.own_answers.resolve()
            other = opened(*common, f"capture.boundaries={[*SERVED]}", f"prompts.source={source}")
            corpora[FILE] = with_own_answers(other, source, store)
        torch.set_num_threads(demo.config.train.cpus_per_worker)
        study(corpora, demo.config, names, args.seeds, results)
    lines = read(results)
    if not lines:
        parser.error(f"--store: no result in {results}")
    if args.write:
        args.write.write_text(document(lines))
    means = {name: round(statistics.mean(values.values()), 4) for name, values in by_row(latest(lines)).items()}
    print(json.dumps(means))


if __name__ == "__main__":
    main()
