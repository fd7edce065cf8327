"""Small real inputs for the data tests: files, tokenizers, configurations, stage contexts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ebft_core.base_model import BaseModelInfo, digest_model_folder, write_base
from ebft_core.config import DataConfig, FromScratchConfig, RunConfig, SourceConfig, parse_config
from ebft_core.events import EventWriter
from ebft_core.scratch.tokenizer import make_tokenizer
from ebft_core.stage_runner import StageContext
from ebft_core.stop import StopSignal

BYTE = FromScratchConfig(sources=["stdlib:abc.py"])


def byte_tokenizer() -> Any:
    return make_tokenizer(BYTE, [])


def word_tokenizer(*, bos: bool) -> Any:
    """One token per word; with `bos` it begins every sequence with <s>, as Llama's tokenizer does."""
    words = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(20)), "Q", "A"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def data_config(**fields: Any) -> DataConfig:
    return DataConfig(**{"sources": [SourceConfig(path="stdlib:abc.py")], **fields})


def run_config(sources: list[str], *, model: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    data = {"sources": [{"path": str(s)} for s in sources], "sequence_length": 64, **sections.pop("data", {})}
    return parse_config({"model": model or {"name_or_path": "unused"}, "data": data, **sections})


def structured(sources: list[str], *, model: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    """A run in structured mode; `data` may break rules, which are not checked here."""
    config = run_config(sources, model=model)
    changed = DataConfig(**{**config.data.model_dump(), "transform": "prompt_completion", **data})
    ebft = config.ebft.model_copy(update={"mode": "structured"})
    return config.model_copy(update={"data": changed, "ebft": ebft})


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def stage_context(root: Path, config: RunConfig, inputs: dict[str, Path] | None = None) -> StageContext:
    for name in ("output", "work"):
        (root / name).mkdir(parents=True)
    events = EventWriter(root / "events.jsonl", "test")
    return StageContext(config, root, inputs or {}, root / "output", root / "work", events, StopSignal())


def tiny_model(folder: Path, tokenizer: Any, *, vocab_size: int | None = None) -> Path:
    """A random one-layer Llama with this tokenizer."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size or len(tokenizer), **sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def base_stage(folder: Path, model: Path) -> Path:
    """A `prepare_base` output that points to `model`."""
    folder.mkdir(parents=True)
    write_base(folder, BaseModelInfo(model, digest_model_folder(model), source="test"))
    return folder
