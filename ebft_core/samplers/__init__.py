"""Samplers: where the generated blocks come from.

`strided.py` rolls out at the anchors of documents, in this process. In structured mode `prompts.py` says what
is asked for; `vllm.py` asks a server, `generate.py` the policy itself. Both are a `protocol.Sampler`.
"""
