"""Values that must not be seen, and text without them: for all that is printed, logged, written or shown by Ray.

A value is secret by its name (api_key), by its shape (hf_…, the signature of a URL, random characters), or because the
environment, AWS's files or fsspec's configuration hold it under such a name. Settings are `marked` where they are
opened, once: what depends on the environment would otherwise differ between nodes, and a fingerprint with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

HIDDEN = "***"
# Characters of a value that is looked for in texts: TOKEN=1 is nobody's secret. Settings are known to be ours
LEAST, LEAST_SETTING = 8, 4

# ---------------------------------------------------------------- by name

_ANYWHERE = re.compile(  # in a name without its separators
    r"secret|password|passwd|passphrase|passcode|credential|apikey|accesskey|privatekey|encryptionkey|signingkey|"
    r"authkey|authtoken|accesstoken|authorization|cookie|bearer|connectionstring"
)
_AS_A_WORD = {"key", "token", "pass", "pwd", "auth", "auths", "oauth", "pat", "sas", "sig", "signature", "session"}
_AS_A_WORD |= {"jwt", "otp", "cred", "creds"}
_NOT = re.compile(  # what such a word also says: key_value_heads, mask_token, forward_pass, auth_mode
    r"(?<![a-z])(?:(?:cache|primary|foreign|partition|sort|public|full|kv|per|first|last|next|new|inter|max|min"
    r"|num|to|mask|pad|eos|bos|unk|sep|cls|stop|special|image|media|draft|forward|backward|streaming)"
    r"_(?:key|token|pass|session)"
    r"|key_values?|pass_(?=[a-z])"
    r"|(?:key|token|auth|session|signature|pat|sas|sig)_(?:ids?|map|maps|counts?|limit|len|length|size|num|types?"
    r"|mode|method|names?|files?|paths?|dir|url|uri|host|sock|socket|cache|dtype|usage|ratio|budget|latency|interval"
    r"|timeout|probe|idle|block|swap|prob|oracle|assert|policy|version|errors?|exception|warning|desktop|class|manager"
    r"|radix|distribution|activation|embeddings?))(?![a-z])"
)


def is_secret(name: str) -> bool:
    """Whether the value of this name must not be seen, however it is written: api_key, apiKey, API-KEY, APIKEY."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    name = re.sub(r"[^a-z0-9]+", "_", name)
    if _ANYWHERE.search(name.replace("_", "")):
        return True
    return any(word.strip("0123456789") in _AS_A_WORD for word in _NOT.sub("", name).split("_"))


# ---------------------------------------------------------------- by shape

_TOKEN = re.compile(
    r"""(?x)(?<![A-Za-z0-9])(?:
    hf_[A-Za-z0-9]{16,}                                                     # Hugging Face
    | sk-(?:ant|proj|or|svcacct|admin)-[\w-]{8,} | sk-(?=[\w-]{0,99}\d)[\w-]{16,}  # Anthropic, OpenAI and their like
    | gh[oprsu]_[A-Za-z0-9]{16,} | github_pat_\w{16,}
    | gl(?:pat|oas|dt|rt|rtr|ptt|ft|imt|agent|soat|cbt|ffct)-[\w-]{16,}     # GitLab
    | xox[a-z](?:\.[a-z]+)?-[\w-]{8,} | xapp-[\w-]{16,}                     # Slack
    | (?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}\b                                # AWS's key ids
    | AIza[\w-]{30,} | ya29\.[\w-]+ | GOCSPX-[\w-]{16,}                     # Google
    | eyJ[\w-]{6,}\.[\w-]{4,}(?:\.[\w-]*)*                                  # a JWT
    | SG\.[\w-]{16,}\.[\w-]{16,} | key-[0-9a-f]{32}                         # SendGrid, Mailgun
    | npm_[A-Za-z0-9]{20,} | pypi-(?=[\w-]{0,99}[A-Z])[\w-]{32,} | dckr_pat_[\w-]{16,}
    | do[opr]_v1_[0-9a-f]{20,} | dapi[0-9a-f]{32} | hv[bsr]\.[\w-]{20,}     # DigitalOcean, Databricks, Vault
    | (?:sk|pk|rk)_(?:live|test)_\w{16,} | whsec_[\w+/]{16,}                # Stripe
    | nvapi-[\w-]{20,} | r8_[A-Za-z0-9]{20,} | gsk_[A-Za-z0-9]{20,} | pplx-[A-Za-z0-9]{20,} | xai-[A-Za-z0-9]{20,}
    | lsv2_[a-z]{2}_\w{16,} | tskey-[a-z]+-[\w-]{8,} | shp(?:at|ca|pa|ss)_[0-9a-fA-F]{20,}
    | \d{8,10}:AA[\w-]{30,}                                                 # a bot of Telegram
    )"""
)
_PATTERNS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:(?!-----END)[\s\S])*(?:-----END [A-Z ]*-----)?"),
    re.compile(r"(?<=://)[^/\s'\"?#]+(?=@)"),  # user:password of a URL
    re.compile(r"(?<=hooks\.slack\.com/)\w+/[\w/]+|(?<=/api/webhooks/)[\w/-]+"),  # Slack's, Discord's
    re.compile(r"(?i)(?<=bearer )\S+|(?<=basic )[\w+/=-]{6,}"),
    re.compile(  # such headers, whatever the scheme, as text and as Python or JSON writes them
        r"(?i)(?<=authorization)((?>['\"]?\s*[:=]\s*b?['\"]?))(?!(?:[\w-]+\s+)?(?:\*\*\*|credential=))"
        r"((?:bearer|basic|digest|token|apikey|negotiate|sharedkey)\s+)?[^'\"\r\n]+"
    ),
    re.compile(r"(?i)(?<=cookie)((?>['\"]?\s*:\s*b?['\"]?))(?!\*\*\*)[^'\"\r\n]+"),
    re.compile(r"(?i)(?<=<awsaccesskeyid>)[^<]+|(?<=<signatureprovided>)[^<]+"),  # in the XML of an answer
    _TOKEN,
)
# A name and what parts it from its value: name=, "name":, --name, {name:, and, a line of its own, name:
_NAMED = re.compile(
    r"(?m)(?:^[ \t]*(?:- )?(?P<line>[A-Za-z][\w.-]{0,120}):[ \t]+"
    r"|(?<=[{,])[ ]?(?P<flow>[A-Za-z][\w.-]{0,120}):[ ]?(?=[^\s:])"
    r"|(?P<quoted>(?<=['\"])[A-Za-z][\w.-]{0,120})['\"]\s*:\s*b?"
    r"|(?<![\w.])(?P<plain>[A-Za-z][\w.-]{0,120})=b?"
    r"|(?<!\S)--(?P<flag>[a-z][a-z0-9-]{0,120})[ ]+(?!-|[a-z]{1,7}\b))"  # `--api-key has no effect`
)
_QUOTED = re.compile(r"'(?:\\.|[^'\\])+'?|\"(?:\\.|[^\"\\])+\"?")
_PLAIN = re.compile(r"(?:[^\s&'\"<>,;]|[,;](?!\s|$|[\w.-]+[=:]))+")
_REST = re.compile(r"\S.*")  # of a line
_WORD = re.compile(r"[A-Za-z0-9+/_-]{20,}={0,2}")
_PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")  # Qwen | 3 | 30 | B
_DIGEST = re.compile(r"[0-9a-f]+|[0-9A-F]+")


def blotted(text: str) -> str:
    """The text without what is secret by its shape. A function of the text alone."""
    for pattern in _PATTERNS:
        text = pattern.sub(lambda found: "".join(part or "" for part in found.groups()) + HIDDEN, text)
    return _WORD.sub(lambda found: _random_blotted(found[0]), _named_blotted(text))


def _named_blotted(text: str) -> str:
    """Without the values that follow their names."""
    kept, at = [], 0
    for found in _NAMED.finditer(text):
        kind, name = found.lastgroup, str(found[str(found.lastgroup)])
        # `key` alone is also an object's in the store, `TokenError: …` the end of a traceback
        of_object = name.lower() == "key" and kind not in ("line", "flow") and text[found.start() - 1] not in "?&;"
        if found.end() < at or not is_secret(name) or of_object or name.endswith(("Error", "Exception", "Warning")):
            continue
        value = _QUOTED.match(text, found.end()) or (_REST if kind == "line" else _PLAIN).match(text, found.end())
        if value and HIDDEN not in value[0]:
            quote = value[0][0] if value[0][0] in "'\"" else ""
            kept += [text[at : found.end()], quote, HIDDEN, quote]
            at = value.end()
    return "".join(kept) + text[at:]


def _random_blotted(word: str) -> str:
    """HIDDEN for random characters, which a path, a name or a digest are not."""
    if re.fullmatch("[A-Za-z0-9+][A-Za-z0-9+/]{39}", word):  # as AWS's secret keys, of which some hold words
        parts, most = [word], 3.3
    else:
        parts, most = [word] if word[0] != "/" and ("=" in word or "+" in word) else re.split("(/)", word), 2.4
    return "".join(HIDDEN if _is_random(part, most) else part for part in parts)


def _is_random(part: str, most: float) -> bool:
    """Whether case, letters and digits change more often than in anything with a meaning: after fewer than `most`
    characters.

    Of 75,000 long words in the sources of SGLang, Ray, Transformers and this project 10 are taken for secrets, of as
    many file names none, of random tokens of 32 characters 9 in 10.
    """
    runs = [run for run in re.findall("[A-Za-z0-9]+", part) if not _DIGEST.fullmatch(run)]
    length = sum(map(len, runs))
    if length < 20 or len(runs) > 1 + length / 12:
        return False
    mean = length / sum(len(_PIECE.findall(run)) for run in runs)
    text = "".join(runs)
    lower, upper, digits = (any(map(kind, text)) for kind in (str.islower, str.isupper, str.isdigit))
    if lower and upper and digits:
        return mean < most
    return digits and len(runs) == 1 and length >= 24 and mean < 3.0


# ---------------------------------------------------------------- by equality

Data = TypeVar("Data")


def clean(data: Data, options: dict[str, Any] | None = None) -> Data:
    """A text, or plain data with all its texts, without what is secret by shape, in `options`, or in what surrounds
    this process."""
    return _mapped(data, known(options or {}))


def known(options: dict[str, Any]) -> list[str]:
    """The secrets of `options` and of what surrounds this process, the longest first."""
    given = {value for value in secrets_of(options) if len(value) >= LEAST_SETTING}
    return sorted(given | set(_surrounding()), key=len, reverse=True)


def without(text: str, secrets: Iterable[str]) -> str:
    """The text without these secrets, and without what is one by its shape."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return blotted(text)


def masked(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as they may be shown: the same keys, but every secret hidden."""
    return _mapped(_mapped(settings, (), by_name=True), known(settings))


def secrets_of(data: Any, name: str = "") -> Iterator[str]:
    """The values of plain data that are secret by their names, or were marked so."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from secrets_of(value, name if is_secret(name) else str(key))
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from secrets_of(value, name)
    elif isinstance(data, Secret) or (data and not isinstance(data, bool) and is_secret(name)):
        yield str(data)


def _mapped(data: Any, secrets: Iterable[str], by_name: bool = False, name: str = "") -> Any:
    if isinstance(data, dict):
        return {
            _mapped(key, secrets): _mapped(value, secrets, by_name, name if is_secret(name) else str(key))
            for key, value in data.items()
        }
    if isinstance(data, (list, tuple)):
        return [_mapped(value, secrets, by_name, name) for value in data]
    if isinstance(data, Secret) or (by_name and data and not isinstance(data, bool) and is_secret(name)):
        return HIDDEN
    return without(data, secrets) if isinstance(data, str) else data


def _surrounding() -> Iterator[str]:
    """Where else the AWS chain, fsspec and engines find credentials."""
    import botocore.session
    import fsspec

    # PWD is no password, and XAUTHORITY, SSH_AUTH_SOCK name files
    named = {name: value for name, value in os.environ.items() if name not in ("PWD", "OLDPWD")}
    yield from (value for value in secrets_of(named) if len(value) >= LEAST and not os.path.exists(value))
    yield from secrets_of(fsspec.config.conf)
    with suppress(Exception):  # a broken file; this must not hide the error that is being told
        yield from secrets_of(botocore.session.Session().full_config["profiles"])


# ---------------------------------------------------------------- settings on their way


class Secret(str):
    """A setting that holds a secret: itself where it is used, and `shown` where it is shown."""

    shown = HIDDEN

    def __repr__(self) -> str:
        return repr(self.shown)


def marked(settings: Any, secrets: Iterable[str], name: str = "") -> Any:
    """The settings with a Secret in place of every text that is one or holds one, by name, shape or equality."""
    if isinstance(settings, dict):
        return {key: marked(value, secrets, name if is_secret(name) else str(key)) for key, value in settings.items()}
    if isinstance(settings, (list, tuple)):
        return [marked(value, secrets, name) for value in settings]
    if not isinstance(settings, str):
        return settings
    secret = Secret(settings)
    secret.shown = HIDDEN if settings and is_secret(name) else without(settings, secrets)
    return settings if secret.shown == settings else secret


def described(settings: Any) -> Any:
    """Settings for a fingerprint: without what is secret by its name, and of other values only what is none."""
    if isinstance(settings, dict):
        return {key: described(value) for key, value in settings.items() if not is_secret(str(key))}
    if isinstance(settings, (list, tuple)):
        return [described(value) for value in settings]
    if isinstance(settings, Secret):
        return settings.shown
    return blotted(settings) if isinstance(settings, str) else settings


class Sealed(Generic[Data]):
    """An argument for Ray Data or Ray Train, which keep every value of a dataclass in the job's metadata."""

    def __init__(self, inside: Data) -> None:
        self.inside = inside
