"""The vLLM server of structured mode: its command line, its keeper, and the client that talks to it.

The server lives in an environment of its own and is spoken to over HTTP only, so nothing here imports vLLM,
and only the weight syncs import torch. `config -> spec.py (command, environment) -> server.py (one process)
-> keeper.py (restarts it)`; `state.py` is the file by which everybody else learns where the server is,
`client.py` what they say to it. `sync.py` (adapters) and `model_sync.py` (all weights) bring the policy
there, `canary.py` checks what arrived.
"""
