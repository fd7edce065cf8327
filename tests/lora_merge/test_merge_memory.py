"""Peak memory of a merge, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from lora_merge.builders import save_adapter, save_base

MB = 2**20
WORKING_SPACE = 32 * MB

# VmHWM and not getrusage's ru_maxrss: the latter starts at the peak of the parent that was forked.
MEASURE = """
import json, re, sys
from pathlib import Path
from ebft_core.lora_merge import merge_adapter
folder = Path(sys.argv[1])
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
merge_adapter(folder / "small_base", folder / "small_adapter", folder / "small_merged")
before = peak()
merge_adapter(folder / "base", folder / "adapter", folder / "merged")
print(json.dumps(peak() - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_peak_memory_is_bounded_by_the_largest_shard(tmp_path: Path) -> None:
    """A 300 MB base in six shards; the small merge before it pays for imports and thread pools."""
    save_adapter(save_base(tmp_path / "small_base", "llama"), tmp_path / "small_adapter")
    config = LlamaConfig(
        vocab_size=6000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=5, num_attention_heads=8
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base", max_shard_size="60MB")
    with torch.no_grad():
        tuned = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", use_dora=True))
        tuned.save_pretrained(tmp_path / "adapter")
    shards = [file.stat().st_size for file in (tmp_path / "base").glob("*.safetensors")]
    adapter = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    assert sum(shards) > 280 * MB
    assert max(shards) < sum(shards) / 4

    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) <= adapter + 1.5 * max(shards) + WORKING_SPACE
