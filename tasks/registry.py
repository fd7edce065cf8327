"""The model registry in MLflow: versions, the champion, and how it changes hands.

MLflow's alias says who the champion is; the tag `ebft.champions` of the registered model keeps the line of
those before, for `rollback`. Before the alias moves, the files of a version are read back and compared with
the digest that was noted when it was registered. Every change may be repeated: a process killed in the middle
leaves the old champion or the new one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from ebft_core.config import PromotionConfig
from ebft_core.errors import UserError
from ebft_core.manifests import commit_folder, digest_folder, read_meta, verify_folder
from ebft_core.promotion import Decision
from tasks.mlflow_store import fail_quickly
from tasks.registered_model import (
    CHAMPIONS,
    DECIDED_BY,
    DECISION,
    PROMOTED_AT,
    REASON,
    ROLLED_BACK_AT,
    RegisteredModel,
    RegistryState,
    another_champion,
    check_digest,
    decision_tags,
    registered_digest,
)
from tasks.registry_files import digest_files_at, download_files
from tasks.registry_lock import champion_lock
from tasks.transient import TransientError

_MODEL = "model"
_SCHEMA = "ebft.registered_model/1"
_NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


class Registry:
    """The versions of one registered model.

    Every method raises TransientError where MLflow, or the store of its files, does not answer.

    Args:
        uri: tracking uri of MLflow, as `mlflow_uri.tracking_uri` gives it.
        name: of the registered model.
        champion_alias: alias of the champion.
    """

    def __init__(
        self, uri: str, name: str, *, champion_alias: str = PromotionConfig().champion_alias
    ) -> None:
        fail_quickly()
        self.uri = uri
        self.name = name
        self.champion_alias = champion_alias
        self.client = MlflowClient(tracking_uri=uri, registry_uri=uri)

    def versions(self) -> list[RegisteredModel]:
        """Every version, the newest first; none if nothing was registered under the name."""
        aliases = self._state().aliases
        found: list[ModelVersion] = []
        with reaching_mlflow():
            page = self.client.search_model_versions(f"name = '{self.name}'")
            found += page
            while page.token:
                page = self.client.search_model_versions(f"name = '{self.name}'", page_token=page.token)
                found += page
        models = [_model(version, aliases) for version in found]
        return sorted(models, key=lambda model: int(model.version), reverse=True)

    def version(self, version: str) -> RegisteredModel:
        """One version. Raises UserError if there is none of that number."""
        aliases = self._state().aliases
        with reaching_mlflow():
            try:
                return _model(self.client.get_model_version(self.name, version), aliases)
            except MlflowException as error:
                if error.error_code not in _NOT_THERE:
                    raise
        raise UserError(
            "no such version in the registry",
            where=f"{self.name} version {version}",
            expected=", ".join(model.version for model in self.versions()) or "a model of that name",
            hint="`ebft registry list` shows what there is",
        )

    def champion(self) -> RegisteredModel | None:
        """The version that holds the champion's alias; None if none does."""
        number = self._state().champion(self.champion_alias)
        return None if number is None else self.version(number)

    def line(self) -> list[str]:
        """Versions of the champions up to the present one; those that were rolled back are not in it."""
        return self._state().line(self.champion_alias)

    def fetch(self, version: str, folder: Path) -> Path:
        """Bring the files of a version to `folder` and return the model's folder in it.

        A folder that holds this version whole is left as it is, anything else there is replaced. A fetch that
        is killed leaves nothing that looks finished.

        Raises:
            UserError: no such version, or its files are not those that were registered.
        """
        model = self.version(version)
        meta = {"name": self.name, "version": version, "digest": registered_digest(model)}
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if verify_folder(folder) is None or read_meta(folder) != meta:
                staging = folder.with_name(f".fetching-{folder.name}")
                for stale in (staging, folder):
                    if stale.exists():
                        shutil.rmtree(stale)
                staging.mkdir()
                download_files(model.source, staging / _MODEL, self.uri)
                check_digest(model, digest_folder(staging / _MODEL))
                commit_folder(staging, folder, schema=_SCHEMA, meta=meta)
        return folder / _MODEL

    def check_files(self, version: str) -> None:
        """Read the files of a version back.

        Raises:
            UserError: no such version, or its files are not those that were registered.
        """
        model = self.version(version)
        registered_digest(model)
        check_digest(model, digest_files_at(model.source, self.uri))

    def promote(
        self,
        version: str,
        decision: Decision | None,
        *,
        by: str,
        instead_of: str | None = None,
        reason: str = "by hand",
    ) -> RegisteredModel:
        """Make a version the champion, after its files were read back. Nothing changes if it is already.

        Args:
            decision: the gate's; None: somebody's own, whoever the champion is.
            by: who promotes.
            instead_of: version of the champion that the gate's decision is about; None: there was none.
            reason: of a promotion by hand.

        Raises:
            UserError: no such version, damaged files, or the champion has changed since the decision.
            ValueError: a decision that refuses.
        """
        if decision is not None and not decision.promote:
            raise ValueError(decision.reason)
        self.check_files(version)
        with reaching_mlflow(), champion_lock(self.client, self.name):
            state = self._state()
            champion = state.champion(self.champion_alias)
            if champion != version:
                if decision is not None and champion != instead_of:
                    raise another_champion(self.name, version, instead_of, champion)
                self._set_tags(version, {**decision_tags("promoted", decision, reason), DECIDED_BY: by})
                line = [earlier for earlier in state.line(self.champion_alias) if earlier != version]
                self.client.set_registered_model_tag(self.name, CHAMPIONS, json.dumps([*line, version]))
                self.client.set_registered_model_alias(self.name, self.champion_alias, version)
            if champion != version or PROMOTED_AT not in self.version(version).tags:
                self._set_tags(version, {PROMOTED_AT: _now()})
        return self.version(version)

    def refuse(self, version: str, decision: Decision, *, by: str) -> None:
        """Note on a version why it did not become the champion. Raises UserError if there is none such."""
        self.note(version, {**decision_tags("refused", decision, ""), DECIDED_BY: by})

    def rollback(self, *, by: str, reason: str) -> RegisteredModel:
        """Make the champion before the present one the champion again, after its files were read back.

        Raises:
            UserError: none came before, its files are damaged, or somebody else changed the champion.
        """
        line = self.line()
        if len(line) < 2:
            raise UserError(
                "there is no earlier champion to go back to",
                where=self.name,
                value=f"champion: version {line[0]}" if line else "no champion",
                hint=f"`ebft promote {self.name} VERSION` makes any version the champion",
            )
        before, present = line[-2:]
        self.check_files(before)
        with reaching_mlflow(), champion_lock(self.client, self.name):
            found = self.line()
            if found != line:
                raise another_champion(self.name, before, present, found[-1] if found else None)
            self.client.set_registered_model_alias(self.name, self.champion_alias, before)
            tags = {DECISION: "rolled back", REASON: reason, DECIDED_BY: by, ROLLED_BACK_AT: _now()}
            self._set_tags(present, tags)
        return self.version(before)

    def note(self, version: str, tags: Mapping[str, str]) -> None:
        """Set tags of a version. Raises UserError if there is none such."""
        self.version(version)
        self._set_tags(version, tags)

    def _set_tags(self, version: str, tags: Mapping[str, str]) -> None:
        with reaching_mlflow():
            for key, value in tags.items():
                self.client.set_model_version_tag(self.name, version, key, value)

    def _state(self) -> RegistryState:
        with reaching_mlflow():
            try:
                model = self.client.get_registered_model(self.name)
            except MlflowException as error:
                if error.error_code not in _NOT_THERE:
                    raise
                return RegistryState({}, [])
        aliases = {alias: str(number) for alias, number in model.aliases.items()}
        return RegistryState(aliases, json.loads(model.tags.get(CHAMPIONS, "[]")))


def registered_models(uri: str) -> list[str]:
    """Names of all registered models. Raises TransientError."""
    fail_quickly()
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    names: list[str] = []
    with reaching_mlflow():
        page = client.search_registered_models()
        names += [model.name for model in page]
        while page.token:
            page = client.search_registered_models(page_token=page.token)
            names += [model.name for model in page]
    return names


@contextlib.contextmanager
def reaching_mlflow() -> Iterator[None]:
    """Say with a TransientError that MLflow did not answer."""
    try:
        yield
    except MlflowException as error:
        raise TransientError(f"MLflow: {error}") from error


def _model(version: ModelVersion, aliases: Mapping[str, str]) -> RegisteredModel:
    number = str(version.version)
    return RegisteredModel(
        name=str(version.name),
        version=number,
        run_id=str(version.run_id),
        source=str(version.source),
        created=datetime.fromtimestamp(version.creation_timestamp / 1000, UTC),
        tags=dict(version.tags),
        aliases=tuple(sorted(alias for alias, of in aliases.items() if of == number)),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
