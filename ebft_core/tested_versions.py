"""The versions this project is tested with, and whether the installed ones are those.

`constraints.txt` is not part of an installed package, so its exact pins stand here too; a test holds the two
to each other. The ranges are those of the installed package itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

TESTED: Mapping[str, str] = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "trl": "1.16.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "accelerate": "1.15.0",
    "boto3": "1.44.5",
    "mlflow": "3.17.2",
    "prefect": "3.8.8",
    "sqlalchemy": "2.0.58",
    "httpx": "0.28.1",
    "sacrebleu": "2.6.0",
}
_PROJECT = "ebft"

Fit = Literal["tested", "untested", "refused", "missing"]


@dataclass(frozen=True)
class Installed:
    """An installed dependency.

    Args:
        name: of the package.
        version: installed; None: it is not.
        wanted: the range the project declares; empty: any.
        fit: `refused` lies outside the range; `untested` inside, but is not what the tests ran with.
    """

    name: str
    version: str | None
    wanted: str
    fit: Fit


def installed_dependencies() -> list[Installed]:
    """Every dependency of the installed project, those with a tested version first."""
    found = []
    for line in metadata.requires(_PROJECT) or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append(_look(requirement))
    return sorted(found, key=lambda one: (one.name not in TESTED, one.name))


def _look(requirement: Requirement) -> Installed:
    wanted = str(requirement.specifier)
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Installed(requirement.name, None, wanted, "missing")
    return Installed(requirement.name, version, wanted, fit_of(requirement, version))


def fit_of(requirement: Requirement, version: str) -> Fit:
    """How an installed version fits; builds of one version (`+cpu`, `+cu130`) count as the same."""
    if not requirement.specifier.contains(version, prereleases=True):
        return "refused"
    tested = TESTED.get(requirement.name)
    return "tested" if tested is None or Version(version).public == tested else "untested"
