"""The EBFT reward inside TRL's GRPOTrainer, beside a reward of one's own: half a minute on a CPU.

    python examples/trl_grpo.py

A tiny model, made here, learns to count on: the prompt is a stretch of the alphabet, the ground truth what
comes next. No verifier is asked; the feature reward compares completions with the ground truth in the
hidden states of a frozen copy of the model. First the model sees some of the alphabet by itself
(plain next-letter training), because the features of a model that knows nothing say nothing.
"""

from __future__ import annotations

import argparse
import string
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from ebft_core.config import EBFTConfig
from ebft_core.trl_reward import FeatureReward

LETTERS = string.ascii_lowercase
SHOWN, ASKED = 4, 4
"""Letters of a prompt and of its ground truth."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model(tokenizer: PreTrainedTokenizerFast, warm_steps: int) -> LlamaForCausalLM:
    """A Llama of 50,000 weights that has begun to learn the alphabet."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    rows = torch.tensor([tokenizer(text=text)["input_ids"] for text in stretches()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(warm_steps):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def stretches() -> list[str]:
    """Every stretch of the alphabet, read in a circle."""
    circle = LETTERS * 2
    return [circle[i : i + SHOWN + ASKED] for i in range(len(LETTERS))]


def make_data() -> Dataset:
    """Columns `prompt` and `ground_truth`."""
    return Dataset.from_list([{"prompt": s[:SHOWN], "ground_truth": s[SHOWN:]} for s in stretches()])


def letters_right(completions: Sequence[str], ground_truth: Sequence[str], **_: Any) -> list[float]:
    """A reward of one's own: share of the letters that stand where they should."""
    return [
        sum(a == b for a, b in zip(text, truth, strict=False)) / len(truth)
        for text, truth in zip(completions, ground_truth, strict=True)
    ]


def train(steps: int, warm_steps: int, output: str) -> list[dict[str, float]]:
    """Train, and return what TRL logged."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, warm_steps)
    n_samples = 8
    reward = FeatureReward(
        model,  # it is copied and frozen, so that the policy does not move its own goal
        tokenizer,
        num_generations=n_samples,
        config=EBFTConfig(whitening="none", embed_method="concat"),
        end_of_sequence=False,  # all completions here are cut after four letters
    )
    arguments = GRPOConfig(
        output_dir=output,
        max_steps=steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        num_generations=n_samples,
        per_device_train_batch_size=8 * n_samples,  # whole groups on every process
        max_completion_length=ASKED,
        scale_rewards="none",  # as EBFT: advantages keep the size of their rewards
        reward_weights=[1.0, 0.0],  # letters_right is only watched
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=[reward, letters_right],
        train_dataset=make_data(),
        processing_class=tokenizer,
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="EBFT's reward in TRL's GRPOTrainer on a tiny model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-steps", type=int, default=25)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as output:
        history = train(options.steps, options.warm_steps, output)
    for start in range(0, len(history), 10):
        part = history[start : start + 10]
        cfm, right = (
            sum(entry[name] for entry in part) / len(part)
            for name in ("ebft/cfm", "rewards/letters_right/mean")
        )
        print(f"steps {start + 1:>2} to {start + len(part):>2}: cfm {cfm:.3f}, letters right {right:.0%}")


if __name__ == "__main__":
    main()
