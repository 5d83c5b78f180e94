"""What is a secret, by name, by shape and by equality, and what is none and must stay readable."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import re
import secrets as random_secrets
import sys
import time
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, compose

from eagle3_ray import config as settings
from eagle3_ray.capture import SPEED_ARGS, deciding_args, engine_args
from eagle3_ray.card import launch_command
from eagle3_ray.config import ConfigError
from eagle3_ray.conversations import read_records
from eagle3_ray.drafter.shape import GQA
from eagle3_ray.extract import Extractor
from eagle3_ray.printed import without_secrets
from eagle3_ray.run import Run, open_run
from eagle3_ray.secrets import HIDDEN, Sealed, Secret, blotted, clean, described, is_secret, marked, masked
from eagle3_ray.store.filesystem import Filesystem
from eagle3_ray.strict_json import fingerprint

PLAIN = "hush hush 0123"  # of no shape

SECRET_NAMES = """passwd pwd auth authorization apikey APIKEY WANDB_APIKEY passphrase pat cookie
    secret password PASSWORD db_password DB-PASSWD dbPassword mypassword smtp_pass credential credentials
    token HF_TOKEN HF_TOKEN_2 hfToken HFToken access_token session_token bearer auth_token refreshToken GITHUB_PAT
    key api_key api-key apiKey X-API-Key admin_api_key OPENAI_API_KEY OPENAI_APIKEY aws_access_key_id AWSAccessKeyId
    secretAccessKey private_key SSECustomerKey x-amz-security-token X-Amz-Signature signature sig sas sas_token jwt
    session SESSION_ID_COOKIE Set-Cookie proxy-authorization oauth2 basic_auth client_secret ssl_keyfile_password
    AccountKey SharedAccessKey hardware.env.DB_PASSWORD"""
PLAIN_NAMES = """max_tokens num_draft_tokens draft_vocab_size tokenizer tokenizer_path key_value_heads
    num_key_value_heads cache_key keys tokens mask_token bos_token_id token_ids max_total_tokens
    speculative_token_map author authority path compat forward_pass_metrics_worker_id RAY_AUTH_MODE
    SSH_AUTH_SOCK TOKENIZERS_PARALLELISM keyfile signal bypass_window experts_per_token
    bucket_time_to_first_token SGLANG_USE_AITER_FP8_PER_TOKEN monkey pattern sasl kv_cache_dtype passes keep
    assign design KEYBOARD session_timeout token_count"""

ALNUM = "q7Rz2LmX9vT4bWc8KpYd3HnJ6sGf1AeU"  # 32 characters
HEX40 = "3f786850e387550fdab836ed7e6dc881de23001b"
SHAPES = {
    "hugging face": f"hf_{ALNUM}",
    "openai": f"sk-{ALNUM}",
    "openai, project": f"sk-proj-{ALNUM}_{ALNUM}",
    "anthropic": "sk-ant-api03-words-of-no-digits",
    "github": f"ghp_{ALNUM}",
    "github, oauth": "gho_abcdefghijklmnopqrstuvwxyzabcdefghij",
    "github, fine": f"github_pat_11ABCDEFG_{ALNUM}",
    "gitlab": "glpat-abcdefghijklmnopqrst",
    "slack": "xoxb-1234567890-abcdefghij",
    "slack, webhook": "T01ABCDEF/B01ABCDEF/abcdefghijklmnopqrstuvwx",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "aws, session": "ASIAIOSFODNN7EXAMPLE",
    "aws, secret": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "google": "AIzaSyA-abcdefghijklmnopqrstuvwxyz01234",
    "google, oauth": "ya29.a0AfH6SMBabcdef",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdef-ghij_klm",
    "sendgrid": "SG.abcdefghijklmnopqrstuv.abcdefghijklmnopqrstuvwxyzabcdefghijklmnopq",
    "npm": "npm_abcdefghijklmnopqrstuvwxyz0123456789",
    "pypi": f"pypi-AgEIcHlwaS5vcmc{ALNUM}",
    "digitalocean": f"dop_v1_{HEX40}{HEX40[:24]}",
    "mailgun": f"key-{HEX40[:32]}",
    "nvidia": f"nvapi-{ALNUM}",
    "stripe": "sk_live_abcdefghijklmnopqrstuvwx",
    "random": ALNUM,
    "random, url-safe": "xT3-vQ9_kLm2Zr8WbYc5Nd7HsJf4Gp1EaU6i",
    "random, base64": "kq3Zv8+Lx2Rm9/Tb4Wc7Yp1Hd6Ns5Jf0GgAa=",
    "random, lower case": "k3j9x0a8q7r2z5l1m6v4t8b2w9c7p3yd",
}
IN_CONTEXT = [  # text, what must not be left of it
    ("https://h.blob.core.windows.net/c/b?sv=2024-01-01&sig=abc%2Fdef%3D&se=2026", "abc%2Fdef%3D"),
    ("https://storage.googleapis.com/b/o?X-Goog-Credential=me%40p&X-Goog-Signature=00ff00&x=1", "00ff00"),
    ("https://storage.googleapis.com/b/o?X-Goog-Credential=me%40p&X-Goog-Signature=00ff00&x=1", "me%40p"),
    ("https://host/prompts.jsonl?token=opensesame&part=1", "opensesame"),
    ("https://host/prompts.jsonl?key=opensesame&part=1", "opensesame"),
    ("https://user:p@ss-word@host/x", "ss-word"),
    ("redis://:opensesame@host:1/0", "opensesame"),
    ("Authorization: opensesame", "opensesame"),
    ("Authorization: Custom opensesame", "opensesame"),
    ("{'Authorization': 'Token opensesame', 'Accept': '*/*'}", "opensesame"),
    ('{"authorization": "ApiKey opensesame"}', "opensesame"),
    ("proxy-authorization: Basic b3BlbjpzZXNhbWU=", "b3BlbjpzZXNhbWU="),
    ("Cookie: a=opensesame; b=2", "opensesame"),
    ("{'Set-Cookie': 'sid=opensesame; Path=/'}", "opensesame"),
    ("-----BEGIN RSA PRIVATE KEY-----\nopen\nsesame\n-----END RSA PRIVATE KEY-----", "sesame"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\nopen", "open\n"),
    ("https://hooks.slack.com/services/T01/B01/opensesame", "opensesame"),
    ("DefaultEndpointsProtocol=https;AccountKey=opensesame==;Suffix=net", "opensesame"),
    ("ServerArgs(model_path='m', api_key='open sesame', port=1)", "sesame"),
    ("['+engine.args.api_key=opensesame', 'run=x']", "opensesame"),
    ("['+hardware.env={DB_PASSWORD:opensesame,THREADS:2}']", "opensesame"),
    ('{"db": {"password": "open sesame"}}', "sesame"),
    ('{"db": {"password": 12345678}}', "12345678"),
    ("env:\n  DB_PASSWORD: open sesame\n  THREADS: 2", "sesame"),
    ("storage_options:\n  key: open sesame", "sesame"),
    ("launch --api-key opensesame --port 1", "opensesame"),
]
READABLE = [
    "9ad9e1b2c4d5f607 and 3f786850e387550fdab836ed7e6dc881de23001b",
    "sha256 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "123e4567-e89b-12d3-a456-426614174000",
    "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-30B-A3B/snapshots/b968826d9c46dd6066d109eabc6255188de91218",
    "s3://bucket/features/9ad9e1b2c4d5f607/shards/000012-0003.5d41402abc4b.safetensors",
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8, DeepSeek-R1-0528-Qwen3-8B, nvidia/Kimi-K2.5-NVFP4",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8",
    "KimiK25ForConditionalGeneration, Eagle3DeepseekV2ForCausalLM, Glm4MoeLiteForCausalLM",
    "speculative_num_draft_tokens=4 enable_return_aux_hidden_states=True max_total_tokens=24576",
    "Write a haiku about entropy, then explain Shannon's formula: H = -sum(p * log(p)).",
    "error: store.root is 's3://b/p': cannot read key (KeyError: 'x')",
    "KeyError: 'boundaries'",
    "--ssl-keyfile-password has no effect without --ssl-certfile and --ssl-keyfile.",
    "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
    "Could not override 'no.such'.\nKey 'no' is not in struct\n    full_key: no",
    "store.storage_options sets endpoint_url='http://127.0.0.1:9000', key, secret",
    "S3Key(key='features/x/commits/000000.json') at eagle3_ray/secrets.py:69, in masked",
    "LogitsProcessor._get_hidden_states_to_store SchedulerBatchResultProcessor._append_prefill_hidden_states",
    "session_2026-01-02_03-04-05_123456_789/logs/worker-0123456789abcdef0123456789abcdef0123456789abcdef01234567.out",
]


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_a_value_of_such_a_name_is_hidden(name: str) -> None:
    assert is_secret(name)
    for value in (PLAIN, 12345678, [PLAIN], {"value": PLAIN, "n": [12345678]}):
        shown = json.dumps(masked({"group": {name: value, "kept": "as it is"}}))
        assert PLAIN not in shown and "12345678" not in shown and "as it is" in shown


@pytest.mark.parametrize("name", PLAIN_NAMES.split())
def test_a_value_of_such_a_name_stays(name: str) -> None:
    assert not is_secret(name)
    assert masked({name: PLAIN}) == {name: PLAIN}


@pytest.mark.parametrize("kind", SHAPES)
def test_a_token_is_hidden_under_any_name(kind: str) -> None:
    value = f"https://hooks.slack.com/services/{SHAPES[kind]}" if kind == "slack, webhook" else SHAPES[kind]
    texts = [value, f"got {value}.", f"['{value}']", f"+hardware.env.THING={value}", f"a/b:{value}\n"]
    for shown in [*map(blotted, texts), json.dumps(masked({"THING": value, "more": [value]}))]:
        assert SHAPES[kind] not in shown and HIDDEN in shown
    config = compose(f"+hardware.env.THING='{value}'", f"+engine.args.load_format='{value}'")
    assert SHAPES[kind] not in json.dumps(deciding_args(config, "capture"))


@pytest.mark.parametrize(("text", "secret"), IN_CONTEXT)
def test_what_a_text_says_of_a_secret_is_hidden(text: str, secret: str) -> None:
    assert secret not in blotted(text) and HIDDEN in blotted(text)


@pytest.mark.parametrize("text", READABLE)
def test_what_is_no_secret_stays_readable(text: str) -> None:
    assert blotted(text) == text
    assert masked({"value": text}) == {"value": text}


def test_random_values_are_told_from_names_paths_and_digests() -> None:
    found = sum(HIDDEN in blotted(random_secrets.token_urlsafe(32)) for _ in range(500))
    assert found > 450
    assert not any(HIDDEN in blotted(random_secrets.token_hex(n)) for n in range(8, 65))
    files = [str(path) for path in ROOT.rglob("*") if not {".git", ".venv"} & {*path.parts}]
    assert [path for path in files if blotted(path) != path] == []
    text = " ".join(Path(path).read_text() for path in files if path.endswith((".py", ".yaml")) and "tests" not in path)
    tried = {word for word in re.findall(r"[\w/+-]{20,}", text) if word.strip("-")}
    assert len(tried) > 150 and [word for word in tried if HIDDEN in blotted(word)] == []


def test_long_texts_take_no_longer_than_they_are() -> None:
    for text in ("sk-" * 50_000, "a-" * 50_000, "eyJ" + "a." * 50_000, "://a" * 50_000, "key='" + "\\'" * 50_000):
        began = time.monotonic()
        blotted(text)
        assert time.monotonic() - began < 5.0


# ---------------------------------------------------------------- by equality


def test_a_secret_of_the_environment_is_hidden_wherever_it_turns_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSPHRASE", PLAIN)
    monkeypatch.setenv("MY_PWD_FILE", "/etc/hostname")
    monkeypatch.setenv("PWD", "/etc")
    assert clean(f"so {PLAIN} it was") == "so *** it was"
    assert clean({"a": [f"{PLAIN}, {PLAIN}"], PLAIN: 1, "n": 0.5}) == {"a": ["***, ***"], "***": 1, "n": 0.5}
    assert masked({"prompts": {"source": PLAIN}}) == {"prompts": {"source": "***"}}
    assert clean("/etc/hostname in /etc") == "/etc/hostname in /etc"


def test_short_and_empty_values_hide_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "1")
    monkeypatch.setenv("MY_SECRET", "")
    assert clean("1 of 10 units", {"key": "", "secret": 10, "token": False}) == "1 of 10 units"
    assert masked({"password": "", "auth": None, "token": False}) == {"password": "", "auth": None, "token": False}


def test_a_secret_is_itself_where_it_is_used_and_hidden_where_it_is_shown() -> None:
    given = {"api_key": "opensesame", "proxy": "http://me:opensesame@h:1", "n": 3, "deep": [{"x": "a opensesame"}]}
    kept = marked(given, ["opensesame"])
    assert kept == given and "opensesame" not in repr(kept)
    for copied in (pickle.loads(pickle.dumps(kept)), copy.deepcopy(kept)):
        assert copied == given and "opensesame" not in repr(copied)
        assert described(copied) == {"proxy": "http://***@h:1", "n": 3, "deep": [{"x": "a ***"}]}
    assert type(kept["n"]) is int and isinstance(kept["api_key"], Secret)


# ---------------------------------------------------------------- the project's own settings


def test_no_setting_of_ours_is_taken_for_a_secret() -> None:
    groups = [group for group in vars(settings).values() if is_dataclass(group)]
    names = [field.name for group in groups for field in fields(group)]
    assert len(names) > 100 and [name for name in names if is_secret(name)] == []


def test_of_sglang_s_arguments_only_the_secret_ones_are() -> None:
    order = pytest.importorskip("sglang.srt.arg_groups.field_order")
    (names,) = (value for value in vars(order).values() if isinstance(value, tuple) and len(value) > 400)
    found = {name for name in names if is_secret(name)}
    assert found == {"api_key", "admin_api_key", "ssl_keyfile_password", "watermark_key", "watermark_key_b"}


PRESETS = [
    *(("hardware", path.stem) for path in (ROOT / "conf" / "hardware").glob("*.yaml")),
    *(("target", path.stem) for path in (ROOT / "conf" / "target").glob("*.yaml")),
    ("engine", "transformers"),
]


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_a_run_without_secrets_keeps_its_fingerprints_and_its_saved_settings(group: str, name: str) -> None:
    config = compose(f"{group}={name}", "target.path=/a/b", "engine.version=1", "++hardware.env.NCCL_ALGO=Ring")
    for purpose in ("capture", "serve"):
        raw = {"engine_args": engine_args(config, purpose), "engine_env": config.hardware.env}
        raw = {part: {k: v for k, v in sorted(of.items()) if k not in SPEED_ARGS} for part, of in raw.items()}
        assert deciding_args(config, purpose) == raw
    plain = json.loads(json.dumps(asdict(config)))
    assert masked(plain) == plain == clean(plain)


def test_a_fingerprint_does_not_depend_on_the_environment_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    before = deciding_args(compose("+engine.args.attention_backend=flashinfer"), "capture")
    monkeypatch.setenv("MY_PASSWORD", "flashinfer")
    assert deciding_args(compose("+engine.args.attention_backend=flashinfer"), "capture") == before


# ---------------------------------------------------------------- where settings go


@pytest.fixture
def planted(tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("MY_PASSPHRASE", PLAIN)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    run = open_run(
        compose(
            f"target.path={tiny_llama_folder}",
            f"store.root={tmp_path}/store",
            f"prompts.source={tmp_path}/p.jsonl",
            f"+hardware.env.EQUAL={PLAIN}",
            "+hardware.env.DB_PASSWD=opensesame",
            "+hardware.env.PROXY='http://me:opensesame@h:1'",
            f"+hardware.env.THING={SHAPES['hugging face']}",
            "+engine.args.api_key=opensesame",
            "+target.args.admin_api_key=12345678",
            f"+hardware.args.load_format='{PLAIN}'",
            "+hardware.serve_args.file_storage_path='s3://me:opensesame@h/x'",
            "+store.storage_options.secret=opensesame",
        )
    )
    return run


SEEN = re.compile(f"opensesame|12345678|{PLAIN}|{SHAPES['hugging face']}")


def test_no_secret_decides_a_fingerprint_or_is_told_in_a_description(planted: Run) -> None:
    told = deciding_args(planted.config, "serve")
    assert told["engine_env"] == {"EQUAL": "***", "PROXY": "http://***@h:1", "THING": "***"}
    assert told["engine_args"]["file_storage_path"] == "s3://***@h/x"
    assert not told["engine_args"].keys() & {"api_key", "admin_api_key"}
    description = planted.features("corpus")[1]
    assert not SEEN.search(json.dumps(description))
    planted.config.hardware.env["DB_PASSWD"] = Secret("changed")
    planted.config.engine.args["api_key"] = Secret("changed")
    assert fingerprint(planted.features("corpus")[1]) == fingerprint(description)
    there = pickle.loads(pickle.dumps(planted))  # on a node of another environment
    assert there.features("corpus")[1] == description


def test_the_engine_gets_what_it_was_given(planted: Run) -> None:
    assert planted.config.hardware.env["EQUAL"] == PLAIN
    args = engine_args(planted.config, "serve")
    assert (args["api_key"], args["load_format"], args["admin_api_key"]) == ("opensesame", PLAIN, 12345678)


def test_no_secret_is_in_the_launch_command_the_saved_settings_or_a_repr(planted: Run) -> None:
    assert not SEEN.search(launch_command(planted, [GQA]))
    assert not SEEN.search(json.dumps(masked(asdict(planted.config))))
    config = planted.config
    assert not SEEN.search(repr(config.hardware) + repr(config.engine.args) + repr(planted).replace("12345678", ""))


def test_no_secret_is_in_what_ray_keeps_of_its_jobs(planted: Run) -> None:
    from ray.data._internal.metadata_exporter import sanitize_for_struct
    from ray.train.v2._internal.state.schema import _to_json_serializable_value

    assert "opensesame" in json.dumps(sanitize_for_struct({"run": planted}))  # or this test says nothing
    assert not SEEN.search(json.dumps(sanitize_for_struct({"run": Sealed(planted)})))
    assert not SEEN.search(json.dumps(_to_json_serializable_value({"task": Sealed(planted)})))


def test_ray_gets_settings_sealed(planted: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What extract and train hand to Ray Data and Ray Train, told as these would."""
    import ray.data
    import ray.train.torch
    from ray.data._internal.metadata_exporter import sanitize_for_struct

    from eagle3_ray import extract
    from eagle3_ray.train import trainer

    given: list[Any] = []

    class Took(Exception):
        pass

    def take(*args: Any, **options: Any) -> None:
        given.append(options)
        raise Took

    monkeypatch.setattr(ray.data, "from_items", lambda *args, **options: SimpleNamespace(map_batches=take))
    monkeypatch.setattr(ray.train.torch, "TorchTrainer", take)
    corpus = SimpleNamespace(summary={})
    with pytest.raises(Took):
        list(extract._rows(planted, corpus, ["000000"]))  # type: ignore[arg-type]
    features = SimpleNamespace(files=Filesystem(planted.files.root))
    with pytest.raises(Took):
        trainer._fit(trainer.Task(planted.config, features, "d", {}))  # type: ignore[arg-type]
    assert len(given) == 2
    assert not SEEN.search(json.dumps(sanitize_for_struct(given)))
    inside = given[0]["fn_constructor_kwargs"]["run"].inside
    assert inside is planted and Extractor.__init__.__annotations__["run"]


def test_a_secret_for_engines_over_several_nodes_is_refused() -> None:
    over = ["hardware=two_nodes", "target.path=/no/such/folder", "store.root=/tmp/x"]
    for given in ("DB_PASSWD=opensesame", f"THING={SHAPES['github']}"):
        with pytest.raises(ConfigError, match=f"hardware.env.{given.partition('=')[0]}: the Ray job") as refused:
            open_run(compose(*over, f"+hardware.env.{given}"))
        assert given.partition("=")[2] not in str(refused.value)


def test_a_signed_url_neither_names_bad_rows_nor_decides_their_corpus(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl?sig=opensesame").write_text("no JSON\n")
    source = SimpleNamespace(source=f"file://{tmp_path}/p.jsonl?sig=opensesame", limit=None)
    (record,) = read_records(source)  # type: ignore[arg-type]
    assert record["error"].startswith("p.jsonl?sig=*** line 1 is not JSON")


def test_a_summary_holds_no_secret_and_all_its_figures(planted: Run) -> None:
    planted.write_json("x.json", {"reason": f"no {PLAIN} at ?sig=opensesame", "token": 5, "session": {"auth": 0.25}})
    assert planted.read_json("x.json") == {
        "reason": "no *** at ?sig=***",
        "token": 5,
        "session": {"auth": 0.25},
    }


# ---------------------------------------------------------------- what is printed


def test_what_is_printed_logged_and_raised_has_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_PASSPHRASE", PLAIN)
    before = sys.stdout, sys.stderr
    logger = logging.getLogger("test-printed")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    with pytest.raises(SystemExit) as ended, without_secrets(["+hardware.env.DB_PASSWD='opensesame'"]) as learn:
        learn({"engine": {"args": {"api_key": "of-the-settings"}}})
        print("a hush", "hush", "0123, opensesame and of-the-settings", flush=True)
        for part in ("hush", " hush 0", "123\n"):
            sys.stdout.write(part)
        print("\rprogress 1/2", end="", flush=True)
        logger.warning("logged %s", PLAIN)
        assert sys.stdout.encoding and sys.stdout.isatty() is False
        raise ValueError(f"because of {PLAIN}") from OSError("opensesame")
    logger.removeHandler(handler)
    assert ended.value.code == 1 and (sys.stdout, sys.stderr) == before
    out, err = capsys.readouterr()
    assert out == "a ***, *** and ***\n***\n\rprogress 1/2"
    assert "logged ***\n" in err and "OSError: ***" in err and "ValueError: because of ***" in err
    assert not re.search(f"opensesame|of-the-settings|{PLAIN}", out + err)


def test_an_exit_code_and_an_interrupt_pass_through() -> None:
    for error in (SystemExit(2), KeyboardInterrupt()):
        with pytest.raises(type(error)) as ended, without_secrets([]):
            raise error
        assert ended.value is error
