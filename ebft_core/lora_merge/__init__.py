"""Merge a PEFT LoRA adapter into its base model, shard by shard, without building the model.

    report = merge_adapter(base, adapter, output)
    check_merge(base, adapter, output, prompts_ids=[[1, 2, 3]])

`adapter.py` reads the adapter, `layout.py` learns what each base tensor is, `plan.py` decides what every
tensor becomes, `delta.py` holds the arithmetic, `shards.py` streams, `merge.py` puts them together, and
`check.py` compares the result with PEFT's own forward pass.
"""

from ebft_core.lora_merge.check import MergeCheck, check_merge
from ebft_core.lora_merge.merge import MergeReport, merge_adapter

__all__ = ["MergeCheck", "MergeReport", "check_merge", "merge_adapter"]
