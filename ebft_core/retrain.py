"""What retraining decides without MLflow: whether there is anything new, and how a run continues a line.

A line is the models registered under one name, from the base model on. All of them are judged on the same
held-out rows, with the features of the same base model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebft_core.config import RunConfig
from ebft_core.data.exclusion import read_exclusion
from ebft_core.errors import UserError
from ebft_core.manifests import digest_json, write_text_atomic
from ebft_core.runs import digest_inputs, workspace_folder

BASE, CHAMPION = "base", "champion"
"""Names of the models that a challenger is compared with."""


@dataclass(frozen=True)
class LineFolders:
    """Where a line keeps its files in the workspace."""

    root: Path

    @property
    def heldout(self) -> Path:
        """The frozen held-out rows."""
        return self.root / "heldout"

    @property
    def documents(self) -> Path:
        """Lists of documents that runs left out, by their digest."""
        return self.root / "excluded"

    def model(self, version: str) -> Path:
        """The files of a registered version."""
        return self.root / "versions" / version


@dataclass(frozen=True)
class Continuation:
    """What a run finds when it continues a line; all empty for the first run.

    Args:
        base: folder of the line's base model.
        champion: folder of the present champion.
        heldout: folder of the frozen held-out rows that every model of the line is judged on.
        excluded: file of the documents that the run must not learn from.
    """

    base: Path | None = None
    champion: Path | None = None
    heldout: Path | None = None
    excluded: Path | None = None


def line_name(config: RunConfig) -> str:
    """Name of the registered model: what belongs together is registered under one name."""
    return config.publish.registered_model_name or config.name


def line_folders(config: RunConfig) -> LineFolders:
    """The folders of the configuration's line."""
    return LineFolders(workspace_folder(config) / "retrain" / line_name(config))


def fingerprint(config: RunConfig) -> str:
    """Digest of what makes a retraining worth while: contents of the sources, base model, configuration.

    An update of our code is no news, and neither are other rules of the gate: `--force` judges anew.

    Raises:
        UserError: a source cannot be read.
    """
    return digest_json({"inputs": digest_inputs(config), "retrain": config.retrain.model_dump()})


def check_retrainable(config: RunConfig) -> None:
    """Refuse a run file that retraining could not use.

    Raises:
        UserError: it registers no model, or sets what retraining sets itself.
    """
    if not config.publish.enabled:
        raise UserError(
            "retraining needs the model registry",
            where="publish.enabled",
            value=False,
            expected="true",
            hint="the champion is what the registry says it is",
        )
    own = {
        "evaluate.heldout": config.evaluate.heldout,
        "evaluate.feature_model": config.evaluate.feature_model,
    }
    own |= {f"evaluate.against.{name}": config.evaluate.against.get(name) for name in (BASE, CHAMPION)}
    for key, value in own.items():
        if value is not None:
            raise UserError(
                "retraining sets this key itself",
                where=key,
                value=value,
                expected="a run file without it",
                hint="the base model, the champion and the frozen held-out rows come from the registry",
            )


def changes_for(config: RunConfig, found: Continuation) -> dict[str, Any]:
    """Dotted keys of the run file, with the values that make it the next run of the line."""
    changes: dict[str, Any] = {}
    against = dict(config.evaluate.against)
    if found.heldout is not None:
        changes["evaluate.heldout"] = str(found.heldout)
    if found.excluded is not None:
        changes["data.exclude_hashes"] = str(found.excluded)
    if starts_at_champion(config, found):
        against[BASE] = str(found.base)
        changes |= {"model.name_or_path": str(found.champion), "model.from_scratch": None}
        changes |= {"model.revision": None, "evaluate.feature_model": str(found.base)}
    elif found.champion is not None:
        against[CHAMPION] = str(found.champion)
    return changes if against == config.evaluate.against else {**changes, "evaluate.against": against}


def references_for(config: RunConfig, found: Continuation) -> dict[str, str | None]:
    """Reference of the gate → its name in `evaluate.against`; None for the model that the run starts from."""
    if found.champion is None:
        return {BASE: None}
    if starts_at_champion(config, found):
        return {BASE: BASE, CHAMPION: None}
    return {BASE: None, CHAMPION: CHAMPION}


def starts_at_champion(config: RunConfig, found: Continuation) -> bool:
    """Whether the run goes on from the champion."""
    return found.champion is not None and config.retrain.start_from == "champion"


def apply_changes(
    config: str | Mapping[str, Any], overrides: Sequence[str], changes: Mapping[str, Any]
) -> tuple[str | dict[str, Any], list[str]]:
    """The flow's parameters with the changes: as overrides of a run file, or in a copy of its content."""
    if isinstance(config, str):
        return config, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in changes.items())]
    changed = copy.deepcopy(dict(config))
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        changed[section] = {**(changed.get(section) or {}), name: value}
    return changed, []


def write_exclusion(config: RunConfig, folders: LineFolders, hashes: Set[str]) -> Path:
    """Write the documents that a run leaves out, those of its own run file included, and return the file."""
    text = document_list(hashes | read_exclusion(config.data))
    folders.documents.mkdir(parents=True, exist_ok=True)
    path = folders.documents / f"{digest_json(text)[:16]}.txt"
    write_text_atomic(path, text)
    return path


def document_list(hashes: Iterable[str]) -> str:
    """Document hashes as `data.exclude_hashes` takes them."""
    return "".join(f"{key}\n" for key in sorted(hashes))
