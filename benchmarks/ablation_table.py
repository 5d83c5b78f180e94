"""What the ablations found: results read, compared seed by seed, and written as docs/ablations.md."""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.ablation_rows import FILE, ROWS, Row


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def latest(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the base, and of each corpus, that were run last."""
    corpora = {ROWS[line["row"]].corpus: line["corpus"] for line in lines if line["base"] == lines[-1]["base"]}
    return [
        line
        for line in lines
        if line["base"] == lines[-1]["base"] and line["corpus"] == corpora[ROWS[line["row"]].corpus]
    ]


def by_row(lines: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Accept length by row, in ROWS's order, and by seed."""
    found: dict[str, dict[int, float]] = {name: {} for name in ROWS if any(line["row"] == name for line in lines)}
    for line in lines:
        found[line["row"]][line["seed"]] = line["accept_length"]
    return found


def differences(found: dict[str, dict[int, float]], name: str) -> list[float]:
    """The row less the one that it is compared with, seed by seed."""
    other = found.get(ROWS[name].against or "", {})
    return [value - other[seed] for seed, value in sorted(found[name].items()) if seed in other]


def default_of(row: Row, base: dict[str, Any]) -> str:
    for group in ("train", "drafter"):
        for key in getattr(row, group):
            return str(base[group][key])
    return row.default


def document(lines: list[dict[str, Any]]) -> str:
    """docs/ablations.md, of the latest lines."""
    lines = latest(lines)
    found, base = by_row(lines), lines[-1]["base"]
    rows, clear = [], {"Above": list[str](), "Below": list[str]()}
    for name, values in found.items():
        row, changes = ROWS[name], differences(found, name)
        change = _spread(changes, "+.3f") if changes else ""
        length = _spread(list(values.values()), ".3f")
        rows.append(f"| {row.what} | {row.value} | {default_of(row, base)} | {length} | {change} | {len(values)} |")
        if changes and (min(changes) > 0 or max(changes) < 0):
            clear["Above" if min(changes) > 0 else "Below"].append(f"{row.what} {row.value}")
    told = [
        _lines(f"{side} what they are compared with, in every seed: {'; '.join(of) or 'none'}.")
        for side, of in clear.items()
    ]
    facts = {ROWS[line["row"]].corpus: line["corpus"] for line in lines}
    corpora = "\n".join(_described(name, of) for name, of in facts.items())
    given = "\n".join(_lines(f"    {group}: {_settings(values)}", indent=8) for group, values in base.items())
    return DOCUMENT.format(
        rows="\n".join(rows),
        told="\n".join(told),
        corpora=corpora,
        given=given,
        command=_command(lines),
        heldout=max(line["heldout"] for line in lines),
        steps=base["train"]["steps"],
        batch=base["train"]["batch_size"],
    )


def _spread(values: list[float], form: str) -> str:
    mean, low, high = (format(value, form) for value in (statistics.mean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"


def _command(lines: list[dict[str, Any]]) -> str:
    steps, seeds = lines[-1]["base"]["train"]["steps"], 1 + max(line["seed"] for line in lines)
    files = {line["corpus"]["file"] for line in lines if ROWS[line["row"]].corpus == FILE}
    own = [f" \\\n        --own-answers {file}" for file in files]
    return f"python -m benchmarks.ablations --store FOLDER --steps {steps} --seeds {seeds}{''.join(own)}"


def _described(name: str, facts: dict[str, Any]) -> str:
    text = f"- `{name}`: {facts['samples']} conversations, {facts['tokens']} tokens"
    if "file" in facts:
        text += f", from `{facts['file']}`: " + ", ".join(f"{k} {v}" for k, v in facts["sources"].items())
    return _lines(text + ".", indent=2)


def _lines(text: str, indent: int = 0) -> str:
    return textwrap.fill(text, 120, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)


DOCUMENT = """# Ablations

What each choice is worth, by `benchmarks/ablations.py`. A row changes one thing of the demo's training of a drafter for
SmolLM2; all take {steps} steps of {batch} samples. Measured is the accept length on {heldout} held-out samples, walked
as serving would draft, three drafts a verify step: other samples for each seed, the same for all rows of a seed, and
nothing is trained or counted on them. The difference is to the base of the same seed. In brackets: the lowest and the
highest seed.

| what | value | default | accept length | difference | seeds |
|---|---|---|---|---|---|
{rows}

{told}

- **loss mask**: which slots are trained at step k, where the target's row is stored. `mask[i]`: where mask[i+k] is set,
  which leaves out the first draft of every answer; `mask[i+1]`: where mask[i+1+k] is. Both also train later steps of
  slots within the prompt, at which serving never drafts. The default: all tokens from i+1 to i+2+k are of one answer.
- **boundaries**: served means the states that the walk is given.
- **states trained on**: those of the target in fp32, or as `capture.dtype=float8_e4m3` keeps them, the last hidden
  state then in bf16. The walk is given fp32.
- **answers**: trained on the target's answers to the prompts of another corpus, or on the answers that this corpus came
  with, cut to as many tokens. Both are walked over the target's answers to held-out prompts of that corpus, so these
  two rows compare with each other and with no other row.

The corpora:

{corpora}

The base:

{given}

The command, `--write docs/ablations.md` added:

    {command}
"""
