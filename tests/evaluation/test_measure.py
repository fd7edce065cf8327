"""`evaluate_rows` against the slow evaluation, and its invariances."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ebft_core.config import RunConfig
from ebft_core.evaluation import Measurements, evaluate_rows, training_evaluator
from ebft_core.evaluation.metrics import document_sums, documents_of, metric_means, metrics_of
from ebft_core.geometry import place_anchors
from ebft_core.metrics import METRICS
from ebft_core.rows import row_uniforms
from evaluation.builders import make_row, run_config, tiny_model
from evaluation.slow import slow_block, slow_cross_entropy

CASES = {
    "text": [make_row([19], 1), make_row([11], 2), make_row([24], 3)],
    "prompt": [make_row([20], 4, prompt=7), make_row([16], 5, prompt=3)],
    "packed": [make_row([12, 9, 14], 6), make_row([17], 7), make_row([10, 10], 8)],
}


def _measure(policy, base, rows, config: RunConfig, **options) -> Measurements:
    options = {"n_samples": 3, "seed": 5, "pad_token_id": 2, "batch_rows": 2, **options}
    return evaluate_rows(policy, base, rows, config, **options)


@pytest.mark.parametrize("embed_method", ["last_token", "mean_pooling"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_equals_the_slow_evaluation(architecture: str, case: str, embed_method: str) -> None:
    base, policy = tiny_model(architecture, 0), tiny_model(architecture, 1)
    config, rows = run_config(embed_method=embed_method), CASES[case]
    measured = _measure(policy, base, rows, config)
    slow_base, slow_policy = copy.deepcopy(base).double(), copy.deepcopy(policy).double()

    with torch.no_grad():
        expected = slow_cross_entropy(slow_policy, rows)
        assert {r.document: r.tokens for r in measured.likelihoods} == {
            d: n for d, (_, n) in expected.items()
        }
        for record in measured.likelihoods:
            assert record.nll_sum == pytest.approx(expected[record.document][0], rel=1e-5)

        blocks = iter(measured.blocks)
        for row in rows:
            start, used = 0, 0
            uniforms = row_uniforms([row["row_id"]], seed=5, step=0, shape=(64, 3, 3))[0].double()
            for length, prompt, document in zip(
                row["document_lengths"], row["prompt_lengths"], row["document_hashes"], strict=True
            ):
                ids = torch.tensor(row["input_ids"][start : start + length])
                anchors = place_anchors(
                    length, stride=5, context_length=4, generate_max_len=3, prompt_length=prompt
                )
                for anchor in anchors.tolist():
                    block = next(blocks)
                    slow = slow_block(
                        slow_policy, slow_base, ids[:anchor], ids[anchor : anchor + 3], uniforms[used], config
                    )
                    assert (block.document, block.anchor) == (document, start + anchor)
                    assert block.usable
                    assert block.tokens == slow.pop("tokens")
                    for name, value in slow.items():
                        assert METRICS[name].block_value(block) == pytest.approx(value, abs=2e-5), name
                    used += 1
                start += length
        assert next(blocks, None) is None


def test_means_are_weighted_by_tokens_and_blocks() -> None:
    base, policy = tiny_model(seed=0), tiny_model(seed=1)
    rows = [make_row([30], 1), make_row([8], 2)]
    measured = _measure(policy, base, rows, run_config())
    with torch.no_grad():
        slow = slow_cross_entropy(copy.deepcopy(policy).double(), rows)
    ce = sum(total for total, _ in slow.values()) / sum(count for _, count in slow.values())
    means = metric_means(measured)
    assert means["ce"] == pytest.approx(ce, rel=1e-5)
    assert means["perplexity"] == pytest.approx(math.exp(ce), rel=1e-4)
    assert means["cfm"] == pytest.approx(sum(b.cfm for b in measured.blocks) / len(measured.blocks))
    assert list(means) == [name for name, metric in METRICS.items() if not metric.completions_only]


def test_rows_of_one_document_are_one_cluster() -> None:
    rows = [make_row([15], 1, hashes=["same"]), make_row([15], 2, hashes=["same"]), make_row([15], 3)]
    measured = _measure(tiny_model(seed=1), tiny_model(seed=0), rows, run_config())
    documents = documents_of(measured)
    assert documents == ["doc-3-0", "same"]
    sums = document_sums(measured, METRICS["cfm"], documents)
    assert sums.weight_D.tolist() == [2, 4]


def test_batching_and_order_change_nothing() -> None:
    base, policy, config = tiny_model(seed=0), tiny_model(seed=1), run_config()
    rows = CASES["text"] + CASES["packed"]
    whole = _measure(policy, base, rows, config, batch_rows=6)
    single = _measure(policy, base, rows[::-1], config, batch_rows=1)
    key = {(block.row_id, block.anchor): block for block in single.blocks}
    assert len(key) == len(whole.blocks) > 15
    for block in whole.blocks:
        other = key[block.row_id, block.anchor]
        assert block.tokens == other.tokens
        assert block.cfm == pytest.approx(other.cfm, abs=1e-5)


def test_rows_without_room_for_an_anchor_still_have_a_cross_entropy() -> None:
    rows = [make_row([5], 1), make_row([6], 2)]
    measured = _measure(tiny_model(seed=1), tiny_model(seed=0), rows, run_config())
    assert measured.blocks == []
    assert [record.tokens for record in measured.likelihoods] == [4, 5]
    assert set(metric_means(measured)) == {"ce", "perplexity"}


def test_one_sample_has_no_unbiased_cfm_and_no_similarity() -> None:
    measured = _measure(tiny_model(seed=1), tiny_model(seed=0), CASES["text"], run_config(), n_samples=1)
    assert {"cfm", "diversity"} == set(metrics_of(measured)) - set(metric_means(measured))


def test_unusable_features_are_counted_and_enter_no_mean() -> None:
    """NaN features of one token spoil every row that holds it, sampled or given, and no other row."""
    base, policy = tiny_model(seed=0), tiny_model(seed=1)
    rows = copy.deepcopy(CASES["text"])
    rows[0]["input_ids"][2] = 1
    clean = _measure(policy, base, rows, run_config(), seed=5)
    with torch.no_grad():
        base.model.embed_tokens.weight[1] = float("nan")
    measured = _measure(policy, base, rows, run_config(), seed=5)
    spoilt = {1} | {block.row_id for block in clean.blocks if any(1 in sample for sample in block.tokens)}
    kept = [block for block in clean.blocks if block.row_id not in spoilt]
    assert [block for block in measured.blocks if block.usable] == kept
    assert measured.dropped_blocks == len(clean.blocks) - len(kept)
    assert kept
    assert metric_means(measured)["cfm"] == pytest.approx(sum(block.cfm for block in kept) / len(kept))


def test_training_evaluator_takes_features_from_the_policy_without_its_adapters() -> None:
    base, config = tiny_model(seed=0), run_config()
    policy = get_peft_model(
        tiny_model(seed=0), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter))
    policy.train()
    inside = training_evaluator(CASES["text"], config, feature_model=None, pad_token_id=2)(policy)
    outside = training_evaluator(CASES["text"], config, feature_model=base, pad_token_id=2)(policy)
    untuned = training_evaluator(CASES["text"], config, feature_model=base, pad_token_id=2)(base)
    assert inside == pytest.approx(outside, abs=1e-6)
    assert abs(inside["ce"] - untuned["ce"]) > 1e-3
    assert policy.training
