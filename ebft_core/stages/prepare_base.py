"""Stage `prepare_base`: find the base model, or make one, and record what it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebft_core.base_model import (
    BaseModelInfo,
    check_model_folder,
    digest_model_folder,
    embedding_size,
    write_base,
)
from ebft_core.errors import UserError
from ebft_core.hub import fetch_model
from ebft_core.tokenizer import check_token_ids, load_tokenizer

if TYPE_CHECKING:
    from ebft_core.config import ModelConfig, RunConfig
    from ebft_core.stage_runner import StageContext

_KEY = "model.name_or_path"


def run(context: StageContext) -> dict[str, Any]:
    """Write `base.json` (and `model/` for a model made here) into the stage's output.

    Raises:
        UserError: the model cannot be found, read or used.
        Preempted: asked to stop while training a model; the work folder holds a checkpoint.
    """
    model = context.config.model
    info = resolve_base(model) if model.from_scratch is None else _make(context)
    check_model_folder(info.path, where=_KEY)
    _check_architecture(info.path, context.config)
    check_token_ids(load_tokenizer(info.path, model), embedding_size(info.path), where=_KEY)
    write_base(context.output, info)
    return {"source": info.source, "revision": info.revision, "digest": info.digest, **info.metrics}


def resolve_base(model: ModelConfig) -> BaseModelInfo:
    """Find the model that `model.name_or_path` names.

    Raises:
        UserError: there is none, or it cannot be fetched.
    """
    name = model.name_or_path
    if name is None:
        raise UserError("no base model", where="model", expected="`name_or_path` or `from_scratch`")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return BaseModelInfo(folder.resolve(), digest_model_folder(folder), source=name)
    if name.startswith((".", "/", "~")) or folder.exists():
        raise UserError("no such folder", where=_KEY, value=name, hint=f"looked for {folder.absolute()}")
    path, commit = fetch_model(name, model.revision, where=_KEY)
    return BaseModelInfo(path, digest_model_folder(path), source=name, revision=commit)


def _check_architecture(folder: Path, config: RunConfig) -> None:
    """Refuse what the run cannot train, before data are read: unknown code, wrong attention, LoRA targets."""
    from transformers import AutoConfig

    from ebft_core.models import check_trainable, empty_model

    trust = config.model.trust_remote_code
    try:
        architecture = AutoConfig.from_pretrained(folder, trust_remote_code=trust, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(
            "transformers cannot load this model's configuration",
            where=_KEY,
            value=config.model.name_or_path,
            expected="an architecture that the installed transformers has built in",
            hint=next(iter(str(error).splitlines()), type(error).__name__)[:300],
        ) from error
    check_trainable(empty_model(architecture, trust_remote_code=trust), config)


def _make(context: StageContext) -> BaseModelInfo:
    from ebft_core.models import check_trainable
    from ebft_core.scratch.corpus import make_corpus, read_corpus
    from ebft_core.scratch.tokenizer import make_tokenizer
    from ebft_core.scratch.training import Progress, make_model, train

    config = context.config.model.from_scratch
    assert config is not None  # the caller looked
    context.events.message("base model: reading the text")
    texts = read_corpus(config.sources)
    tokenizer = make_tokenizer(config, texts)
    corpus = make_corpus(texts, tokenizer, config.sequence_length)
    context.events.message(
        f"base model: {corpus.train_NL.numel():,} training and {corpus.heldout_NL.numel():,} held-out tokens"
    )
    model = make_model(config, tokenizer)
    check_trainable(model, context.config)
    metrics = train(model, corpus, config, Progress(context.events, context.stop, context.work))
    folder = context.output / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return BaseModelInfo(folder, digest_model_folder(folder), source="from_scratch", metrics=metrics)
