"""What the stub server answers from: a tiny transformers model, or a distribution that is made up."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Model(Protocol):
    vocabulary: int

    def logits(self, rows: list[list[int]], adapter: str | None) -> np.ndarray:
        """Logits behind every position of rows of equal length: (rows, length, vocabulary)."""

    def load(self, name: str, path: Path) -> None: ...

    def unload(self, name: str) -> None: ...


class MadeUpModel:
    """A fixed distribution that depends on the previous token and on the adapter's name."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.vocabulary = int(config["vocab_size"])

    def logits(self, rows: list[list[int]], adapter: str | None) -> np.ndarray:
        tokens = np.arange(self.vocabulary)
        shift = 0.0 if adapter is None else 0.1 * len(adapter)
        previous = np.asarray(rows, dtype=np.float64)[..., None]
        return 2.0 * np.sin(1.3 * (previous + 1.0) * (tokens + 1.0) + shift)

    def load(self, name: str, path: Path) -> None:
        pass

    def unload(self, name: str) -> None:
        pass


class TrueModel:
    """A transformers model and its peft adapters; one request at a time."""

    def __init__(self, folder: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        wanted = "auto" if dtype == "auto" else getattr(torch, dtype)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted, local_files_only=True).eval()
        self._peft: Any = None
        self.vocabulary = self._model.config.get_text_config().vocab_size

    def logits(self, rows: list[list[int]], adapter: str | None) -> np.ndarray:
        with self._torch.no_grad(), self._adapter(adapter):
            model = self._model if self._peft is None else self._peft
            return model(input_ids=self._torch.tensor(rows)).logits.double().numpy()

    @contextlib.contextmanager
    def _adapter(self, name: str | None) -> Any:
        if self._peft is None:
            yield
        elif name is None:
            with self._peft.disable_adapter():
                yield
        else:
            self._peft.set_adapter(name)
            yield

    def load(self, name: str, path: Path) -> None:
        from peft import PeftModel

        if self._peft is None:
            self._peft = PeftModel.from_pretrained(self._model, path, adapter_name=name)
        else:
            self._peft.load_adapter(path, adapter_name=name)
        self._peft.eval()

    def unload(self, name: str) -> None:
        if len(self._peft.peft_config) == 1:
            self._model = self._peft.unload()
            self._peft = None
        else:
            self._peft.set_adapter(next(other for other in self._peft.peft_config if other != name))
            self._peft.delete_adapter(name)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def processed(logits: np.ndarray, row: list[int], body: dict[str, Any]) -> np.ndarray:
    """Log-probabilities after penalty, temperature, min-p, top-k and top-p, in vLLM's order."""
    logits = logits.copy()
    penalty = body.get("repetition_penalty") or 1.0
    seen = sorted(set(row))
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    temperature = body.get("temperature", 1.0)
    if temperature < 1e-5:
        return np.where(np.arange(len(logits)) == logits.argmax(), 0.0, -np.inf)
    logits = logits / temperature
    probabilities = np.exp(log_softmax(logits))
    logits[probabilities < (body.get("min_p") or 0.0) * probabilities.max()] = -np.inf
    top_k = body.get("top_k") or 0
    if 0 < top_k < len(logits):
        logits[logits < np.sort(logits)[-top_k]] = -np.inf
    order = np.argsort(logits)  # ascending: the tail whose mass is at most 1 - top_p goes
    tail = np.cumsum(np.exp(log_softmax(logits))[order]) <= 1.0 - (body.get("top_p") or 1.0)
    logits[order[tail]] = -np.inf
    return log_softmax(logits)
