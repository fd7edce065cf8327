"""Rules that relate several keys, and rules that need more than a type. All of them are always checked.

A rule is a generator of problems; `RULES` is the list of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ebft_core.config.problem import Problem
from ebft_core.config.promotion_rules import PROMOTION_RULES
from ebft_core.config.retrain_rules import RETRAIN_RULES
from ebft_core.config.schema import FromScratchConfig, RunConfig
from ebft_core.config.storage_section import S3_PLACE
from ebft_core.config.structured_rules import STRUCTURED_RULES
from ebft_core.config.tasks_rules import TASKS_RULES
from ebft_core.config.training_rules import TRAINING_RULES

TRANSFORMS = ("text", "prompt_completion", "chat")
_MODULE_FUNCTION = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")
_BUCKET = re.compile(rf"^{S3_PLACE}$")
_SMALLEST_BPE = 258  # 256 bytes and the two special tokens


def broken_rules(config: RunConfig) -> Iterator[Problem]:
    """Every problem of a configuration whose single values are well-formed."""
    for rule in RULES:
        yield from rule(config)


def _model(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    both = ("model.name_or_path", "model.from_scratch")
    if model.name_or_path is None and model.from_scratch is None:
        yield Problem(
            ("model", *both),
            "no base model is given",
            expected="one of `model.name_or_path` and `model.from_scratch`",
            hint="a hub id or a folder, for example `name_or_path: meta-llama/Llama-3.2-1B`",
        )
    if model.name_or_path is not None and model.from_scratch is not None:
        yield Problem(
            both,
            "two base models are given",
            model.name_or_path,
            "one of `model.name_or_path` and `model.from_scratch`",
            "remove one, or set it to null",
        )
    if model.name_or_path is not None and not model.name_or_path.strip():
        yield Problem(("model.name_or_path",), "`model.name_or_path` is empty", "", "a hub id or a folder")
    if model.revision is not None and model.name_or_path is None:
        yield Problem(
            ("model.revision", "model.name_or_path"),
            "`model.revision` belongs to a hub model, and there is none",
            model.revision,
            "`model.name_or_path` with a hub id",
        )


def _from_scratch(config: RunConfig) -> Iterator[Problem]:
    model = config.model.from_scratch
    if model is None:
        return
    section = "model.from_scratch"
    yield from _heads(model, section)
    needed = max(config.data.sequence_length, model.sequence_length)
    if model.max_position_embeddings < needed:
        yield Problem(
            (
                f"{section}.max_position_embeddings",
                "data.sequence_length",
                f"{section}.sequence_length",
            ),
            "the model cannot read rows as long as these",
            model.max_position_embeddings,
            f"≥ {needed} (`data.sequence_length` and `{section}.sequence_length`)",
        )
    if model.tokenizer == "bpe" and model.vocab_size < _SMALLEST_BPE:
        yield Problem(
            (f"{section}.vocab_size", f"{section}.tokenizer"),
            "the vocabulary is too small for byte-level BPE",
            model.vocab_size,
            f"≥ {_SMALLEST_BPE}: 256 bytes and the special tokens",
        )
    if config.data.transform == "chat" and config.model.chat_template is None:
        yield Problem(
            ("model.chat_template", "data.transform"),
            "the `chat` transform needs a chat template, and a model made from scratch has none",
            expected="the path of a Jinja template",
        )


def _heads(model: FromScratchConfig, section: str) -> Iterator[Problem]:
    hidden, heads, kv_heads = model.hidden_size, model.num_attention_heads, model.num_key_value_heads
    keys = (f"{section}.hidden_size", f"{section}.num_attention_heads")
    if hidden % heads:
        yield Problem(
            keys, "the width cannot be divided among the heads", hidden, f"a multiple of {heads} heads"
        )
    elif (hidden // heads) % 2:
        yield Problem(
            keys,
            "rotary position embeddings need an even width per head",
            f"{hidden} / {heads} = {hidden // heads}",
            f"a multiple of {2 * heads}",
        )
    if heads % kv_heads:
        yield Problem(
            (f"{section}.num_key_value_heads", f"{section}.num_attention_heads"),
            "the attention heads cannot be shared among the key/value heads",
            kv_heads,
            f"a divisor of {heads}",
        )


def _data(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if data.transform not in TRANSFORMS and not _MODULE_FUNCTION.match(data.transform):
        yield Problem(
            ("data.transform",),
            "no such transform",
            data.transform,
            f"{', '.join(TRANSFORMS)}, or `package.module:function`",
        )
    for index, source in enumerate(data.sources):
        key = f"data.sources[{index}]"
        if not source.path.strip():
            yield Problem(
                (f"{key}.path",), "the path of a source is empty", source.path, "a file, glob or hub id"
            )
        if source.revision is not None and source.format != "hub":
            yield Problem(
                (f"{key}.revision", f"{key}.format"),
                "a revision belongs to a hub data set",
                source.revision,
                f"`format: hub`, not `{source.format}`",
            )


def _examples(config: RunConfig) -> Iterator[Problem]:
    """How records become prompts and ground truths: what only one of the two modes can do."""
    data, structured = config.data, config.ebft.mode == "structured"
    if structured and data.transform == "text":
        yield Problem(
            ("data.transform", "ebft.mode"),
            "a plain text has no prompt whose completion could be written",
            data.transform,
            "prompt_completion, chat, or `package.module:function`",
            "`ebft.mode: strided` learns from plain text",
        )
    if structured and data.packing:
        yield Problem(
            ("data.packing", "ebft.mode"),
            "structured examples are not packed: every row is one prompt with its ground truth",
            True,
            "`data.packing: false`, or `ebft.mode: strided`",
        )
    if structured and data.chat.assistant_turns != "all":
        yield Problem(
            ("data.chat.assistant_turns", "ebft.mode"),
            "the supervised turns of structured mode are those of its ground truth",
            data.chat.assistant_turns,
            "`data.chat.examples: last_turn`, without `data.chat.assistant_turns`",
        )
    if not structured and data.chat.examples != "last_turn":
        yield Problem(
            ("data.chat.examples", "ebft.mode"),
            "strided mode has no examples of whole turns: it places anchors in all of them",
            data.chat.examples,
            "`data.chat.assistant_turns`, or `ebft.mode: structured`",
        )


def _columns(config: RunConfig) -> Iterator[Problem]:
    """Options that the chosen transform would not read."""
    data = config.data
    if data.thinking == "reasoning_field" and data.transform in ("text", "prompt_completion"):
        yield Problem(
            ("data.thinking", "data.transform"),
            "only the messages of a chat have a field for reasoning",
            data.thinking,
            "`full`, `answer_only`, or `data.transform: chat`",
        )
    if data.thinking == "answer_only" and data.transform == "text":
        yield Problem(
            ("data.thinking", "data.transform"),
            "a plain text has no answer to keep",
            data.thinking,
            "`full`, or another `data.transform`",
        )
    if data.fields.extra is not None and not (config.rewards and config.ebft.mode == "structured"):
        yield Problem(
            ("data.fields.extra", "rewards", "ebft.mode"),
            "no reward reads these columns",
            data.fields.extra,
            "`rewards` and `ebft.mode: structured`, or no `data.fields.extra`",
        )


def _rows(config: RunConfig) -> Iterator[Problem]:
    """A row must have room for one anchor and its block."""
    if config.ebft.mode == "structured":
        if config.data.sequence_length < 2:
            yield Problem(
                ("data.sequence_length",), "no row holds a prompt and a ground truth", 1, "≥ 2 tokens"
            )
        return
    ebft, length = config.ebft, config.data.sequence_length
    prefix, name = max(
        (ebft.context_length, "ebft.context_length"),
        (ebft.min_completion_prefix, "ebft.min_completion_prefix"),
    )
    if prefix + ebft.generate_max_len > length:
        yield Problem(
            (name, "ebft.context_length", "ebft.generate_max_len", "data.sequence_length"),
            "no row is long enough for one anchor",
            f"{name} {prefix} + ebft.generate_max_len {ebft.generate_max_len}",
            f"together ≤ {length} (`data.sequence_length`)",
        )


def _samples(config: RunConfig) -> Iterator[Problem]:
    ebft = config.ebft
    if ebft.n_samples_per_prompt == 1 and ebft.advantage_estimator != "reinforce":
        yield Problem(
            ("ebft.n_samples_per_prompt", "ebft.advantage_estimator"),
            f"`{ebft.advantage_estimator}` compares the samples of a group, and there is only one",
            1,
            "≥ 2, or `ebft.advantage_estimator: reinforce`",
        )
    if ebft.n_samples_per_prompt == 1 and ebft.diversity_coef > 0:
        yield Problem(
            ("ebft.diversity_coef", "ebft.n_samples_per_prompt"),
            "the diversity of a single sample is not defined",
            ebft.diversity_coef,
            "0, or `ebft.n_samples_per_prompt` ≥ 2",
        )
    if config.evaluate.n_samples == 1:
        yield Problem(
            ("evaluate.n_samples",),
            "the unbiased CFM subtracts the variance of the samples, and one sample has none",
            1,
            "≥ 2",
        )


def _objective(config: RunConfig) -> Iterator[Problem]:
    ebft = config.ebft
    if ebft.rl_coef == 0 and ebft.ce_coef == 0:
        yield Problem(
            ("ebft.rl_coef", "ebft.ce_coef"),
            "nothing is learned: both loss coefficients are 0",
            0,
            "`ebft.rl_coef` > 0 or `ebft.ce_coef` > 0",
        )
    if ebft.rl_coef > 0 and ebft.alignment_coef == 0 and ebft.diversity_coef == 0:
        yield Problem(
            ("ebft.alignment_coef", "ebft.diversity_coef", "ebft.rl_coef"),
            "the reward is always 0: both of its coefficients are 0",
            0,
            "`ebft.alignment_coef` > 0, or `ebft.rl_coef: 0` for plain cross-entropy training",
        )


def _batch(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    batch, micro, steps = trainer.batch_size, trainer.micro_batch_size, trainer.gradient_accumulation_steps
    if batch is None:
        return
    keys = ("trainer.batch_size", "trainer.micro_batch_size")
    if batch % micro:
        yield Problem(keys, "the batch cannot be divided into micro-batches", batch, f"a multiple of {micro}")
    elif steps is not None and batch != micro * steps:
        yield Problem(
            (*keys, "trainer.gradient_accumulation_steps"),
            "the batch size disagrees with the accumulation",
            batch,
            f"{micro * steps} = micro_batch_size {micro} x gradient_accumulation_steps {steps}",
            "remove `trainer.gradient_accumulation_steps`: it follows from the batch size",
        )


def _attention(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.attention == "flex" and trainer.device == "cpu":
        yield Problem(
            ("trainer.attention", "trainer.device"),
            "FlexAttention has no backward pass on a CPU",
            "flex",
            "auto or sdpa",
        )


def _lora(config: RunConfig) -> Iterator[Problem]:
    lora = config.lora
    if lora is None:
        return
    key = "lora.target_modules"
    if not lora.target_modules or (isinstance(lora.target_modules, list) and "" in lora.target_modules):
        yield Problem(
            (key,), "an adapter with no target", lora.target_modules, "`all-linear`, a list or a regex"
        )
    elif isinstance(lora.target_modules, str) and lora.target_modules != "all-linear":
        try:
            re.compile(lora.target_modules)
        except re.error as error:
            yield Problem((key,), f"not a regular expression: {error}", lora.target_modules, "a Python regex")
    if config.ebft.feature_device is not None:
        yield Problem(
            ("ebft.feature_device", "lora"),
            "with LoRA the feature network is the policy without its adapters: it has no device of its own",
            config.ebft.feature_device,
            "null, or `lora: null`",
        )


def _places(config: RunConfig) -> Iterator[Problem]:
    workspace, uri = config.workspace, config.tracking.mlflow_uri
    if not workspace.strip() or (_SCHEME.match(workspace) and not _BUCKET.match(workspace)):
        expected = "a path, or `s3://bucket/prefix`"
        yield Problem(("workspace",), "no such kind of workspace", workspace, expected)
    if _BUCKET.match(workspace) and config.storage.archive is not None:
        yield Problem(
            ("workspace", "storage.archive"),
            "the archive is given twice",
            config.storage.archive,
            "`storage.archive: null`: a workspace on S3 is the archive itself",
        )
    scheme = _SCHEME.match(uri) if uri is not None else None
    if uri is not None and uri != "databricks" and (scheme is None or scheme.group(1) == "file"):
        yield Problem(
            ("tracking.mlflow_uri",),
            "MLflow no longer keeps runs in plain folders",
            uri,
            "`sqlite:///…`, `http://…` or null",
        )


RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _model,
    _from_scratch,
    _data,
    _examples,
    _columns,
    _rows,
    _samples,
    _objective,
    _batch,
    _attention,
    _lora,
    _places,
    *PROMOTION_RULES,
    *RETRAIN_RULES,
    *STRUCTURED_RULES,
    *TRAINING_RULES,
    *TASKS_RULES,
)
