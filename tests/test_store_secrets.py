"""No secret in an error, a log, a repr or a saved configuration."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import compose

from eagle3_ray.capture import deciding_args
from eagle3_ray.config import StoreConfig
from eagle3_ray.report import MEASURED, summarise
from eagle3_ray.run import Run
from eagle3_ray.secrets import clean, masked
from eagle3_ray.store import s3
from eagle3_ray.store.filesystem import Filesystem, StoreError

SECRET = "hush-hush-0123"


def error_of(files: Filesystem, text: str) -> str:
    """An error that says `text`, as a log shows it; its cause says it too."""
    with pytest.raises(StoreError) as refused, files._errors("read", "key"):
        try:
            raise ConnectionError(text)
        except ConnectionError as error:
            raise ValueError(f"because of {text}") from error
    return "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "options",
    [
        {"secret": SECRET},
        {"key": SECRET},
        {"token": SECRET},
        {"password": SECRET},
        {"client_kwargs": {"aws_secret_access_key": SECRET}},
        {"client_kwargs": {"aws_session_token": SECRET}},
        {"s3_additional_kwargs": {"SSECustomerKey": SECRET}},
    ],
)
def test_secrets_of_the_storage_options_are_shown_nowhere(options: dict[str, Any]) -> None:
    files = Filesystem("s3://bucket/root", options)
    shown = error_of(files, f"client got {SECRET}")
    assert SECRET not in shown and "client got ***" in shown and "store.root is 's3://bucket/root'" in shown
    assert SECRET not in json.dumps(masked(options))
    assert SECRET not in repr(StoreConfig("s3://bucket/root", options)) + repr(files)


@pytest.mark.parametrize("where", ["endpoint_url", "proxies"])
def test_the_password_of_an_endpoint_or_a_proxy_is_shown_nowhere(where: str) -> None:
    url = f"http://user:{SECRET}@host:1"
    options = {"endpoint_url": url} if where == "endpoint_url" else {"config_kwargs": {"proxies": {"https": url}}}
    shown = error_of(Filesystem("s3://bucket/root", options), f"cannot reach {url}")
    assert SECRET not in shown and "cannot reach http://***@host:1" in shown
    assert "http://***@host:1" in json.dumps(masked(options))


def test_secrets_of_the_environment_and_of_profiles_are_blotted_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "from-the-environment")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id-of-the-environment")
    (tmp_path / "credentials").write_text(
        "[other]\naws_access_key_id = id-of-a-profile\naws_secret_access_key = of/a+profile"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    shown = error_of(
        Filesystem("s3://bucket/root"),
        "from-the-environment, id-of-the-environment, id-of-a-profile, of/a+profile, and what is none",
    )
    assert "because of ***, ***, ***, ***, and what is none" in shown


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("h/k?X-Amz-Credential=AB%2F1&X-Amz-Signature=abc&x=1", "h/k?X-Amz-Credential=***&X-Amz-Signature=***&x=1"),
        ("h/k?AWSAccessKeyId=AKIA0123456789ABCDEF&Expires=1", "h/k?AWSAccessKeyId=***&Expires=1"),
        ("X-Amz-Security-Token=FwoG/abc== HTTP", "X-Amz-Security-Token=*** HTTP"),
        ("AWS4-HMAC-SHA256 Credential=AB/1/us, Signature=0a1b", "AWS4-HMAC-SHA256 Credential=***, Signature=***"),
        ("'Authorization': 'Bearer abc.def'", "'Authorization': 'Bearer ***"),
        ("<AWSAccessKeyId>abc</AWSAccessKeyId>", "<AWSAccessKeyId>***</AWSAccessKeyId>"),
        ("<SignatureProvided>x=</SignatureProvided>", "<SignatureProvided>***</SignatureProvided>"),
        ("s3://key:secret@bucket/x", "s3://***@bucket/x"),
        *[(text, text) for text in ("The signature does not match", "s3://bucket/a@b", "hardware.max_tokens=1")],
    ],
)
def test_what_signs_a_request_is_blotted_out_and_all_else_stays(text: str, left: str) -> None:
    assert clean(text, {}) == left


@pytest.mark.parametrize("root", ["s3://key:hush-hush-0123@bucket/p", "s3://hush-hush-0123@bucket"])
def test_a_root_with_credentials_is_refused_without_showing_them(root: str) -> None:
    with pytest.raises(StoreError, match=r"store.root must not hold credentials, seen 's3://\*\*\*@bucket") as refused:
        Filesystem(root)
    assert SECRET not in "".join(traceback.format_exception(refused.value))


def test_a_repeated_failure_is_logged_without_secrets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(s3, "WAIT_S", 0.01)
    files = Filesystem("s3://bucket/root", {"secret": SECRET})
    files.patience_s, tries = 0.5, []

    def fail() -> None:
        tries.append(1)
        raise ConnectionError(f"refused {SECRET}")

    with pytest.raises(ConnectionError):
        files._s3._tried(fail)
    assert len(tries) > 2 and "refused ***" in caplog.text and SECRET not in caplog.text


def test_the_saved_configuration_of_a_run_holds_no_secret(tmp_path: Path) -> None:
    config = compose(f"store.root={tmp_path}", "run=r")
    config.store.storage_options = {
        "secret": SECRET,
        "client_kwargs": {"aws_session_token": SECRET},
        "endpoint_url": "u",
    }
    config.hardware.env = {"HF_TOKEN": SECRET, "THREADS": "2"}
    config.prompts.source = f"s3://key:{SECRET}@bucket/p.jsonl"
    evaluation = dict.fromkeys([*MEASURED, "conversations", "engine"])
    run = Run(config, Filesystem(str(tmp_path)), {}, {}, None)  # type: ignore[arg-type]
    features, corpus = SimpleNamespace(folder="features/x"), SimpleNamespace(summary={"prompts": 1})
    summary = summarise(run, corpus, features, "drafters/x", evaluation, None, {})  # type: ignore[arg-type]
    saved = (tmp_path / "runs" / "r" / "config.json").read_text()
    assert SECRET not in saved + json.dumps(summary) and summary["exclusive_create"] is True
    kept = json.loads(saved)
    assert kept["store"]["storage_options"]["endpoint_url"] == "u" and kept["hardware"]["env"]["THREADS"] == "2"
    assert {k: v for k, v in kept["train"].items()} == asdict(config)["train"]
    assert SECRET not in repr(config.store)
    described = json.dumps(deciding_args(config, "capture"))
    assert SECRET not in described and '"THREADS": "2"' in described
