"""Sampling in the process, against exact probabilities, the library's `generate` and plain forward passes."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from ebft_core.samplers.generate import GenerateSampler
from ebft_core.samplers.prompts import Group, PromptRequest, Sample
from tests.oracles.tiny_models import tiny_model, with_dropout, with_lora
from tests.samplers.builders import NEVER, request, sampling_config
from tests.vllm_server.stub_models import processed

VOCAB, SMALL = 37, 11
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7], [9, 3, 2], [8, 4], [6] * 12]


def requests(**options: Any) -> list[PromptRequest]:
    return [request(row, prompt, **options) for row, prompt in enumerate(PROMPTS)]


def run(
    model: torch.nn.Module,
    wanted: list[PromptRequest],
    *,
    stops: tuple[int, ...] = (NEVER,),
    seed: int = 1,
    rows: int = 3,
    **ebft: Any,
) -> list[Group]:
    return GenerateSampler(model, sampling_config(**ebft), stops, rows=rows).sample(
        wanted, seed=seed, version=0
    )


def samples(groups: list[Group]) -> list[list[Sample]]:
    """The groups' samples, none of which failed."""
    found = [[sample for sample in group.samples if sample is not None] for group in groups]
    assert [len(group) for group in found] == [len(group.samples) for group in groups]
    return found


def plain_logits(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """Logits behind every token, by one forward pass of the library's own attention."""
    with torch.no_grad():
        return np.asarray(model(input_ids=torch.tensor([tokens])).logits[0].double().numpy())


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_top_1_is_the_librarys_greedy_generation(architecture: str) -> None:
    model = tiny_model(architecture, vocab=VOCAB, layers=2)
    expected = [
        model.generate(
            input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=6, pad_token_id=0,
            attention_mask=torch.ones(1, len(prompt)),
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]  # fmt: skip
    assert len({tuple(tokens) for tokens in expected}) > 1
    for group, tokens in zip(
        samples(run(model, requests(), top_k=1, n_samples_per_prompt=3)), expected, strict=True
    ):
        assert [sample.token_ids for sample in group] == [tokens] * 3
        assert all(sample.truncated and sample.logprobs == [0.0] * 6 for sample in group)


def test_the_adapters_are_used() -> None:
    base = tiny_model("llama", vocab=VOCAB, layers=2)
    plain = run(base, requests(), top_k=1)
    assert run(with_lora(base), requests(), top_k=1) != plain


def pair_probabilities(model: torch.nn.Module, prompt: list[int], body: dict[str, float]) -> np.ndarray:
    pairs = np.zeros((SMALL, SMALL))
    first_V = np.exp(processed(plain_logits(model, prompt)[-1], prompt, body))
    for first in range(SMALL):
        row = [*prompt, first]
        pairs[first] = first_V[first] * np.exp(processed(plain_logits(model, row)[-1], row, body))
    return pairs


def chi_square_p(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Cells expected less than five times are merged into one."""
    expected = probabilities.ravel() * counts.sum()
    rare = expected < 5.0
    observed = np.append(counts.ravel()[~rare], counts.ravel()[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        assert observed[-1] == 0
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.7, "repetition_penalty": 1.5},
        {"temperature": 1.3, "top_k": 5, "min_p": 0.1},
    ],
)
def test_pairs_match_exact_probabilities(body: dict[str, float]) -> None:
    model, prompt = tiny_model("llama", vocab=SMALL, layers=2, seed=4), [3, 1, 4, 1, 5]
    wanted = [request(row, prompt, length=2) for row in range(60)]
    groups = samples(run(model, wanted, rows=20, n_samples_per_prompt=32, **body))
    counts = np.zeros((SMALL, SMALL))
    for sample in chain.from_iterable(groups):
        counts[tuple(sample.token_ids)] += 1
    assert chi_square_p(counts, pair_probabilities(model, prompt, body)) > 1e-4
    # Power: the same pairs must reject another temperature.
    other = {**body, "temperature": body["temperature"] * 1.5}
    assert chi_square_p(counts, pair_probabilities(model, prompt, other)) < 1e-6


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0.6},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 9, "min_p": 0.05, "repetition_penalty": 1.2},
    ],
)
def test_log_probabilities_are_those_of_the_truncated_distribution(body: dict[str, float]) -> None:
    model = tiny_model("qwen3", vocab=VOCAB, layers=2)
    wanted = requests(length=16, given=[[7, 8], [9]])
    for asked, group in zip(wanted, samples(run(model, wanted, stops=(5, 20, 11), **body)), strict=True):
        for sample in group:
            assert sample.logprobs is not None
            history = asked.prompt_ids + sample.token_ids
            logits = plain_logits(model, history)
            for s, (token, action) in enumerate(zip(sample.token_ids, sample.action, strict=True)):
                at = len(asked.prompt_ids) + s
                exact = processed(logits[at - 1], history[:at], body)[token] if action else 0.0
                assert sample.logprobs[s] == pytest.approx(exact, abs=1e-4)


def test_turns_go_on_behind_given_tokens_on_their_own_history() -> None:
    model = tiny_model("llama", vocab=VOCAB, layers=2)
    stops, given = (4, 7, 13, 21, 30), [[1, 2, 3], [6, 6]]
    wanted = requests(length=24, given=given)
    turns = set()
    for group in samples(run(model, wanted, stops=stops, n_samples_per_prompt=6, temperature=1.5)):
        assert len({tuple(sample.token_ids) for sample in group}) > 1
        for sample in group:
            written = split_turns(sample)
            turns.add(len(written))
            assert [g for _, g in written[:-1]] == given[: len(written) - 1]
            for tokens, _ in written[:-1]:
                assert tokens[-1] in stops
                assert not set(tokens[:-1]) & set(stops)
            assert sample.truncated == (len(written) < 3 or written[-1][0][-1] not in stops)
            if sample.truncated:
                assert len(sample.token_ids) == 24 or 24 - len(sample.token_ids) <= 3
    assert turns >= {2, 3}


def split_turns(sample: Sample) -> list[tuple[list[int], list[int]]]:
    """(written, given behind it) of each turn."""
    turns: list[tuple[list[int], list[int]]] = []
    was_action = False
    for token, action in zip(sample.token_ids, sample.action, strict=True):
        if action and not was_action:
            turns.append(([], []))
        turns[-1][0 if action else 1].append(token)
        was_action = action
    return turns


def test_a_row_is_sampled_alike_in_any_company() -> None:
    model = tiny_model("llama", vocab=VOCAB, layers=2)
    wanted = requests(length=10, given=[[7, 8]])
    options: dict[str, Any] = {"stops": (5, 9), "n_samples_per_prompt": 4, "temperature": 1.0}
    whole = run(model, wanted, rows=6, **options)
    tokens = [[sample.token_ids for sample in group] for group in samples(whole)]
    for rows, order in ((1, [0, 1, 2, 3, 4, 5]), (2, [5, 2, 0]), (4, [4, 3, 2, 1])):
        part = samples(run(model, [wanted[i] for i in order], rows=rows, **options))
        assert [[sample.token_ids for sample in group] for group in part] == [tokens[i] for i in order]
    other = samples(run(model, wanted, rows=6, seed=2, **options))
    assert [[sample.token_ids for sample in group] for group in other] != tokens


def test_each_bound_is_its_own() -> None:
    model = tiny_model("gpt2", vocab=VOCAB, layers=2)
    wanted = [request(row, [1, 2, row], length=length) for row, length in enumerate([1, 7, 3])]
    groups = samples(run(model, wanted))
    assert [{len(sample.token_ids) for sample in group} for group in groups] == [{1}, {7}, {3}]


def test_groups_are_handed_over_once_each() -> None:
    model, seen = tiny_model("llama", vocab=VOCAB, layers=2), []
    sampler = GenerateSampler(model, sampling_config(), (NEVER,), rows=2)
    groups = sampler.sample(requests(), seed=1, version=0, on_group=seen.append)
    assert [group.row_id for group in groups] == list(range(6))
    assert sorted(seen, key=lambda group: group.row_id) == groups


def test_dropout_is_off_while_sampling() -> None:
    model = with_dropout(tiny_model("gpt2", vocab=VOCAB, layers=2), 0.5)
    quiet = run(model, requests())
    model.train()
    assert run(model, requests()) == quiet
    assert model.training
