"""Held-out rows as a folder of their own, for runs that are to be judged on the same documents for ever.

The folder is committed by a manifest and holds `heldout/` (rows) and `data.json` (`vocabulary`, and
`stop_token_ids` of structured examples). The output of a stage `tokenize` is such a folder, too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.manifests import StageRef, commit_folder, verify_folder, write_json_atomic
from ebft_core.tokenizer import Tokenizer, vocabulary_digest

HELDOUT = "heldout"
DATA_JSON = "data.json"
SCHEMA = "ebft.heldout/1"
_KEY = "evaluate.heldout"
_KEPT = ("vocabulary", "stop_token_ids", HELDOUT)


def freeze_heldout(tokenized: Path, target: Path) -> StageRef:
    """Copy the held-out rows of a finished stage `tokenize` into the committed folder `target`.

    A `target` that verifies already is kept as it is.
    """
    staging = target.with_name(f".staging-{target.name}")
    if staging.exists():
        shutil.rmtree(staging)
    shutil.copytree(tokenized / HELDOUT, staging / HELDOUT)
    data = json.loads((tokenized / DATA_JSON).read_text(encoding="utf-8"))
    write_json_atomic(staging / DATA_JSON, {name: data[name] for name in _KEPT if name in data})
    return commit_folder(staging, target, schema=SCHEMA, meta=data[HELDOUT])


def check_heldout(folder: Path) -> StageRef:
    """The reference of a folder of held-out rows, every byte verified.

    Raises:
        UserError: it is damaged, or no such folder.
    """
    ref = verify_folder(folder)
    if ref is None or not (folder / HELDOUT).is_dir():
        raise UserError(
            "no folder of held-out rows, or a damaged one",
            where=_KEY,
            value=str(folder),
            expected=f"a folder with a manifest.json that fits, {HELDOUT}/ and {DATA_JSON}",
            hint="the output of a stage `tokenize` is one: runs/stages/tokenize/KEY",
        )
    return ref


def frozen_heldout(config: RunConfig, tokenizer: Tokenizer) -> Path | None:
    """The folder that `evaluate.heldout` names, verified; None where the run uses its own rows.

    Raises:
        UserError: it is damaged, or was made with another tokenizer.
    """
    if config.evaluate.heldout is None:
        return None
    folder = Path(config.evaluate.heldout).expanduser()
    check_heldout(folder)
    data = json.loads((folder / DATA_JSON).read_text(encoding="utf-8"))
    if data["vocabulary"] != vocabulary_digest(tokenizer):
        raise UserError(
            "the held-out rows were made with another tokenizer",
            where=_KEY,
            value=str(folder),
            expected="rows made with the tokenizer of the run's base model",
        )
    return folder
