"""Loads the policy, its frozen feature network and the tokenizer as a run configures them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ebft_core.attention.packed import Backend
from ebft_core.config import LoraConfig, RunConfig, TrainerConfig
from ebft_core.errors import UserError
from ebft_core.model_parts import check_supported

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def select_device(config: TrainerConfig) -> torch.device:
    """Where to train.

    Raises:
        UserError: CUDA is asked for and absent.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "no CUDA device is available",
            where="trainer.device",
            value="cuda",
            expected="auto or cpu on this machine",
            hint="check nvidia-smi and that the installed torch is a CUDA build",
        )
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted if config.device == "auto" else config.device)


def select_precision(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """The dtype of the forward passes: `auto` is bfloat16 on a GPU that has it, float32 elsewhere."""
    if config.precision == "auto":
        capable = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if capable else torch.float32
    return torch.bfloat16 if config.precision == "bfloat16" else torch.float32


def select_attention(config: TrainerConfig, device: torch.device) -> Backend:
    """Backend of the packed forward.

    Raises:
        UserError: FlexAttention is asked for on a CPU, where it has no backward.
    """
    if config.attention == "flex" and device.type != "cuda":
        raise UserError(
            "FlexAttention cannot train on a CPU: it has no backward pass there",
            where="trainer.attention",
            value="flex",
            expected="auto or sdpa",
        )
    if config.attention == "auto":
        return "flex" if device.type == "cuda" else "sdpa"
    return config.attention


def empty_model(architecture: Any, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal language model of this architecture without weights (on the meta device)."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(architecture), dtype=torch.float32, trust_remote_code=trust_remote_code
        )


def load_causal_lm(path: Path, dtype: torch.dtype, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal language model from a folder, safetensors only, in evaluation mode on the CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code, local_files_only=True
    )
    return model.eval()


def load_tokenizer(path: Path, config: RunConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, with the run's chat template if it names one."""
    from ebft_core.tokenizer import load_tokenizer as load

    return load(path, config.model)


def load_policy(
    path: Path, config: RunConfig, *, dtype: torch.dtype = torch.float32, adapter: Path | None = None
) -> nn.Module:
    """The model to train, on the CPU: base weights, and adapters where the run uses LoRA.

    Args:
        path: folder of the base model.
        dtype: dtype of the forward passes. LoRA keeps the frozen base in it and the adapters in
            float32; full fine-tuning keeps float32 master weights whatever it is.
        adapter: a trained PEFT folder to load (frozen) instead of new adapters.

    Raises:
        UserError: the LoRA targets match nothing.
    """
    trust = config.model.trust_remote_code
    if adapter is not None:
        from peft import PeftModel

        base = load_causal_lm(path, dtype, trust_remote_code=trust)
        return PeftModel.from_pretrained(base, str(adapter))
    if config.lora is None:
        return load_causal_lm(path, torch.float32, trust_remote_code=trust)
    return _with_new_adapters(
        load_causal_lm(path, dtype, trust_remote_code=trust), config.lora, config.trainer.seed
    )


def check_trainable(model: nn.Module, config: RunConfig) -> None:
    """Find out before anything expensive whether the run can train this model; no weights are touched.

    Args:
        model: the base model, or an empty one of the same architecture.

    Raises:
        UserError: the architecture is not supported, or the LoRA targets match nothing.
    """
    check_supported(model, config.data.sequence_length)
    if config.lora is not None:
        with torch.device("meta"):
            _with_new_adapters(empty_model(model.config), config.lora, seed=0)


def freeze_copy(policy: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The feature network of full fine-tuning: the policy as it is now, frozen, on its own device."""
    frozen = copy.deepcopy(policy).to(device=device, dtype=dtype).eval()
    return frozen.requires_grad_(False)


def _with_new_adapters(base: PreTrainedModel, lora: LoraConfig, seed: int) -> nn.Module:
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    settings: dict[str, Any] = {
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": lora.target_modules,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "task_type": "CAUSAL_LM",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = get_peft_model(base, PeftLoraConfig(**settings))
        except ValueError as error:
            raise UserError(
                "the LoRA targets match no module of the model",
                where="lora.target_modules",
                value=lora.target_modules,
                expected="all-linear, or names such as " + ", ".join(_linear_names(base)),
                hint=str(error),
            ) from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def _linear_names(base: nn.Module) -> list[str]:
    """The last name parts of the model's linear layers, for error messages."""
    names = {
        name.rsplit(".", 1)[-1]
        for name, module in base.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D")
    }
    return sorted(names - {"lm_head", "embed_out"})
