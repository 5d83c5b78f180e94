"""The model card, README.md of an exported drafter: what it is for, what was measured, what it was made from, how to
serve it. Every figure is one that the store holds; what was not measured is said to be so.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import jinja2

from eagle3_ray.capture import deciding_args, engine_version
from eagle3_ray.config import Drafting
from eagle3_ray.drafter.checkpoint import WRITTEN_FOR
from eagle3_ray.run import Run
from eagle3_ray.secrets import clean, is_secret
from eagle3_ray.serving import drafting_args
from eagle3_ray.store.commits import Units

HERE = "."  # the card's own folder, wherever it is copied to


def publish_card(
    run: Run, features: Units, drafter: str, exported: dict[str, Any], evaluation: dict[str, Any] | None = None
) -> None:
    """Write the card of the drafter at the key `drafter`, unless it is there word for word.

    `exported` is its export.json; `evaluation` a summary of `evaluate`, where there is one.
    """
    key, text = f"{drafter}/export/README.md", model_card(run, features, drafter, exported, evaluation).encode()
    if not run.files.exists(key) or run.files.read(key) != text:
        run.files.write(key, text)


def model_card(
    run: Run, features: Units, drafter: str, exported: dict[str, Any], evaluation: dict[str, Any] | None = None
) -> str:
    """The card's text, in Markdown."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    served = json.loads(run.files.read(f"{drafter}/export/config.json"))
    return environment.get_template("card.md.jinja").render(
        target=place(run.config.target.path),
        revision=run.config.target.revision,
        config=served,
        exported=exported,
        training=run.files.read_json(f"{drafter}/summary.json"),
        extraction=run.read_json(f"{features.folder}/summary.json") or {},
        fingerprint=features.fingerprint,
        description=features.description(),
        source=place(clean(run.config.prompts.source)),
        version=engine_version(run.config) if run.config.engine.name == "sglang" else WRITTEN_FOR,
        command=launch_command(run, served["architectures"]),
        turned_off=[
            name for name, value in deciding_args(run.config, "serve")["engine_args"].items() if value is False
        ],
        evaluate=run.config.evaluate,
        evaluation=evaluation,
    )


def launch_command(run: Run, architectures: list[str]) -> str:
    """What serves the drafter of these `architectures`, run in its folder: SGLang's flags for the target, the settings
    that change numbers, and speculation as ray_jobs.evaluate does it. No secret, and no local folder."""
    config, evaluate = run.config, run.config.evaluate
    drafting = Drafting(evaluate.num_steps, evaluate.topk, evaluate.num_draft_tokens)
    decides = deciding_args(config, "serve")
    env = decides["engine_env"] | ({"SGLANG_USE_CPU_ENGINE": "1"} if config.hardware.device == "cpu" else {})
    flags = {
        "model_path": config.target.path,
        "revision": config.target.revision,
        "trust_remote_code": config.target.trust_remote_code,
        "dtype": evaluate.dtype or config.engine.dtype,
        **drafting_args(run, drafting, HERE, architectures),
        **decides["engine_args"],
    }
    words = [f"{name}={_word(value)}" for name, value in env.items() if not is_secret(name)]
    words += ["python -m sglang.launch_server"]
    words += [flag for name, value in flags.items() if not is_secret(name) for flag in _flag(name, value)]
    return " \\\n    ".join(words)


def _flag(name: str, value: Any) -> list[str]:
    """One of ServerArgs as the command line has it: a bool that is true by its name alone, a list by its elements.

    What is false has no flag; the card says so, since SGLang may choose for itself where nothing is said.
    """
    if value is None or value is False:
        return []
    name = "--" + name.replace("_", "-")
    if value is True:
        return [name]
    return [f"{name} {' '.join(map(_word, value)) if isinstance(value, list) else _word(value)}"]


def _word(value: Any) -> str:
    return shlex.quote(json.dumps(clean(value)) if isinstance(value, dict) else place(clean(str(value))))


def place(path: str) -> str:
    """A hub name or s3:// URL as it is; of a folder of this machine its last part alone."""
    local = path.startswith(("/", "~", "."))
    return Path(path).name if local and path != HERE else path
