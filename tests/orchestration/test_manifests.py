"""Folders are whole or absent: every changed byte is seen, and no kill leaves half a folder that verifies."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import pytest

from ebft_core.manifests import StageRef, commit_folder, digest_files, read_meta, verify_folder

FILES = {"a.bin": bytes(range(64)), "sub/b.txt": b"hello", "empty": b""}


def stage(folder: Path) -> Path:
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    target = tmp_path / "stages" / "key"
    commit_folder(stage(tmp_path / "staging"), target, schema="test/1", meta={"rows": 3})
    return target


def test_reference_survives_json_and_names_the_folder(committed: Path) -> None:
    ref = verify_folder(committed)
    assert ref is not None
    assert StageRef.from_json(ref.to_json()) == ref
    assert ref.path == committed
    assert ref.bytes == sum(map(len, FILES.values()))
    assert read_meta(committed) == {"rows": 3}


def test_every_single_flipped_bit_of_every_file_is_noticed(committed: Path) -> None:
    for path in [p for p in committed.rglob("*") if p.is_file()]:
        content = path.read_bytes()
        for index in range(len(content)):
            changed = bytearray(content)
            changed[index] ^= 1 << (index % 8)
            path.write_bytes(changed)
            assert verify_folder(committed) is None, f"{path.name}, byte {index}"
        path.write_bytes(content)
    assert verify_folder(committed) is not None


@pytest.mark.parametrize("damage", ["added", "removed", "truncated", "linked", "no manifest"])
def test_other_damage_is_noticed_even_without_hashing(committed: Path, damage: str) -> None:
    if damage == "added":
        (committed / "sub" / "extra").write_bytes(b"")
    elif damage == "removed":
        (committed / "empty").unlink()
    elif damage == "truncated":
        (committed / "a.bin").write_bytes(FILES["a.bin"][:-1])
    elif damage == "linked":
        shutil.move(committed / "a.bin", committed.parent / "elsewhere")
        (committed / "a.bin").symlink_to(committed.parent / "elsewhere")
    else:
        (committed / "manifest.json").unlink()
    assert verify_folder(committed, deep=False) is None


def test_what_cannot_be_committed_is_refused(tmp_path: Path) -> None:
    folder = stage(tmp_path / "staging")
    (folder / "link").symlink_to(folder / "a.bin")
    with pytest.raises(ValueError, match="regular files"):
        commit_folder(folder, tmp_path / "target", schema="test/1", meta={})
    assert not (tmp_path / "target").exists()


def test_a_verified_folder_is_kept_and_a_damaged_one_replaced(tmp_path: Path, committed: Path) -> None:
    before = verify_folder(committed)
    second = stage(tmp_path / "second")
    (second / "a.bin").write_bytes(b"other")
    assert commit_folder(second, committed, schema="test/1", meta={}) == before
    assert (committed / "a.bin").read_bytes() == FILES["a.bin"]

    (committed / "a.bin").write_bytes(b"damaged")
    third = stage(tmp_path / "third")
    ref = commit_folder(third, committed, schema="test/1", meta={"rows": 3})
    assert verify_folder(committed) == ref == before
    assert not list(committed.parent.glob(".broken*"))


@pytest.mark.parametrize("previous", ["nothing", "damaged"])
def test_killed_at_any_system_call_leaves_all_or_nothing(tmp_path: Path, previous: str) -> None:
    """The committing process is killed at its 1st, 2nd, … call that touches the disk's state."""
    expected = None
    outcomes = []
    for attempt in range(1, 200):
        target = tmp_path / f"target{attempt}"
        if previous == "damaged":
            commit_folder(stage(tmp_path / f"old{attempt}"), target, schema="test/1", meta={"rows": 3})
            (target / "a.bin").write_bytes(b"damaged")
        staging = stage(tmp_path / f"staging{attempt}")
        finished = _commit_in_child(staging, target, kill_at=attempt)
        ref = verify_folder(target)
        outcomes.append(ref is not None)
        if ref is not None:
            expected = expected or ref.sha256
            assert ref.sha256 == expected
            assert {p: (target / p).read_bytes() for p in FILES} == FILES
        if finished:
            break
    assert finished, "the child was never left alone"
    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert len(outcomes) > 20, "too few points of interruption to prove anything"


def _commit_in_child(staging: Path, target: Path, *, kill_at: int) -> bool:
    """Commit in a fork that kills itself at its `kill_at`-th touch of the disk; True if it came through."""
    pid = os.fork()
    if pid == 0:
        calls = 0

        def count(event: str) -> None:
            nonlocal calls
            if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "fsync"):
                calls += 1
                if calls == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        fsync = os.fsync
        os.fsync = lambda descriptor: (count("fsync"), fsync(descriptor))[1]
        sys.addaudithook(lambda event, _: count(event))
        try:
            commit_folder(staging, target, schema="test/1", meta={"rows": 3})
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_digest_of_files_depends_on_names_and_contents_only(tmp_path: Path) -> None:
    folder, other = stage(tmp_path / "x"), stage(tmp_path / "y")
    paths, others = [[f / n for n in FILES] for f in (folder, other)]
    assert digest_files(paths, root=folder) == digest_files(reversed(others), root=other)
    (other / "sub" / "b.txt").rename(other / "sub" / "c.txt")
    others[1] = other / "sub" / "c.txt"
    assert digest_files(paths, root=folder) != digest_files(others, root=other)
