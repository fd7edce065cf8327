"""S3, or a service that speaks its protocol, as a store.

Every object carries its own sha256 as metadata. Nothing relies on ETags (they are no digests of large or
encrypted objects) nor on conditional writes (not every service has them). boto3 repeats single requests;
whole transfers are repeated by `store.retried`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ebft_core.config import StorageConfig
from ebft_core.storage.s3_errors import as_trouble, as_user_error, s3_exceptions, status_of
from ebft_core.storage.store import ATTEMPTS, S3, STALE_SECONDS, Entry, StorageTrouble

logger = logging.getLogger(__name__)

SHA256 = "sha256"
PROBE = "write-test"
_PART_BYTES = 16 << 20
_PART_THREADS = 4
_DEFAULT_REGION = "us-east-1"


class S3Store:
    """`s3://bucket/prefix`. Credentials are found as AWS tools find them; none are read or shown here.

    Args:
        location: bucket and prefix.
        config: endpoint, region, checksum mode.
        attempts: how often a single request is tried.
    """

    def __init__(self, location: str, config: StorageConfig, *, attempts: int = ATTEMPTS) -> None:
        bucket, _, prefix = location.removeprefix(S3).partition("/")
        self.bucket = bucket
        self.prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.location = f"{S3}{bucket}/{self.prefix}".rstrip("/")
        self._config = config
        self._client = _client(config, attempts=attempts)

    def check(self, where: str, *, write: bool) -> None:
        """See `Store`; says within seconds what is wrong: credentials, bucket, access or address."""
        quick = _client(self._config, attempts=3)
        exceptions = s3_exceptions()
        try:
            quick.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=1)
            if write:
                quick.put_object(Bucket=self.bucket, Key=self.prefix + PROBE, Body=b"")
        except exceptions as error:
            raise as_user_error(error, where, self.location, quick.meta.endpoint_url) from error

    def list(self, prefix: str) -> list[Entry]:
        """See `Store`."""
        with self._trouble(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix + prefix
            )
            found = [item for page in pages for item in page.get("Contents", [])]
        entries = (
            Entry(item["Key"].removeprefix(self.prefix), item["Size"], None, item["LastModified"].timestamp())
            for item in found
        )
        return sorted(entries, key=lambda entry: entry.name)

    def stat(self, name: str) -> Entry | None:
        """See `Store`."""
        from botocore.exceptions import ClientError

        with self._trouble(name):
            try:
                head = self._client.head_object(Bucket=self.bucket, Key=self.prefix + name)
            except ClientError as error:
                if status_of(error) == HTTPStatus.NOT_FOUND:
                    return None
                raise
        metadata = {
            key.lower(): value for key, value in head["Metadata"].items()
        }  # some services write Sha256
        return Entry(name, head["ContentLength"], metadata.get(SHA256), head["LastModified"].timestamp())

    def put(self, name: str, path: Path, sha256: str) -> None:
        """See `Store`; in several parts where the file is large.

        A service that ignores boto3's checksums still compares what came with an MD5 in the header.
        """
        key, metadata = self.prefix + name, {SHA256: sha256}
        with self._trouble(name):
            if path.stat().st_size <= _PART_BYTES:
                content = path.read_bytes()
                md5 = base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
                self._client.put_object(
                    Bucket=self.bucket, Key=key, Body=content, ContentMD5=md5, Metadata=metadata
                )
                return
            extra = {"Metadata": metadata}
            try:
                self._client.upload_file(str(path), self.bucket, key, ExtraArgs=extra, Config=_transfer())
            except s3_exceptions():
                # If only the answer to the last request was lost, the upload is no more, and repeats fail.
                there = self.stat(name)
                if there is None or (there.bytes, there.sha256) != (path.stat().st_size, sha256):
                    raise

    def get(self, name: str, path: Path) -> None:
        """See `Store`; in several parts where the object is large."""
        key = self.prefix + name
        with self._trouble(name):
            found = self._client.get_object(Bucket=self.bucket, Key=key)
            with contextlib.closing(found["Body"]) as body:
                if found["ContentLength"] <= _PART_BYTES:
                    path.write_bytes(body.read())
                    return
            self._client.download_file(self.bucket, key, str(path), Config=_transfer())

    def delete(self, name: str) -> None:
        """See `Store`."""
        with self._trouble(name):
            self._client.delete_object(Bucket=self.bucket, Key=self.prefix + name)

    def stale(self) -> Sequence[str]:
        """See `Store`."""
        return [upload["Key"].removeprefix(self.prefix) for upload in self._stale_uploads()]

    def abort_stale(self) -> None:
        """See `Store`."""
        for upload in self._stale_uploads():
            try:
                with self._trouble(upload["Key"]):
                    self._client.abort_multipart_upload(
                        Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
            except StorageTrouble as trouble:
                logger.info("a stale upload was not aborted: %s", trouble.reason)

    def _stale_uploads(self) -> Sequence[Mapping[str, Any]]:
        """Unfinished uploads that are old; none of a service that cannot list them: it is left alone."""
        oldest = datetime.now(UTC) - timedelta(seconds=STALE_SECONDS)
        try:
            with self._trouble("unfinished uploads"):
                listed = self._client.list_multipart_uploads(Bucket=self.bucket, Prefix=self.prefix)
        except StorageTrouble as trouble:
            logger.info("stale uploads were not looked for: %s", trouble.reason)
            return []
        return [upload for upload in listed.get("Uploads", []) if upload["Initiated"] < oldest]

    @contextlib.contextmanager
    def _trouble(self, name: str) -> Iterator[None]:
        exceptions = s3_exceptions()
        try:
            yield
        except exceptions as error:
            raise as_trouble(error, f"{self.location}/{name}") from error


def _client(config: StorageConfig, *, attempts: int) -> Any:
    import boto3
    from botocore.config import Config

    own_address = (
        config.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    checksums = (
        {}
        if config.checksums is None
        else {
            "request_checksum_calculation": config.checksums,
            "response_checksum_validation": config.checksums,
        }
    )
    settings = Config(
        retries={"total_max_attempts": attempts, "mode": "standard"},
        connect_timeout=min(10.0, config.silence_seconds),
        read_timeout=config.silence_seconds,
        max_pool_connections=config.parallel * _PART_THREADS,
        s3={"addressing_style": "path" if own_address else "auto"},
        **checksums,
    )
    session = boto3.session.Session()
    region = config.region or session.region_name or _DEFAULT_REGION
    return session.client("s3", endpoint_url=config.endpoint_url, region_name=region, config=settings)


def _transfer() -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(
        multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=_PART_THREADS
    )
