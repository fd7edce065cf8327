"""The configured model's tokenizer and chat template: what goes wrong silently if nobody looks."""

from __future__ import annotations

from pathlib import Path

from ebft_core.base_model import check_model_folder, embedding_size, read_base
from ebft_core.config import RunConfig
from ebft_core.data.encoding import bos_prefix, encode, with_bos
from ebft_core.data.stop_tokens import stop_token_ids
from ebft_core.data.templates import check_template, render
from ebft_core.doctor.check import Check, guarded
from ebft_core.errors import UserError
from ebft_core.manifests import verify_folder
from ebft_core.runs import plan_run
from ebft_core.tokenizer import Tokenizer, check_token_ids, load_tokenizer

_KEY = "model.name_or_path"


def check_model(config: RunConfig) -> list[Check]:
    """Model folder, tokenizer, beginning and end of sequences. Fetches nothing."""
    try:
        folder = local_model(config)
    except UserError as error:
        return [Check("model", "fail", f"{error.what}: {error.value}", error.hint)]
    if folder is None:
        if config.model.from_scratch is not None:
            return [Check("model", "ok", "made by the run, with its tokenizer")]
        detail = f"{config.model.name_or_path} is not on this machine yet: the run fetches it"
        return [Check("model", "warn", detail, "run the doctor again when it is in the hub's cache")]
    tokenizer: Tokenizer = None

    def look() -> Check:
        nonlocal tokenizer
        check_model_folder(folder, where=_KEY)
        tokenizer = load_tokenizer(folder, config.model)
        check_token_ids(tokenizer, embedding_size(folder), where=_KEY)
        kind = type(tokenizer).__name__
        return Check(
            "model", "ok", f"{folder.name}: {len(tokenizer):,} tokens ({kind}), all with an embedding"
        )

    first = guarded("model", look)
    if first.verdict == "fail":
        return [first]
    ends = guarded("end of turn", lambda: _ends(tokenizer, config))
    return [first, guarded("begin of sequence", lambda: _begin(tokenizer, config)), ends]


def local_model(config: RunConfig) -> Path | None:
    """The model's folder if it is on this machine: configured, made by an earlier run, or cached.

    Raises:
        UserError: the configured path is no folder, or a source is missing.
    """
    if config.model.from_scratch is not None:
        output = plan_run(config).stage("prepare_base").output
        return read_base(output).path if verify_folder(output, deep=False) is not None else None
    name = config.model.name_or_path or ""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or folder.exists():
        raise UserError("no such folder", where=_KEY, value=name, hint=f"looked for {folder.absolute()}")
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json", revision=config.model.revision)
    return Path(cached).parent if isinstance(cached, str) else None


def _begin(tokenizer: Tokenizer, config: RunConfig) -> Check:
    """One token at the beginning, whoever writes it."""
    name, bos, prefix = "begin of sequence", tokenizer.bos_token_id, bos_prefix(tokenizer)
    if config.data.transform != "chat":
        detail = f"{tokenizer.bos_token!r} in front of every document" if prefix else "none is written"
        return Check(name, "ok", detail)
    check_template(tokenizer, config.data)
    text = render([{"role": "user", "content": "a"}], tokenizer, config.data)
    (ids,) = encode(tokenizer, [text])
    leading = _leading(with_bos(ids, prefix), bos)
    if leading > 1:
        detail = f"the chat template writes {tokenizer.bos_token!r} {leading} times"
        return Check(name, "fail", detail, "mend the template, or name another in model.chat_template")
    if prefix and _leading(ids, bos):
        detail = f"{tokenizer.bos_token!r} once here, but both the template and the tokenizer write it"
        hint = "elsewhere, encode rendered conversations with add_special_tokens=False"
        return Check(name, "warn", detail, hint)
    return Check(name, "ok", f"{tokenizer.bos_token!r} once" if leading else "none is written")


def _ends(tokenizer: Tokenizer, config: RunConfig) -> Check:
    """The tokens at which a completion ends."""
    ids = stop_token_ids(tokenizer, config.data)
    shown = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in ids)
    return Check("end of turn", "ok", f"completions end at {shown}")


def _leading(ids: list[int], token: int | None) -> int:
    count = 0
    while token is not None and count < len(ids) and ids[count] == token:
        count += 1
    return count
