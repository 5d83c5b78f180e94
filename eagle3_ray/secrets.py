"""Values that must not be seen, and text without them: for error messages, logs and saved configurations."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

HIDDEN = "***"
_NAMES = re.compile(r"(?i:secret|password|credential)|(?:^|_)(?i:key|token)(?:_|$)|[a-z](?:Key|Token)$")
_PATTERNS = (
    re.compile(r"(?<=://)[^/@\s'\"]+(?=@)"),  # user:password of a URL
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"),  # an access key id of AWS
    # what signs a request, in its headers, its URL or the XML of an answer
    re.compile(
        r"(?i)(?<=credential=)[^\s&,\"']+|(?<=signature=)[^\s&,\"']+|(?<=security-token=)[^\s&,\"']+"
        r"|(?<=<awsaccesskeyid>)[^<]+|(?<=<signatureprovided>)[^<]+|(?<=bearer )\S+|(?<=basic )\S+"
    ),
)


def clean(text: str, options: dict[str, Any]) -> str:
    """The text without the secrets of `options`, of the environment and of AWS's files, and without signatures."""
    for secret in sorted({*_values(options), *_surrounding()}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _without_patterns(text)


def masked(value: Any, name: str = "") -> Any:
    """Plain data with every string hidden whose name says that it is a secret."""
    if isinstance(value, dict):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(inner, name) for inner in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and is_secret(name) else _without_patterns(value)


def is_secret(name: str) -> bool:
    """Whether the value of this name must not be seen."""
    return bool(_NAMES.search(name))


def _without_patterns(text: str) -> str:
    for pattern in _PATTERNS:
        text = pattern.sub(HIDDEN, text)
    return text


def _values(options: dict[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _values(value)
        elif isinstance(value, str) and value and is_secret(name):
            yield value


def _surrounding() -> Iterator[str]:
    """Where else the AWS chain and fsspec find credentials."""
    import botocore.session
    import fsspec

    yield from (value for value in _values(dict(os.environ)) if len(value) >= 8)  # TOKEN=1 is nobody's secret
    yield from _values(fsspec.config.conf)
    with suppress(Exception):  # a broken file; this must not hide the error that is being told
        yield from _values(botocore.session.Session().full_config["profiles"])
