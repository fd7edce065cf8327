"""Which files a source means and what their digests notice."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import datasets
import pytest

from ebft_core.config import SourceConfig
from ebft_core.data.sources import fingerprint_sources, resolve_patterns, resolve_sources
from ebft_core.errors import UserError

STDLIB = Path(sysconfig.get_paths()["stdlib"])


def names(*patterns: str) -> list[str]:
    return [file.name for file in resolve_patterns(patterns, where="data.sources")]


def test_stdlib_pattern_is_the_sorted_list_of_those_files() -> None:
    expected = sorted(f"stdlib:{entry}" for entry in os.listdir(STDLIB) if entry.endswith(".py"))
    assert names("stdlib:*.py") == expected


def test_stdlib_pattern_never_reaches_installed_packages() -> None:
    found = names("stdlib:**/*.py")
    assert len(found) > 500
    assert not [name for name in found if "site-packages" in name]


def test_sources_keep_their_order_and_files_are_sorted_within(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    found = names(f"{tmp_path}/*.md", f"{tmp_path}/*.txt")
    assert [Path(name).name for name in found] == ["c.md", "a.txt", "b.txt"]


def test_format_follows_the_ending(tmp_path: Path) -> None:
    for name in ("a.py", "b.jsonl", "c.csv", "d.parquet"):
        (tmp_path / name).write_text("")
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(str(tmp_path / "e"))
    found = resolve_patterns([f"{tmp_path}/*"], where="x")
    assert [file.format for file in found] == ["text", "jsonl", "csv", "parquet", "dataset"]


def test_a_name_with_glob_characters_is_taken_literally(tmp_path: Path) -> None:
    odd = tmp_path / "a[1].txt"
    odd.write_text("x")
    assert [Path(n).name for n in names(str(odd))] == ["a[1].txt"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"path": "nowhere/*.txt"}, "no data files"),
        ({"path": "gs://bucket/x.jsonl"}, "remote sources of this kind"),
        ({"path": __file__, "format": "dataset"}, "not a folder saved by `datasets`"),
    ],
)
def test_what_cannot_be_a_source(source: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolve_sources([SourceConfig(path="stdlib:abc.py"), SourceConfig(**source)])
    assert caught.value.where == "data.sources[1].path"


def test_unknown_ending_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"1")
    with pytest.raises(UserError, match="cannot tell the format") as caught:
        names(str(tmp_path / "x.bin"))
    assert ".jsonl" in str(caught.value.expected)


def test_fingerprint_holds_name_size_and_content() -> None:
    content = (STDLIB / "abc.py").read_bytes()
    assert fingerprint_sources([SourceConfig(path="stdlib:abc.py")]) == [
        {"path": "stdlib:abc.py", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    ]


def test_a_change_with_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    os.utime(path, ns=(10**18, 10**18))
    before = fingerprint_sources([SourceConfig(path=str(path))])
    path.write_text("two")
    os.utime(path, ns=(10**18, 10**18))
    assert fingerprint_sources([SourceConfig(path=str(path))]) != before


def test_every_file_of_a_datasets_folder_counts(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(str(folder))
    before = fingerprint_sources([SourceConfig(path=str(folder))])
    assert len(before) == sum(1 for p in folder.rglob("*") if p.is_file())
    (folder / "data-00000-of-00001.arrow").write_bytes(b"other")
    assert fingerprint_sources([SourceConfig(path=str(folder))]) != before


def test_a_hub_source_says_that_it_is_offline() -> None:
    with pytest.raises(UserError, match="cannot be reached"):
        fingerprint_sources([SourceConfig(path="some/dataset", format="hub")])


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from ebft_core.data.sources import fingerprint_sources as f;"
        "import ebft_core.base_model; from ebft_core.data.transforms.custom import fingerprint_transform;"
        "from ebft_core.config import SourceConfig; f([SourceConfig(path='stdlib:abc.py')]);"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
