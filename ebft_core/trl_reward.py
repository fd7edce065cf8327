"""The EBFT reward for TRL's trainers: `GRPOTrainer(reward_funcs=FeatureReward(model, tokenizer, ...))`.

TRL hands over what it generated, completion by completion; diversity and whitening couple the N samples
of a prompt, so they are put together into groups again. Features are computed on TRL's own token ids,
never on decoded and re-tokenised text. Legend: see `geometry.py`; here A = 1, and R counts the groups.

TRL's trainers take one plain baseline over the whole reward. The diversity part of sample k contains its
similarity with sample j, so there the baseline of j depends on j: a small bias that `advantages.py` avoids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ebft_core.blocks import Blocks
from ebft_core.config import EBFTConfig
from ebft_core.errors import UserError
from ebft_core.features import extract_features
from ebft_core.losses import cfm
from ebft_core.model_parts import unwrap_adapters
from ebft_core.models import freeze_copy
from ebft_core.rewards import group_rewards, valid_groups
from ebft_core.whitening import precision_of

if TYPE_CHECKING:
    from ebft_core.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Group:
    """Token ids of one prompt, its ground truth and its N completions."""

    prompt: list[int]
    target: list[int]
    completions: list[list[int]]


class FeatureReward:
    """The feature-matching reward as a TRL reward function.

    Args:
        model: where the features come from. A model with trainable weights is copied and frozen, because a
            policy that trains would move its own goal; a PEFT model runs without its adapters.
        tokenizer: the `processing_class` of the trainer.
        num_generations: the trainer's; completions of a prompt stand next to each other.
        config: layers, pooling, whitening and coefficients; None: the defaults of a run file.
        column: data set column with the reference answer, a text or (chat prompts) a list of messages.
        end_of_sequence: whether a ground-truth text ends as a finished completion does. Switch it off if
            completions are all cut at their length bound. Chat templates write their own end.
        chat_template_kwargs: the trainer's.
        groups_per_forward: prompts whose features are computed at once.

    Example:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer  # doctest: +SKIP
        >>> reward = FeatureReward(AutoModelForCausalLM.from_pretrained(name),  # doctest: +SKIP
        ...     AutoTokenizer.from_pretrained(name), num_generations=4)
    """

    __name__ = "ebft_reward"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        *,
        num_generations: int,
        config: EBFTConfig | None = None,
        column: str = "ground_truth",
        end_of_sequence: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        groups_per_forward: int = 8,
    ) -> None:
        parameter = next(model.parameters())
        trains = any(p.requires_grad for p in model.parameters()) and unwrap_adapters(model) is model
        self._model = freeze_copy(model, parameter.dtype, parameter.device) if trains else model
        self._tokenizer = tokenizer
        self._num_generations = num_generations
        self._config = config or EBFTConfig()
        self._column = column
        self._end = [tokenizer.eos_token_id] if end_of_sequence and tokenizer.eos_token_id is not None else []
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._groups_per_forward = groups_per_forward

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float | None]:
        """One reward per completion; None throughout a group without usable features, which TRL leaves out.

        Raises:
            UserError: no ground truth, a group that is split, or a chat template that renders the ground
                truth as another conversation than the prompt.
        """
        del completions  # the ids are what was generated
        groups = list(self._groups(prompts, completion_ids, columns))
        rewards: list[float | None] = []
        metrics: list[tuple[float, float, float]] = []
        for start in range(0, len(groups), self._groups_per_forward):
            reward_RN, valid_R, values = self._score(groups[start : start + self._groups_per_forward])
            for row, valid in zip(reward_RN.tolist(), valid_R.tolist(), strict=True):
                rewards.extend(row if valid else [None] * len(row))
            metrics.extend(values)
        if "log_metric" in columns:
            _log(columns["log_metric"], metrics, len(groups))
        return rewards

    def _groups(
        self, prompts: Sequence[Any], completion_ids: Sequence[Sequence[int]], columns: Mapping[str, Any]
    ) -> Iterator[_Group]:
        N = self._num_generations
        truths = self._ground_truths(columns, len(prompts))
        for start in range(0, len(prompts), N):
            members = range(start, min(start + N, len(prompts)))
            if len(members) < N or any(
                (prompts[i], truths[i]) != (prompts[start], truths[start]) for i in members
            ):
                raise UserError(
                    "the completions of a prompt are not together",
                    where="FeatureReward: num_generations",
                    value=N,
                    expected="the trainer's num_generations, on every process",
                    hint="make per_device_train_batch_size times steps_per_generation a multiple of it, and "
                    "use the same number in evaluation",
                )
            prompt, target = self._tokenise(prompts[start], truths[start])
            yield _Group(prompt, target, [list(completion_ids[i]) for i in members])

    def _ground_truths(self, columns: Mapping[str, Any], count: int) -> Sequence[Any]:
        truths = columns.get(self._column)
        if truths is None or len(truths) != count:
            raise UserError(
                "the feature reward compares with a ground truth, and there is none",
                where="FeatureReward: column",
                value=self._column,
                expected=f"a data set with this column; it has: {', '.join(sorted(columns)) or 'none'}",
            )
        for index, truth in enumerate(truths):
            if not truth:
                raise UserError(
                    "a prompt has no ground truth",
                    where=f"column {self._column}",
                    value=f"{truth!r} for completion {index}",
                    expected="a text or messages; leave such rows out of the data set",
                )
        return list(truths)

    def _tokenise(self, prompt: Any, truth: Any) -> tuple[list[int], list[int]]:
        """Ids of the prompt, exactly as TRL makes them, and of the ground truth as its continuation."""
        if isinstance(prompt, str):
            prompt_ids = list(self._tokenizer(text=prompt)["input_ids"])
            target = list(self._tokenizer(text=truth, add_special_tokens=False)["input_ids"])
            return prompt_ids, target + self._end
        answer = [{"role": "assistant", "content": truth}] if isinstance(truth, str) else list(truth)
        prompt_ids = self._render(list(prompt), add_generation_prompt=True)
        whole = self._render(list(prompt) + answer, add_generation_prompt=False)
        target = whole[len(prompt_ids) :]
        if whole[: len(prompt_ids)] != prompt_ids or not target:
            raise UserError(
                "the chat template renders prompt and ground truth so that they do not start with the prompt",
                where="FeatureReward: chat_template_kwargs",
                value=self._template_kwargs,
                expected="a template whose generation prompt is how it begins an answer",
            )
        eos = self._tokenizer.eos_token_id
        if eos in target:  # a line break behind the end of the turn is nothing a policy writes
            target = target[: len(target) - target[::-1].index(eos)]
        return prompt_ids, target

    def _render(self, messages: list[Any], *, add_generation_prompt: bool) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=True,
            **self._template_kwargs,
        )
        return list(rendered["input_ids"])

    def _score(self, groups: Sequence[_Group]) -> tuple[Tensor, Tensor, list[tuple[float, float, float]]]:
        """`reward_RN`, `valid_R` (usable features), and (alignment, diversity, CFM) of the usable groups."""
        parameter = next(self._model.parameters())
        config = self._config
        phi_RAND, target_RAD = extract_features(
            self._model,
            **_tensors(groups, parameter.device),
            feature_layers=config.feature_layers,
            embed_method=config.embed_method,
        )
        phi_RND, target_RD = phi_RAND[:, 0], target_RAD[:, 0]
        rewards = group_rewards(
            phi_RND,
            target_RD,
            whitening=config.whitening,
            alignment_coef=config.alignment_coef,
            diversity_coef=config.diversity_coef,
            whiten_tol=max(config.whiten_tol, precision_of(phi_RND, parameter)),
        )
        valid_R = valid_groups(phi_RND, target_RD)
        columns = (rewards.alignment.mean(-1), rewards.diversity.mean(-1), cfm(phi_RND, target_RD).unbiased)
        values_RV = torch.stack([column.double() for column in columns], dim=-1)
        return rewards.reward, valid_R, [tuple(row) for row in values_RV[valid_R].tolist()]


def _tensors(groups: Sequence[_Group], device: torch.device) -> dict[str, Any]:
    """Arguments of `extract_features`: a row is prompt + ground truth with its one anchor between them."""
    documents = [torch.tensor(group.prompt + group.target) for group in groups]
    blocks = [torch.tensor(ids, dtype=torch.int64) for group in groups for ids in group.completions]
    shape = (len(groups), 1, -1)
    length_RAN = torch.tensor([len(ids) for ids in blocks], device=device).view(shape)
    tokens_XG = nn.utils.rnn.pad_sequence(blocks, batch_first=True).to(device)
    tokens_RANG = tokens_XG.view(*length_RAN.shape, -1)
    action_RANG = torch.arange(tokens_RANG.shape[-1], device=device) < length_RAN[..., None]
    return {
        "input_ids_RL": nn.utils.rnn.pad_sequence(documents, batch_first=True).to(device),
        "anchors_RA": torch.tensor([[len(group.prompt)] for group in groups], device=device),
        "tokens_RANG": tokens_RANG,
        "blocks": Blocks(tokens_RANG, length_RAN, action_RANG),
        "target_length_RA": torch.tensor([[len(group.target)] for group in groups], device=device),
    }


def _log(log_metric: Any, metrics: Sequence[tuple[float, float, float]], groups: int) -> None:
    log_metric("ebft/dropped_groups", groups - len(metrics))
    for name, values in zip(
        ("ebft/alignment", "ebft/diversity", "ebft/cfm"), zip(*metrics, strict=True), strict=False
    ):
        log_metric(name, sum(values) / len(values))
