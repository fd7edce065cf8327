"""The stub with weights is a second opinion on log-probabilities: it must agree with transformers itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.vllm_server.builders import kept, served_config, stub_python, true_model


def test_true_log_probabilities_with_and_without_an_adapter(tmp_path: Path) -> None:
    folder, adapter = true_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    config = served_config(
        stub_python(tmp_path, tmp_path / "faults.json"),
        vllm={"startup_timeout": 60.0, "health_interval": 0.5, "hang_timeout": 20.0},
    )
    prompt = [5, 80, 200]
    with kept(tmp_path, config=config, model=folder) as holder:
        holder.ready(seconds=60.0)
        client = holder.client(timeout=30.0)
        client.load_adapter("policy-v1", str(adapter))
        plain = client.complete(prompt, n=2, max_tokens=5, temperature=0.6, seed=3)
        tuned = client.complete(prompt, n=2, max_tokens=5, temperature=0.6, seed=3, model="policy-v1")
        tuned_score = client.score([5, 80, 200, 7], "policy-v1")
        client.load_adapter("policy-v2", str(adapter))
        client.unload_adapter("policy-v1")
        assert client.score([5, 80, 200, 7], "policy-v2") == pytest.approx(tuned_score, abs=1e-5)
        client.unload_adapter("policy-v2")
        assert client.complete(prompt, n=2, max_tokens=5, temperature=0.6, seed=3) == plain
    for completion in plain:
        assert completion.logprobs == pytest.approx(truth(model, prompt, completion.token_ids, 0.6), abs=1e-4)
    model = PeftModel.from_pretrained(model, adapter).eval()
    for completion in tuned:
        assert completion.logprobs == pytest.approx(truth(model, prompt, completion.token_ids, 0.6), abs=1e-4)
    assert tuned_score == pytest.approx(truth(model, [5], [80, 200, 7], 1.0), abs=1e-4)
    assert tuned != plain


def truth(
    model: torch.nn.Module, prompt: list[int], completion: list[int], temperature: float
) -> list[float]:
    tokens = torch.tensor([prompt + completion])
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0].tolist()
