"""A line of retrained models as MLflow knows it: what was judged, on which rows, after which documents.

Everything is noted on the versions, before the gate decides. What holds for the whole line is what its
oldest judged version says, so a process killed before the decision leaves nothing that binds later runs.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ebft_core.base_model import BaseModelInfo, read_base
from ebft_core.config import RunConfig
from ebft_core.data.heldout import HELDOUT, freeze_heldout
from ebft_core.data.store import read_document_hashes
from ebft_core.errors import UserError
from ebft_core.manifests import adopt_folder, read_meta, verify_folder
from ebft_core.retrain import (
    Continuation,
    LineFolders,
    document_list,
    line_folders,
    line_name,
    starts_at_champion,
    write_exclusion,
)
from ebft_core.runs import RunPlan
from tasks.registered_model import DECISION, PROMOTED_AT, RegisteredModel
from tasks.registry import Registry, reaching_mlflow
from tasks.registry_files import download_files

FINGERPRINT = "ebft.retrain_fingerprint"
STARTED_FROM = "ebft.started_from"
JUDGED_ON = "ebft.judged_on"
_ARTIFACTS = "retrain"
_DOCUMENTS = "documents.txt"


@dataclass(frozen=True)
class JudgedOn:
    """What makes the numbers of a line comparable.

    Args:
        heldout: uri of the frozen held-out rows.
        heldout_sha256: digest of their manifest.
        base_digest: of the base model, whose features measure.
    """

    heldout: str
    heldout_sha256: str
    base_digest: str


class Line:
    """The line of a run file in the registry. Raises TransientError where MLflow does not answer.

    Args:
        config: the run file.
        uri: of MLflow.
    """

    def __init__(self, config: RunConfig, uri: str) -> None:
        self.config = config
        self.folders: LineFolders = line_folders(config)
        self.registry = Registry(uri, line_name(config), champion_alias=config.promotion.champion_alias)

    def judged(self, fingerprint: str) -> RegisteredModel | None:
        """The newest version that was made from just this, and judged."""
        same = (m for m in self._judged() if m.tags.get(FINGERPRINT) == fingerprint)
        return next(same, None)

    def judged_on(self) -> JudgedOn | None:
        """What the whole line is judged on; None before its first decision."""
        notes = [model.tags[JUDGED_ON] for model in self._judged() if JUDGED_ON in model.tags]
        return JudgedOn(**json.loads(notes[-1])) if notes else None

    def continuation(self, champion: RegisteredModel | None, base: BaseModelInfo) -> Continuation:
        """Bring here what the next run needs.

        Args:
            champion: the present one.
            base: the base model as the run file describes it now.

        Raises:
            UserError: it is not the line's base model any more, the registry's files are damaged, or nobody
                knows what the champion was trained on.
        """
        judged_on = self.judged_on()
        folder = None if champion is None else self.folders.model(champion.version)
        model = None if folder is None or champion is None else self.registry.fetch(champion.version, folder)
        excluded: set[str] = set()
        if champion is not None and self.config.retrain.train_on == "new":
            excluded |= self._known_documents(champion)
        if judged_on is None:
            heldout = None
        else:
            self._check_base(base, judged_on)
            heldout = self._fetch_heldout(judged_on)
            excluded |= read_document_hashes(heldout / HELDOUT)
        file = write_exclusion(self.config, self.folders, excluded) if excluded else None
        return Continuation(base.path, model, heldout, file)

    def documents(self, model: RegisteredModel) -> set[str] | None:
        """Hashes of the documents that a version, or one it goes back to, was trained on; None if unknown."""
        with tempfile.TemporaryDirectory(prefix="ebft-retrain-") as scratch:
            download_files(f"{self._artifacts(model.run_id)}/{_ARTIFACTS}", Path(scratch), self.registry.uri)
            path = Path(scratch, _DOCUMENTS)
            return set(path.read_text(encoding="ascii").splitlines()) if path.is_file() else None

    def record(
        self, plan: RunPlan, fingerprint: str, found: Continuation, champion: RegisteredModel | None
    ) -> RegisteredModel:
        """Note on the published version what it was made from and is judged on; safe to repeat."""
        published = read_meta(plan.stage("publish").output)
        version = self.registry.version(published["version"])
        judged_on = self.judged_on() or self._freeze(plan, version)
        parent = champion if starts_at_champion(self.config, found) else None
        earlier = set() if parent is None else self.documents(parent)
        if earlier is not None:  # a list with gaps would let documents through to `train_on: new`
            seen = read_document_hashes(plan.stage("tokenize").output / "train")
            self._store_documents(version, seen | earlier)
        tags = {
            FINGERPRINT: fingerprint,
            STARTED_FROM: "base" if parent is None else parent.version,
            JUDGED_ON: json.dumps(asdict(judged_on)),
        }
        self.registry.note(version.version, tags)
        return version

    def _judged(self) -> list[RegisteredModel]:
        """Versions about which a decision was made and carried out, the newest first."""
        return [model for model in self.registry.versions() if self._is_decided(model)]

    def _is_decided(self, model: RegisteredModel) -> bool:
        if self.registry.champion_alias in model.aliases or PROMOTED_AT in model.tags:
            return True
        return model.tags.get(DECISION, "promoted") != "promoted"  # said before the alias moves: no proof

    def _freeze(self, plan: RunPlan, version: RegisteredModel) -> JudgedOn:
        """Keep the held-out rows of the line's first run, here and beside the run in MLflow."""
        shutil.rmtree(self.folders.heldout, ignore_errors=True)  # of a run that was never judged
        ref = freeze_heldout(plan.stage("tokenize").output, self.folders.heldout)
        with reaching_mlflow():
            self.registry.client.log_artifacts(version.run_id, str(self.folders.heldout), HELDOUT)
        base = read_base(plan.stage("prepare_base").output)
        return JudgedOn(f"{self._artifacts(version.run_id)}/{HELDOUT}", ref.sha256, base.digest)

    def _fetch_heldout(self, judged_on: JudgedOn) -> Path:
        here = verify_folder(self.folders.heldout)
        if here is not None and here.sha256 == judged_on.heldout_sha256:
            return self.folders.heldout
        staging = self.folders.heldout.with_name(".fetching-heldout")
        for stale in (staging, self.folders.heldout):
            if stale.exists():
                shutil.rmtree(stale)
        staging.mkdir(parents=True)
        download_files(judged_on.heldout, staging, self.registry.uri)
        ref = adopt_folder(staging, self.folders.heldout)
        if ref is None or ref.sha256 != judged_on.heldout_sha256:
            raise UserError(
                "the frozen held-out rows are damaged",
                where=judged_on.heldout,
                expected=f"a folder whose manifest has the digest {judged_on.heldout_sha256}",
                hint="put the artifact back; models judged on other rows cannot be compared",
            )
        return self.folders.heldout

    def _check_base(self, base: BaseModelInfo, judged_on: JudgedOn) -> None:
        if base.digest != judged_on.base_digest:
            raise UserError(
                "the base model is no longer the one that this line began with",
                where="model",
                value=f"{base.source}, digest {base.digest}",
                expected=f"digest {judged_on.base_digest}",
                hint="name a commit with `model.revision`, or begin another line with another "
                "`publish.registered_model_name`",
            )

    def _known_documents(self, champion: RegisteredModel) -> set[str]:
        documents = self.documents(champion)
        if documents is None:
            raise UserError(
                "nothing says which documents the champion was trained on",
                where="retrain.train_on",
                value="new",
                expected=f"a list beside the run of {champion.name} version {champion.version}",
                hint="only `ebft retrain` keeps such lists; `retrain.train_on: all` needs none",
            )
        return documents

    def _store_documents(self, version: RegisteredModel, seen: set[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="ebft-retrain-") as scratch, reaching_mlflow():
            path = Path(scratch, _DOCUMENTS)
            path.write_text(document_list(seen), encoding="ascii")
            self.registry.client.log_artifact(version.run_id, str(path), _ARTIFACTS)

    def _artifacts(self, run_id: str) -> str:
        with reaching_mlflow():
            return str(self.registry.client.get_run(run_id).info.artifact_uri)
