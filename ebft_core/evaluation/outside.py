"""What the stage `evaluate` reads from outside its run: further models, held-out rows, a feature network, the
problems of its tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ebft_core.base_model import check_model_folder, digest_model_folder, embedding_size
from ebft_core.config import RunConfig
from ebft_core.data.heldout import check_heldout
from ebft_core.errors import UserError
from ebft_core.evaluation.downstream.check import digest_tasks


def digest_outside(config: RunConfig) -> dict[str, str]:
    """Config key → hex sha256 of the content of each folder and file, after the checks that need no torch.

    Raises:
        UserError: a folder or file is missing or unusable, or the models have embeddings of different sizes.
    """
    models = dict(_models(config))
    for key, folder in models.items():
        if not folder.is_dir():
            raise UserError("no such folder", where=key, value=str(folder), expected="a model's folder")
        check_model_folder(folder, where=key)
    _check_embeddings(config, models)
    digests = {key: digest_model_folder(folder) for key, folder in models.items()} | digest_tasks(config)
    if config.evaluate.heldout is not None:
        digests["evaluate.heldout"] = check_heldout(Path(config.evaluate.heldout).expanduser()).sha256
    return digests


def _models(config: RunConfig) -> Iterator[tuple[str, Path]]:
    for name, folder in config.evaluate.against.items():
        yield f"evaluate.against.{name}", Path(folder).expanduser()
    if config.evaluate.feature_model is not None:
        yield "evaluate.feature_model", Path(config.evaluate.feature_model).expanduser()


def _check_embeddings(config: RunConfig, models: dict[str, Path]) -> None:
    """A base model that is made or fetched by the run is compared when it is there."""
    base = Path(config.model.name_or_path or "").expanduser()
    here = config.model.name_or_path is not None and base.is_dir()
    sizes = {key: embedding_size(folder) for key, folder in models.items()}
    wanted = embedding_size(base) if here else next(iter(sizes.values()), None)
    for key, size in sizes.items():
        if size != wanted:
            raise UserError(
                "the model has another vocabulary, so it cannot share rows or features",
                where=key,
                value=f"{size} tokens",
                expected=f"{wanted} tokens",
            )
