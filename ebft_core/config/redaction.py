"""Keeps secrets out of errors, logs and saved configurations.

A value is a secret when its key says so (`password`, `token`, …) or when it looks like one: the
`user:password@` of an address, a `token=` in its query, or the well-known form of a provider's key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

REDACTED = "***"

_SECRET_WORDS = frozenset(
    {"apikey", "auth", "authorization", "bearer", "credential", "credentials", "passphrase", "passwd"}
    | {"password", "pat", "pwd", "secret", "secrets", "token"}
)
_SECRET_PAIRS = frozenset({("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key")})
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^/@:\s]*):[^/\s]*@")
_LONE_USERINFO = re.compile(r"(?P<scheme>https?://)[^/@:\s]+@")  # https://<token>@host
_PARAMETER = re.compile(
    r"(?i)\b(?P<name>(?:[a-z0-9]+[_-])*(?:password|passwd|token|secret|api[_-]?key|access[_-]?key|signature))=[^&\s;,]+"
)
_KNOWN_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|xox[abp]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)


def is_secret_key(key: str) -> bool:
    """Whether a key's name announces a secret: `mlflow_token`, `apiKey`, `AWS_SECRET_ACCESS_KEY`."""
    words = [word.lower() for word in _WORDS.findall(key)]
    return not _SECRET_WORDS.isdisjoint(words) or not _SECRET_PAIRS.isdisjoint(pairwise(words))


def redact_text(text: str) -> str:
    """The text with passwords in addresses, secret parameters and well-known key forms replaced."""
    text = _USERINFO.sub(rf"\g<scheme>\g<user>:{REDACTED}@", text)
    text = _LONE_USERINFO.sub(rf"\g<scheme>{REDACTED}@", text)
    text = _PARAMETER.sub(rf"\g<name>={REDACTED}", text)
    return _KNOWN_FORMS.sub(REDACTED, text)


def redact(value: Any, key: str | None = None) -> Any:
    """A copy of `value` (mappings, lists, scalars) without secrets; `key` is the name it stands under."""
    if key is not None and value not in (None, "") and is_secret_key(key):
        return REDACTED
    if isinstance(value, Mapping):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value
