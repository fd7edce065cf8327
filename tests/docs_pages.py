"""The pages of the user guide as data: code blocks with their marks, inline code, tables.

A mark is an HTML comment right above a block: `<!-- run -->` (bash or python; `run: 78` expects that exit
code), `<!-- file: NAME -->` (written into the page's working folder), `<!-- config: partial -->` (checked).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(p.name for p in DOCS.glob("*.md"))
GUIDE = [name for name in PAGES if name != "config-reference.md"]  # that page is generated
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>run|file|config)(?:: (?P<argument>[^>]*?))? -->\n)?"
    r"^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_INLINE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """One fenced block: its mark (`run`, `file`, `config` or empty), the mark's argument, language, text."""

    mark: str
    argument: str
    language: str
    text: str


def page_text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(name: str) -> list[Block]:
    found = [
        Block(m["mark"] or "", m["argument"] or "", m["language"], m["text"])
        for m in _BLOCK.finditer(page_text(name))
    ]
    assert page_text(name).count("```") == 2 * len(found), f"{name}: a fence without a language"
    return found


def inline_code(text: str) -> list[str]:
    """Every `code` outside of fenced blocks."""
    return _INLINE.findall(_BLOCK.sub("", text))


def table_rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table rows below a heading, without the table's head."""
    part = text.split(f"\n{heading}\n", 1)[1]
    part = re.split(r"^#{1,6} ", part, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if not set(row[0]) <= {"-"}][1:]


def command_lines(name: str) -> list[str]:
    """Everything on a page that is written as a command of a shell: bash blocks, and inline code."""
    lines = []
    for block in blocks(name):
        if block.language == "bash":
            lines += block.text.replace("\\\n", " ").splitlines()
    return lines + inline_code(page_text(name))
