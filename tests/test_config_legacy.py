"""Names of axolotl, TRL and OpenRLHF: refused, each with our key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ebft_core.config import load_config, parse_config, schema_view
from ebft_core.config.legacy_names import NOT_NEEDED, RENAMED
from ebft_core.errors import UserError, UserErrors

AXOLOTL_FILE = """\
base_model: meta-llama/Llama-3.2-1B
rl: ebft
ebft:
  mode: strided
  stride: 8
  context_length: 8
  generate_max_len: 8
  n_samples_per_prompt: 4
  temperature: 0.6
  top_p: 1.0
  feature_layers: [0.25, 0.5, 0.75]
  embed_method: last_token
  use_whitening: true
  alignment_coef: 1.0
  diversity_coef: 1.0
  rl_coef: 1.0
  ce_coef: 0.0
  advantage_estimator: rloo
datasets:
  - path: sjelassi/swallow_code_20m
    type: ebft_pretrain.transform
    train_on_split: train[:100]
sequence_len: 256
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 2
num_epochs: 1
max_steps: 5
learning_rate: 1.0e-6
optimizer: adamw_torch_fused
lr_scheduler: cosine
warmup_steps: 2
adapter: lora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
lora_target_modules: [q_proj, v_proj]
bf16: auto
flash_attention: false
gradient_checkpointing: true
special_tokens: {pad_token: <|end_of_text|>}
val_set_size: 0.05
output_dir: ./outputs/ebft
wandb_project: ebft
wandb_watch: gradients
logging_steps: 1
save_steps: 100
"""

# The key each line of that file must be answered with.
ANSWERS = {
    "base_model": "model.name_or_path: meta-llama/Llama-3.2-1B",
    "rl": "section `ebft`",
    "ebft.use_whitening": "ebft.whitening: feature",
    "datasets": "data.sources",
    "sequence_len": "data.sequence_length: 256",
    "sample_packing": "data.packing: true",
    "micro_batch_size": "`trainer.micro_batch_size`",
    "gradient_accumulation_steps": "`trainer.gradient_accumulation_steps`",
    "num_epochs": "trainer.num_train_epochs: 1",
    "max_steps": "`trainer.max_steps`",
    "learning_rate": "`trainer.learning_rate`",
    "optimizer": "AdamW",
    "lr_scheduler": "`trainer.lr_scheduler`",
    "warmup_steps": "trainer.warmup_ratio",
    "adapter": "a section `lora:`",
    "lora_r": "lora.r: 16",
    "lora_alpha": "lora.alpha: 32",
    "lora_dropout": "lora.dropout: 0.05",
    "lora_target_linear": "lora.target_modules: all-linear",
    "lora_target_modules": "lora.target_modules",
    "bf16": "trainer.precision: auto",
    "flash_attention": "trainer.attention: auto",
    "gradient_checkpointing": "`trainer.gradient_checkpointing`",
    "special_tokens": "special tokens",
    "val_set_size": "data.heldout_fraction: 0.05",
    "output_dir": "workspace: ./outputs/ebft",
    "wandb_project": "tracking.experiment: ebft",
    "wandb_watch": "MLflow",
    "logging_steps": "every step",
    "save_steps": "trainer.save_every: 100",
}


def errors_of(data: dict[str, Any]) -> dict[str, UserError]:
    with pytest.raises(UserErrors) as caught:
        parse_config({"model": {"name_or_path": "m"}, "data": {"sources": [{"path": "a"}]}} | data)
    return {str(error.where): error for error in caught.value.errors}


def test_every_line_of_a_flat_axolotl_file_is_answered_with_our_key(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text(AXOLOTL_FILE)
    with pytest.raises(UserErrors) as caught:
        load_config(file)
    errors = {str(error.where).split(" ")[0]: error for error in caught.value.errors}
    for section in ("model", "data"):
        assert "another tool" in str(errors.pop(section).hint)
    assert errors.keys() == ANSWERS.keys()
    for key, answer in ANSWERS.items():
        assert answer in f"{errors[key].expected} {errors[key].hint}", key
        assert f"{file}:" in str(errors[key].where)


@pytest.mark.parametrize(
    ("section", "name", "value", "expected"),
    [
        ("ebft", "use_whitening", False, "ebft.whitening: none"),
        ("ebft", "use_whitening", "maybe", "ebft.whitening: feature or ebft.whitening: none"),
        ("ebft", "context_max_len", 8, "ebft.context_length: 8"),
        ("ebft", "ce_loss_coef", 0.03, "ebft.ce_coef: 0.03"),
        ("ebft", "num_generations", 4, "ebft.n_samples_per_prompt: 4"),
        ("rollout", "async_prefetch", True, "rollout.prefetch_depth: 1"),
        ("rollout", "async_prefetch", False, "rollout.prefetch_depth: 0"),
        ("rollout", "vllm_importance_sampling_cap", 3.0, "rollout.is_cap: 3.0"),
        ("rollout", "reroll_max_groups", 8, "rollout.max_rerolls"),
        ("rollout", "streaming_partial_batch", True, "the line removed"),
        ("vllm", "vllm_gpu_memory_utilization", 0.4, "vllm.gpu_memory_utilization: 0.4"),
        ("vllm", "vllm_mode", "colocate", "vllm.colocate: true"),
        ("vllm", "vllm_server_port", 8000, "vllm.url"),
        ("vllm", "port", 8000, "the line removed"),
        ("trainer", "per_device_train_batch_size", 2, "trainer.micro_batch_size: 2"),
        ("trainer", "bf16", True, "trainer.precision: bfloat16"),
        ("trainer", "fp16", True, "trainer.precision: bfloat16"),
        ("lora", "lora_alpha", 32, "lora.alpha: 32"),
        ("lora", "rank", 8, "lora.r: 8"),
        ("trl", "num_generations", 4, None),
    ],
)
def test_names_inside_sections(section: str, name: str, value: object, expected: str | None) -> None:
    errors = errors_of({section: {name: value}})
    if expected is None:  # the whole section is another tool's
        assert "ebft.n_samples_per_prompt" in str(errors[section].hint)
    else:
        assert errors[f"{section}.{name}"].expected == expected


AXOLOTL_STRUCTURED: dict[str, Any] = {
    "num_generations": 4,
    "max_completion_length": 512,
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_server_port": 8000,
    "vllm_sync_interval": 5,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_cap": 2.0,
    "vllm_lora_sync": True,
    "async_prefetch": True,
    "prefetch_depth": 2,
    "streaming_partial_batch": True,
    "skip_zero_advantage_batches": True,
    "off_policy_mask_threshold": 0.5,
    "replay_buffer_size": 16,
    "replay_recompute_logps": True,
    "reroll_start_fraction": 0.5,
    "reroll_max_groups": 2,
    "num_iterations": 2,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "scale_rewards": True,
    "mask_truncated_completions": True,
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "beta": 0.0,
    "reward_funcs": ["my_rewards.accuracy"],
    "reward_weights": [0.5],
}

# What each of these becomes; None: nothing.
OURS = {
    "num_generations": "ebft.n_samples_per_prompt: 4",
    "max_completion_length": "ebft.max_completion_length",
    "use_vllm": "rollout.use_vllm",
    "vllm_mode": "vllm.colocate: false",
    "vllm_server_port": "vllm.url",
    "vllm_sync_interval": "rollout.sync_interval: 5",
    "vllm_importance_sampling_correction": None,
    "vllm_importance_sampling_cap": "rollout.is_cap: 2.0",
    "vllm_lora_sync": None,
    "async_prefetch": "rollout.prefetch_depth: 1",
    "prefetch_depth": "rollout.prefetch_depth",
    "streaming_partial_batch": None,
    "skip_zero_advantage_batches": "rollout.skip_zero_advantage_batches",
    "off_policy_mask_threshold": "rollout.off_policy_mask_threshold",
    "replay_buffer_size": "rollout.replay_buffer_size",
    "replay_recompute_logps": None,
    "reroll_start_fraction": None,
    "reroll_max_groups": "rollout.max_rerolls",
    "num_iterations": "rollout.num_iterations",
    "epsilon": "rollout.epsilon",
    "epsilon_high": "rollout.epsilon_high",
    "scale_rewards": "ebft.scale_rewards",
    "mask_truncated_completions": "ebft.mask_truncated_completions",
    "temperature": "ebft.temperature",
    "top_p": "ebft.top_p",
    "top_k": "ebft.top_k",
    "min_p": "ebft.min_p",
    "repetition_penalty": "ebft.repetition_penalty",
    "beta": "ebft.kl_coef: 0.0",
    "reward_funcs": "rewards",
    "reward_weights": "rewards[].weight",
}


def test_every_line_of_axolotls_section_trl_is_answered() -> None:
    hint = str(errors_of({"trl": AXOLOTL_STRUCTURED})["trl"].hint)
    found = dict(re.findall(r"`(\w+)` becomes `([^`]+)`", hint))
    assert found == {name: ours for name, ours in OURS.items() if ours is not None}


@pytest.mark.parametrize("name", OURS)
def test_the_same_lines_in_a_flat_file(name: str) -> None:
    error = errors_of({name: AXOLOTL_STRUCTURED[name]})[name]
    said = f"{error.expected} {error.hint}"
    assert "the line removed" in said if OURS[name] is None else OURS[name] in said


@pytest.mark.parametrize(("value", "ours"), [(True, "group"), (False, "none")])
def test_a_switch_that_is_a_choice_here(value: bool, ours: str) -> None:
    error = errors_of({"ebft": {"scale_rewards": value}})["ebft.scale_rewards"]
    assert ours in str(error.hint)


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [("lora", "a section `lora:`"), ("qlora", "not supported"), (None, "lora: null"), ("x", "or lora: null")],
)
def test_adapter(adapter: str | None, expected: str) -> None:
    assert expected in str(errors_of({"adapter": adapter})["adapter"].expected)


def test_a_type_of_a_data_set_becomes_the_transform() -> None:
    error = errors_of({"data": {"sources": [{"path": "a", "type": "alpaca"}]}})["data.sources[0].type"]
    assert error.expected == "data.transform"


def _our_keys() -> list[tuple[str, str]]:
    pairs = []
    for name, (_, ours, _) in RENAMED.items():
        texts = [ours] if isinstance(ours, str) else list(ours.values())
        pairs += [
            (name, key) for text in texts for key in re.findall(r"[a-z]+(?:\[\])?(?:\.[a-z_0-9]+)+", text)
        ]
    return pairs


@pytest.mark.parametrize(("name", "ours"), _our_keys())
def test_the_keys_we_name_exist(name: str, ours: str) -> None:
    path = tuple(part for part in ours.replace("[]", ".0").split("."))
    assert schema_view.node_at(tuple(int(part) if part == "0" else part for part in path)) is not None


def test_no_key_of_ours_is_called_foreign() -> None:
    ours = {
        path.split("[]")[0] + path.partition("[]")[2]
        for paths in schema_view.leaf_paths().values()
        for path in paths
    }
    for name in [*RENAMED, *NOT_NEEDED]:
        assert name not in ours
