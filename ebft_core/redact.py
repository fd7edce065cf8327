"""Takes secrets out of a configuration before it is written, shown or hashed."""

from __future__ import annotations

import re
from typing import Any

MASK = "***"
_SECRET_WORDS = {"password", "passwd", "secret", "token", "credential", "credentials", "apikey"}
_SECRET_PAIRS = ("api_key", "access_key", "private_key")
_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/@\s]+@")
_QUERY = re.compile(
    r"(?P<key>[?&](?:[^=&]*(?:token|secret|password|key|signature)[^=&]*)=)[^&\s]+", re.IGNORECASE
)


def redact(value: Any, key: str = "") -> Any:
    """A copy of a JSON-like value without secrets.

    Values under keys such as `password`, `hf_token` or `api_key` become `***`; so do the user part of
    every URL (`https://user:pw@host`) and query values such as `?token=…`.
    """
    if isinstance(value, dict):
        return {name: redact(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [redact(inner, key) for inner in value]
    if value is not None and _is_secret(key):
        return MASK
    if isinstance(value, str):
        return redact_text(value)
    return value


def redact_text(text: str) -> str:
    """The text without credentials in URLs."""
    return _QUERY.sub(rf"\g<key>{MASK}", _USERINFO.sub(rf"\g<scheme>{MASK}@", text))


def _is_secret(key: str) -> bool:
    lowered = key.lower().replace("-", "_").replace(".", "_")
    return bool(_SECRET_WORDS & set(lowered.split("_"))) or any(pair in lowered for pair in _SECRET_PAIRS)
