"""The section `data` of a run file: where documents come from and how they become rows of tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ebft_core.config.section import PositiveInt, Section


class SourceConfig(Section):
    """One place where documents come from."""

    path: str
    """File, glob, `stdlib:` glob, folder saved by `datasets`, `s3://bucket/` with a name or glob, or a hub
    dataset id with `format: hub`."""
    format: Literal["auto", "text", "jsonl", "csv", "parquet", "dataset", "hub"] = "auto"
    """How to read `path`; `auto` decides by the file name's ending (`.txt .py .md` are whole-file text)."""
    split: str = "train"
    """Split of a `dataset` or `hub` source."""
    revision: str | None = None
    """Revision of a `hub` source."""


class FieldMapping(Section):
    """Names of the columns that a transform reads. Unset names are found among the usual ones."""

    text: str = "text"
    """Column of the `text` transform (whole-file sources always have it)."""
    prompt: str | None = None
    """Column of the prompt; unset: `prompt`, `input`, `question` or `instruction`, whichever is there."""
    completion: str | None = None
    """Column of the completion; unset: `completion`, `output`, `answer` or `response`, whichever is there."""
    messages: str = "messages"
    """Column of the chat turns: a list of `{role, content}`."""
    extra: list[str] | None = None
    """Columns handed to the functions of `rewards` (structured mode); unset: all but the prompt's and the
    chat's."""


class ChatConfig(Section):
    """Which parts of a conversation are supervised."""

    assistant_turns: Literal["all", "final"] = "all"
    """Supervise every assistant turn, or the last one only (strided mode)."""
    examples: Literal["last_turn", "first_turn", "every_turn"] = "last_turn"
    """What the policy writes (structured mode). `last_turn`: the last assistant turn. `first_turn`: the first
    one and all that follow, each on the policy's own history. `every_turn`: each one, as an example of its
    own."""
    supervise_thinking: bool = True
    """Whether `<think>…</think>` spans carry cross-entropy labels."""
    template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Passed on to the chat template, for example `enable_thinking: false`."""


class DataConfig(Section):
    """What to train on and how it becomes rows of tokens."""

    sources: list[SourceConfig] = Field(min_length=1)
    """Where the documents are."""
    transform: str = "text"
    """`text`, `prompt_completion`, `chat`, or `module:function` (see docs, *Data formats*)."""
    fields: FieldMapping = FieldMapping()
    """Column names."""
    prompt_separator: str = ""
    """Text between prompt and completion (transform `prompt_completion`), part of the prompt: `"\\n"`."""
    chat: ChatConfig = ChatConfig()
    """Options of the `chat` transform."""
    thinking: Literal["full", "answer_only", "reasoning_field"] = "full"
    """The `<think>…</think>` spans of completions and assistant turns. `full`: left as they are.
    `answer_only`: removed. `reasoning_field`: moved into the message's `reasoning_content`, which the chat
    template renders (`chat`)."""
    sequence_length: PositiveInt = 1024
    """Longest row in tokens. Longer text documents are cut into rows; longer prompt/completion rows are
    truncated at the end, keeping the prompt first and at least one completion token. Structured mode never
    cuts a prompt: a longer one is a bad row."""
    packing: bool = False
    """Put several documents into one row, up to `sequence_length` (document ids keep them apart)."""
    append_eos: bool = True
    """End every document with the tokenizer's end-of-sequence token (`chat`: its template decides)."""
    heldout_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the documents kept for evaluation. Membership is decided by each document's hash, so it
    does not change when documents are added."""
    bad_rows: Literal["fail", "quarantine"] = "fail"
    """`fail`: stop at the first report of bad rows. `quarantine`: set them aside in a file, up to
    `max_bad_fraction`."""
    max_bad_fraction: float = Field(default=0.01, ge=0.0, le=1.0)
    """Largest share of rows that `quarantine` accepts."""
    exclude_hashes: str | None = None
    """File of document hashes, one per line: these documents are neither trained on nor held out. Retraining
    writes such files itself."""
    max_documents: PositiveInt | None = None
    """Use only the first documents of the sources (in their order); unset: all."""
