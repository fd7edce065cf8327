"""A version in the registry: what its tags say, whether its files are the right ones, who came before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from ebft_core.errors import UserError
from ebft_core.promotion import Decision

MODEL_DIGEST = "ebft.model_digest"
CHAMPIONS = "ebft.champions"
DECISION, REASON, DECIDED_BY = "ebft.decision", "ebft.decision_reason", "ebft.decided_by"
PROMOTED_AT, ROLLED_BACK_AT = "ebft.promoted_at", "ebft.rolled_back_at"
GATE = "ebft.gate"
"""Beginning of the tags with the numbers: `ebft.gate.<metric>.<reference>`."""


@dataclass(frozen=True)
class RegisteredModel:
    """A version in the registry.

    Attributes:
        version: its number, as text.
        run_id: the run that made it.
        source: uri of its files.
        created: when it was registered (UTC).
        aliases: those that point to it.
    """

    name: str
    version: str
    run_id: str
    source: str
    created: datetime
    tags: Mapping[str, str]
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class RegistryState:
    """What MLflow keeps of the registered model: alias → version, and the tag `CHAMPIONS`."""

    aliases: Mapping[str, str]
    champions: Sequence[str]

    def champion(self, alias: str) -> str | None:
        """The version that holds the champion's alias."""
        return self.aliases.get(alias)

    def line(self, alias: str) -> list[str]:
        """The champions up to the present one, oldest first: the tag, as far as the alias bears it out.

        The tag is written before the alias moves on, and not when it moves back or others move it.
        """
        present = self.champion(alias)
        if present is None:
            return []
        if present in self.champions:
            return list(self.champions[: self.champions.index(present) + 1])
        return [*self.champions, present]


def registered_digest(model: RegisteredModel) -> str:
    """Digest of the version's files, as it was when they were registered. Raises UserError if unknown."""
    digest = model.tags.get(MODEL_DIGEST)
    if digest is None:
        raise UserError(
            "nothing says what the files of this version should be",
            where=f"{model.name} version {model.version}",
            expected=f"a tag {MODEL_DIGEST}, as `ebft run` sets it",
        )
    return digest


def check_digest(model: RegisteredModel, found: str) -> None:
    """Raise UserError unless `found` is the digest of the version's files."""
    if found != registered_digest(model):
        raise UserError(
            "the files of this version are not those that were registered",
            where=f"{model.name} version {model.version}: {model.source}",
            value=found,
            expected=f"{registered_digest(model)} ({MODEL_DIGEST})",
            hint="put the files back; a run of the same configuration still has them in its stage `merge`",
        )


def another_champion(name: str, version: str, expected: str | None, found: str | None) -> UserError:
    """The error of a change to `version` that was meant for another champion than the one found."""
    return UserError(
        "the champion has changed in the meantime",
        where=f"{name} version {version}",
        value="no champion" if found is None else f"champion: version {found}",
        expected="no champion" if expected is None else f"version {expected}",
        hint="start again: the model is then compared with the new champion",
    )


def decision_tags(outcome: str, decision: Decision | None, reason: str) -> dict[str, str]:
    """Tags with an outcome, why, and the gate's numbers; `reason` counts where there was no gate."""
    if decision is None:
        return {DECISION: outcome, REASON: reason}
    numbers = {f"{GATE}.{check.metric}.{check.against}": check.text for check in decision.checks}
    return {DECISION: outcome, REASON: decision.reason, **numbers}
