"""The Hugging Face hub: commits and model snapshots, with errors a user understands.

Only safetensors, JSON and tokenizer files are fetched: never pickled weights, never code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ebft_core.errors import UserError

RepoType = Literal["model", "dataset"]

_MODEL_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


def resolve_commit(repo_id: str, revision: str | None, *, repo_type: RepoType, where: str) -> str:
    """The commit that a branch or tag (None: the default branch) points to now.

    Raises:
        UserError: offline, no such repository or revision, or no access.
    """
    from huggingface_hub import HfApi

    with hub_errors(repo_id, revision, where=where):
        commit = HfApi().repo_info(repo_id, revision=revision, repo_type=repo_type).sha
    if commit is None:
        raise UserError("the hub names no commit for this repository", where=where, value=repo_id)
    return str(commit)


def fetch_model(repo_id: str, revision: str | None, *, where: str, weights: bool = True) -> tuple[Path, str]:
    """Download a model (or find it in the hub cache) and return its folder and commit.

    Args:
        weights: without them only configuration and tokenizer are fetched.

    Raises:
        UserError: as `resolve_commit`, or the model is not in the cache while offline.
    """
    from huggingface_hub import snapshot_download

    ignored = ["*/*"] if weights else ["*/*", "*.safetensors"]
    with hub_errors(repo_id, revision, where=where):
        folder = Path(
            snapshot_download(
                repo_id, revision=revision, allow_patterns=_MODEL_FILES, ignore_patterns=ignored
            )
        )
    return folder, folder.name  # the cache names a snapshot's folder after its commit


@contextlib.contextmanager
def hub_errors(repo_id: str, revision: str | None, *, where: str) -> Iterator[None]:
    """Turn every way in which the hub can fail into a `UserError` at config key `where`."""
    from huggingface_hub import errors

    value = repo_id if revision is None else f"{repo_id}@{revision}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(
            "access to this repository must be granted",
            where=where,
            value=value,
            hint="accept its terms on the hub, then `hf auth login` or set HF_TOKEN",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            "no such repository on the hub",
            where=where,
            value=value,
            expected="a local folder or a hub id",
            hint="private repositories need `hf auth login` or HF_TOKEN",
        ) from error
    except (errors.RevisionNotFoundError, errors.RevisionResolutionError) as error:
        raise UserError("no such revision", where=where, value=value, hint=_first_line(error)) from error
    except errors.HFValidationError as error:
        raise UserError(
            "neither a folder nor a hub id", where=where, value=value, hint=_first_line(error)
        ) from error
    except (OSError, errors.HTTPError) as error:  # offline mode, no network, nothing in the cache
        raise UserError(
            "the hub cannot be reached and the cache does not hold this repository",
            where=where,
            value=value,
            expected="network access, a filled hub cache, or a local folder",
            hint=_first_line(error),
        ) from error


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
