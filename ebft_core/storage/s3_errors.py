"""What boto3 raises, in words: an error of the user's before a run, trouble during it.

Texts are made here and not taken from boto3, whose messages may hold access keys.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from ebft_core.config.redaction import redact_text
from ebft_core.errors import UserError
from ebft_core.storage.store import StorageTrouble

_DENIED = frozenset(
    {
        "AccessDenied",
        "403",
        "Forbidden",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
    }
)
_NO_BUCKET = frozenset({"NoSuchBucket"})
_HARMED_ON_THE_WAY = frozenset({"SignatureDoesNotMatch"})
"""What a service says of a request with a flipped byte; wrong keys are found out before anything is sent."""


def s3_exceptions() -> tuple[type[Exception], ...]:
    """Everything that a call of boto3 raises because of the other side, the network or the credentials."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

    return (Boto3Error, BotoCoreError, ClientError, HTTPClientError, OSError)


def as_trouble(error: Exception, what: str) -> StorageTrouble:
    """The same as trouble of a store; `what` names the object."""
    status = status_of(error)
    lasting = (
        _code(error) in (_DENIED | _NO_BUCKET) - _HARMED_ON_THE_WAY
        or status == HTTPStatus.NOT_FOUND
        or _without_credentials(error)
    )
    return StorageTrouble(f"{redact_text(what)}: {_words(error)}", passing=not lasting)


def as_user_error(error: Exception, where: str, location: str, endpoint: str) -> UserError:
    """The same as an error of the user's, at config key `where`."""
    endpoint = redact_text(endpoint)
    if _without_credentials(error):
        return UserError(
            "no credentials for S3",
            where=where,
            value=location,
            expected="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile, or a role of the machine",
        )
    if _code(error) in _NO_BUCKET or status_of(error) == HTTPStatus.NOT_FOUND:
        return UserError(
            "no such bucket",
            where=where,
            value=location,
            hint=f"asked {endpoint}; is storage.endpoint_url right?",
        )
    if _code(error) in _DENIED or status_of(error) == HTTPStatus.FORBIDDEN:
        return UserError(
            "access to the bucket is denied",
            where=where,
            value=location,
            expected="credentials that may list, read and (for an archive) write there",
            hint=f"{endpoint} answered {_code(error)}",
        )
    if status_of(error) is None:
        return UserError(
            "the S3 service cannot be reached",
            where=where,
            value=location,
            expected=f"an answer from {endpoint}",
            hint=f"{_words(error)}; storage.endpoint_url or AWS_ENDPOINT_URL names another address",
        )
    return UserError(
        "the S3 service refuses", where=where, value=location, hint=f"{endpoint}: {_words(error)}"
    )


def status_of(error: BaseException | None) -> int | None:
    """HTTP status of the answer, also where boto3 wrapped it; None if there was no answer."""
    response = _response(error)
    return None if response is None else int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _response(error: BaseException | None) -> dict[str, dict[str, Any]] | None:
    from botocore.exceptions import ClientError

    while error is not None:
        if isinstance(error, ClientError):
            return dict(error.response)
        error = error.__cause__ or error.__context__
    return None


def _code(error: Exception) -> str:
    response = _response(error)
    return "" if response is None else str(response.get("Error", {}).get("Code", ""))


def _without_credentials(error: Exception) -> bool:
    from botocore.exceptions import CredentialRetrievalError, NoCredentialsError, PartialCredentialsError

    return isinstance(error, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError)


def _words(error: Exception) -> str:
    status = status_of(error)
    if status is None:
        return type(error).__name__
    return f"HTTP {status} {_code(error)}".rstrip()
