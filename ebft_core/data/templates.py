"""Rendering conversations, and the two things only a rendered text can tell: where a turn ends, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ebft_core.data.document import RowError
from ebft_core.data.thinking import REASONING_FIELDS, Message
from ebft_core.errors import UserError
from ebft_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ebft_core.config import DataConfig

_STAND_IN = "EbftStandIn7Q3Z"
"""Rendered in place of a turn to find what follows it; no template changes plain letters and digits."""
_WHERE = "model.chat_template"


@dataclass(frozen=True)
class EndOfTurn:
    """What a template writes behind the text of an assistant's turn, through the token that ends it.

    Args:
        text: as rendered; mostly just the token.
        token_id: the token a sampler stops at.
    """

    text: str
    token_id: int


def render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """The conversation in the tokenizer's template. Raises RowError if the template refuses it."""
    import jinja2

    try:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **config.chat.template_kwargs,
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise RowError(f"the chat template refuses the conversation: {error}") from error
    return text


def check_template(tokenizer: Tokenizer, config: DataConfig) -> None:
    """Refuse a tokenizer without a template, a broken template, and one that has no place for reasoning.

    Raises:
        UserError: naming `model.chat_template`.
    """
    import jinja2

    if not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template",
            where=_WHERE,
            expected="the path of a Jinja template",
            hint="name the template the model was trained with, or use `data.transform: prompt_completion`",
        )
    try:
        render([{"role": "user", "content": "a"}], tokenizer, config)
    except RowError as error:
        if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
            raise UserError(
                "the chat template is not valid Jinja",
                where=_WHERE,
                value=f"line {error.__cause__.lineno}",
                hint=str(error.__cause__.message),
            ) from error
    if config.thinking == "reasoning_field":
        _check_reasoning(tokenizer, config)


def text_behind(
    messages: Sequence[Message],
    turn: int,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """What is rendered behind the text of message `turn`, whatever the template makes of that text.

    Raises:
        RowError: the template refuses the conversation, or does not write the turn exactly once.
    """
    stand_in = {"role": messages[turn]["role"], "content": _STAND_IN}
    text = render(
        [*messages[:turn], stand_in, *messages[turn + 1 :]],
        tokenizer,
        config,
        add_generation_prompt=add_generation_prompt,
    )
    if text.count(_STAND_IN) != 1:
        raise RowError(f"the chat template does not write turn {turn + 1} once, as it is said")
    return text.partition(_STAND_IN)[2]


def end_of_turn(tokenizer: Tokenizer, config: DataConfig) -> EndOfTurn:
    """How the template ends an assistant's turn, found in a rendered conversation.

    Raises:
        UserError: no usable template, or no added token of the tokenizer ends a turn: generation could
            not be stopped there.
    """
    check_template(tokenizer, config)
    question = {"role": "user", "content": "a"}
    try:
        tail = text_behind([question, {"role": "assistant", "content": "b"}], 1, tokenizer, config)
    except RowError as error:
        raise UserError(
            "the chat template does not render a question and its answer", where=_WHERE, hint=str(error)
        ) from error
    encoded = tokenizer(
        tail, add_special_tokens=False, split_special_tokens=False, return_offsets_mapping=True
    )
    added = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    for token_id, (_, stop) in zip(encoded.input_ids, encoded.offset_mapping, strict=True):
        if token_id in added:
            return EndOfTurn(tail[:stop], int(token_id))
    raise UserError(
        "the chat template ends an assistant's turn with no token of its own",
        where=_WHERE,
        value=tail,
        expected="one of the tokenizer's special tokens behind every turn, at which generation can stop",
        hint="write `{{ eos_token }}` behind the turns, or add the mark to the tokenizer's tokens",
    )


def _check_reasoning(tokenizer: Tokenizer, config: DataConfig) -> None:
    talk: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", REASONING_FIELDS[0]: _STAND_IN},
    ]
    try:
        rendered = render(talk, tokenizer, config)
    except RowError as error:
        raise UserError(
            "the chat template does not render a question and its answer", where=_WHERE, hint=str(error)
        ) from error
    if _STAND_IN not in rendered:
        raise UserError(
            "the chat template leaves out the reasoning of a message",
            where="data.thinking",
            value=config.thinking,
            expected=f"a template that renders `{REASONING_FIELDS[0]}`",
            hint="`data.thinking: full` keeps the thinking in the text of the turn",
        )
