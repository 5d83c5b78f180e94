"""Secrets planted in every way a user can give them are in nothing that a command prints or writes.

Each value is unlike any other text, so that one search over all bytes finds it. Most have no shape of their own: they
are known by the name, the place or the environment that gave them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT

TOKENS = {
    "hf": "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",
    "ghp": "ghp_PlantedPlantedPlantedPlanted123456",
    "sk": "sk-ant-api03-Planted-Planted-Planted",
    "aws": "wJalrXUtnFEMI/K7MDENG/bPlantedAMPLEKEY12",
}
ENVIRONMENT = {
    "HF_TOKEN": TOKENS["hf"],
    "AWS_SECRET_ACCESS_KEY": "planted of aws",
    "AWS_ACCESS_KEY_ID": "planted-id-of-aws",
    "WANDB_APIKEY": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    "MY_PASSPHRASE": "planted phrase of mine",
    "SOME_COOKIE": "planted-cookie",
}
FILE = """\
# @package _global_
engine:
  args:
    api_key: planted-in-a-file
hardware:
  env:
    DB_PWD: planted-db-pwd
    AUTHORIZATION: Bearer planted-bearer
    THING: {ghp}
    PROXY: http://planted-user:planted-of-a-proxy@127.0.0.1:9
    EQUAL: planted phrase of mine
    COPIED: ${{oc.env:SOME_COOKIE}}
target:
  args:
    admin_api_key: 7263544849
"""
OVERRIDES = [
    f"+hardware.env.OTHER={TOKENS['sk']}",
    f"+hardware.env.PLAIN='{TOKENS['aws']}'",
    "+hardware.env.DB_PASSWD=planted-override",
    "+engine.args.watermark_key='planted of a watermark'",
    "+hardware.args.admin_api_key=planted-admin",
    "+engine.args.ssl_keyfile_password='planted: \\'quoted\\' in a file'",
]
OPTIONS = ["+store.storage_options.secret=planted-option", "+store.storage_options.client_kwargs.token=planted-deep"]
URL = "http://planted-login:planted-of-a-url@{host}/{name}.jsonl?sig=planted%2Fsig&token=planted-query&x=1"
PLANTED = re.compile(
    r"[Pp]lanted[- ](?:of|in|phrase|id|cookie|db|bearer|user|override|admin|option|deep|login|query|Planted)"
    r"|planted(?:%2F|/)sig|planted: |9f86d081884c7d65|7263544849|"
    + "|".join(re.escape(token[:20]) for token in TOKENS.values())
)
COUNT = len(ENVIRONMENT) + 8 + len(OVERRIDES) + len(OPTIONS) + 4


@dataclass
class Place:
    """Where a command runs, and all that it may write to."""

    root: Path
    host: str
    target: Path
    ray: Path
    printed: list[str] = field(default_factory=list)

    def run(self, stage: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = (
            more | os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT), "EAGLE3_RAY_HOME": str(self.root / "home")}
        )
        environment |= {"TMPDIR": str(self.root / "tmp"), "RAY_TMPDIR": str(self.ray), "RAY_DEDUP_LOGS": "0"}
        command = [
            sys.executable,
            "-m",
            f"ray_jobs.{stage}",
            f"--config-dir={self.root}/conf",
            f"target.path={self.target}",
        ]
        ended = subprocess.run(
            [*command, "+planted=all", *words],
            cwd=self.root / "cwd",
            env=environment,
            capture_output=True,
            text=True,
        )
        self.printed.append(ended.stdout + ended.stderr)
        return ended

    def url(self, name: str) -> str:
        return "'" + URL.format(host=self.host, name=name) + "'"

    def leaks(self, *elsewhere: Path) -> list[str]:
        """What is found, and where: in all that was printed, and below the command's folders and these."""
        texts = [("printed", text) for text in self.printed]
        for folder in (self.root / "home", self.root / "tmp", self.root / "cwd", *elsewhere):
            found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
            texts += [(str(path), path.read_bytes().decode("latin-1")) for path in found]
        return [
            f"{name}: {text[max(0, hit.start() - 80) : hit.end() + 40]!r}"
            for name, text in texts
            for hit in PLANTED.finditer(text)
        ]


class _Answers(BaseHTTPRequestHandler):
    """Prompts; or, of a bucket and of what is forbidden, an error that tells what a careless server might."""

    protocol_version = "HTTP/1.1"
    log_message = lambda *args: None  # noqa: E731

    def do_GET(self) -> None:
        lines = [json.dumps({"prompt": f"Say {i}"}) for i in range(8)] + ["no JSON"]
        status, body = 200, "\n".join(lines)
        if "bucket" in self.path or ("forbidden" in self.path and self.headers.get("Range")):
            told = f"{self.path} of {self.headers.get('Authorization')} planted of aws planted-option"
            key = "<AWSAccessKeyId>planted-id-of-aws</AWSAccessKeyId><SignatureProvided>planted/sig</SignatureProvided>"
            status, body = 403, f"<Error><Code>AccessDenied</Code><Message>{told}</Message>{key}</Error>"
        self.send_response(status, "Forbidden planted of aws" if status == 403 else None)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET


@contextmanager
def answering() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


@pytest.fixture
def place(tmp_path: Path, tiny_llama_folder: Path) -> Iterator[Place]:
    for name in ("home", "tmp", "cwd", "conf/planted"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "conf" / "planted" / "all.yaml").write_text(FILE.format(**TOKENS))
    ray = Path("/tmp") / f"leaks-{os.getpid()}"  # sockets need short paths
    ray.mkdir()
    try:
        with answering() as host:
            yield Place(tmp_path, host, tiny_llama_folder, ray)
    finally:
        shutil.rmtree(ray, ignore_errors=True)


SMALL = ["engine=transformers", "prompts.max_bad_share=0.5", "prompts.unit_size=4", "sampling.max_new_tokens=8"]
SMALL += ["train.steps=2", "drafter.draft_vocab_size=64", "cluster.num_cpus=2", "capture.boundaries=[2,4,5]"]


def test_a_stage_that_ends_well_shows_none(place: Place) -> None:
    assert COUNT >= 20
    ended = place.run("prepare", *SMALL, *OVERRIDES, f"prompts.source={place.url('prompts')}")
    assert ended.returncode == 0 and "8 prompts, 1 bad records" in ended.stdout, ended.stderr[-2000:]
    (summary,) = (json.loads(path.read_text()) for path in place.root.rglob("home/prompts/*/summary.json"))
    assert summary["source"] == f"http://***@{place.host}/prompts.jsonl?sig=***&token=***&x=1"
    assert list(summary["reasons"])[0].startswith("prompts.jsonl?sig=***&token=***&x=1 line 9 is not JSON")
    shown = place.run("prepare", *SMALL, *OVERRIDES, *OPTIONS, "--cfg", "job")
    assert shown.returncode == 0 and "api_key: '***'" in shown.stdout.replace("api_key: ***", "api_key: '***'")
    assert "THREADS" not in shown.stdout and "max_new_tokens: 8" in shown.stdout
    assert place.leaks() == []


FAULTY = [
    # what Hydra refuses
    (2, ["no.such.setting=1", *OVERRIDES], "no.such.setting"),
    (2, [*OVERRIDES, "engine.args.secret_one=planted-override"], "secret_one"),
    (2, [*OVERRIDES, "+hardware.env.DB_PASSWD2=planted-override}{"], ""),
    (2, [*OVERRIDES, "+hardware.env={DB_PASSWD2:planted-override"], ""),
    # what we refuse
    (2, [*OVERRIDES, "store.root=s3://planted-id-of-aws:planted-override@bucket/p"], "store.root"),
    (2, [*OVERRIDES, "drafter.start_from=s3://planted-user:planted-override@bucket/p"], "drafter"),
    (2, ["store.root=s3://bucket/p", "+store.storage_options.endpoint_url=http://{host}", *OPTIONS], "store.root"),
    (2, [*OVERRIDES, "hardware.device=planted-override"], "hardware.device"),
    # what nobody caught
    (1, [*OVERRIDES, "prompts.source={forbidden}"], "Error executing job with overrides"),
    (1, [*OVERRIDES, "prompts.source={forbidden}", "HYDRA_FULL_ERROR=1"], "Traceback"),
]


@pytest.mark.parametrize(
    ("code", "words", "told"), FAULTY, ids=[f"{i}-{w[-1].split('=')[0]}" for i, (_, w, _) in enumerate(FAULTY)]
)
def test_a_command_that_fails_shows_none(place: Place, code: int, words: list[str], told: str) -> None:
    given = [word.replace("{host}", place.host).replace("{forbidden}", place.url("forbidden")) for word in words]
    whole = {"HYDRA_FULL_ERROR": "1"} if given[-1] == "HYDRA_FULL_ERROR=1" else {}
    ended = place.run("prepare", *SMALL, *given[: len(given) - len(whole)], **whole)
    assert (ended.returncode, told in ended.stderr) == (code, True), ended.stderr
    assert ended.stderr and place.leaks() == []


@pytest.mark.full
def test_stages_on_ray_show_none(place: Place) -> None:
    """What `ps` has of a command line Ray writes down only where it starts the command itself (`ray job submit`)."""
    words = [*SMALL, *OVERRIDES, f"prompts.source={place.url('prompts')}"]
    for code, stage in ((1, "train"), (0, "extract"), (0, "train")):  # the first before there are features
        ended = place.run(stage, *words)
        assert ended.returncode == code, ended.stderr[-3000:]
    (told,) = (json.loads(path.read_text()) for path in place.root.rglob("home/features/*/description.json"))
    assert told["engine_env"]["THING"] == told["engine_env"]["EQUAL"] == told["engine_env"]["COPIED"] == "***"
    assert told["engine_env"]["PROXY"] == "http://***@127.0.0.1:9"
    assert [path.name for path in place.ray.rglob("ray-data*.log")]
    assert place.leaks(place.ray) == []


SERVED = ["prompts.limit=6", "prompts.unit_size=4", "sampling.max_new_tokens=8", "evaluate.limit=3", "train.steps=1"]
SERVED += ["evaluate.max_new_tokens=12", "hardware.num_actors=1", "capture.boundaries=[2,4,6]", "verify.samples=1"]
SERVED += ["prompts.max_bad_share=0.5", "cluster.num_cpus=2", "drafter.draft_vocab_size=64", "run=leaks"]


@pytest.mark.full
@pytest.mark.engine
def test_the_pipeline_shows_none(place: Place) -> None:
    source = f"prompts:\n  source: {place.url('prompts')}\nevaluate:\n  source: {place.url('heldout')}\n"
    (place.root / "conf" / "planted" / "all.yaml").open("a").write(source)
    ended = place.run("pipeline", *SERVED)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    folder = place.root / "home" / "runs" / "leaks"
    kept = json.loads((folder / "config.json").read_text())
    assert kept["hardware"]["env"]["DB_PWD"] == kept["engine"]["args"]["api_key"] == "***"
    assert kept["prompts"]["source"] == f"http://***@{place.host}/prompts.jsonl?sig=***&token=***&x=1"
    assert "***" not in (folder / "summary.json").read_text() and (folder / "report.html").exists()
    (card,) = place.root.rglob("home/drafters/*/export/README.md")
    assert "THING='***'" in card.read_text() and "api" not in card.read_text()
    assert place.leaks(place.ray) == []


@pytest.mark.full
@pytest.mark.engine
def test_engines_that_fail_to_start_show_none(place: Place) -> None:
    """Three starts, each with the end of SGLang's log, which begins with all its arguments."""
    (place.root / "p.jsonl").write_text('{"prompt": "Say 1"}\n')
    ended = place.run("extract", *SERVED, f"prompts.source={place.root}/p.jsonl", "+engine.args.load_format=no_such")
    assert ended.returncode == 1 and "the engine failed to start 3 times in a row" in ended.stdout + ended.stderr
    assert place.leaks(place.ray) == []
