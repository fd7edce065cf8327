"""The section `storage` of a run file: disk space, S3, and the archive of finished stages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ebft_core.config.section import NonNegative, PositiveInt, Section

S3 = "s3://"
S3_PLACE = r"s3://[A-Za-z0-9._-]+(/[^?#]*)?"
"""A bucket and a prefix; nothing in which credentials could stand."""


class StorageConfig(Section):
    """Disk space, S3, and the archive. Nothing here changes a result or a stage's key."""

    local_workspace: str = Field(default="runs", min_length=1, pattern=r"^[^:]+$")
    """Folder of the working copy where `workspace` is on S3."""
    reserve_gb: NonNegative = 1.0
    """Free space, in GB, that must remain after the estimated need of the run."""
    archive: str | None = Field(default=None, pattern=rf"^({S3_PLACE}|[^:]+)$")
    """`s3://bucket/prefix` or a folder. Finished stages are copied there, and fetched from there instead of
    being computed where they are missing here. Where `workspace` is on S3, it is the archive itself."""
    checkpoint_minutes: NonNegative = 30.0
    """Minutes between copies of the newest checkpoint into the archive, from where another machine goes on;
    0: only when the run is stopped."""
    endpoint_url: str | None = Field(default=None, pattern=r"^https?://[^@]+$")
    """Address of an S3 service that is not AWS; unset: `AWS_ENDPOINT_URL`, else AWS. Credentials come from
    the AWS environment or its files, never from here."""
    region: str | None = None
    """Region of the S3 service; unset: the AWS environment, else `us-east-1`."""
    checksums: Literal["when_supported", "when_required"] | None = None
    """When requests carry S3's own checksums; older S3 services need `when_required`. Unset: the AWS
    environment."""
    silence_seconds: float = Field(default=30.0, gt=0.0)
    """Longest silence of the S3 service before a request is sent again."""
    parallel: Annotated[int, Field(ge=1, le=64)] = 8
    """Files transferred at a time."""
    deadline_minutes: PositiveInt = 120
    """Longest time for copying or fetching one stage, all attempts together."""
