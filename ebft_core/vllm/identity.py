"""Is this the server we mean, and can it do what the run needs?

A port that answers proves nothing: it may be another run's server, an old one, or one without the switches
for adapters. Each of these has an error of its own.
"""

from __future__ import annotations

from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.vllm.client import API_KEY, RequestRefused, ServedModel, ServerGone, VLLMClient
from ebft_core.vllm.spec import ServerSpec
from ebft_core.vllm.state import ServerState

_PROMPT = (1, 2, 3)
_FOREIGN_SECONDS, _FOREIGN_ATTEMPTS = 10.0, 3
_FIRST_ANSWER_SECONDS = 120.0


def check_own(client: VLLMClient, spec: ServerSpec) -> None:
    """Raise UserError unless the server on our port bears this run's nonce."""
    names = [model.name for model in client.models() if model.parent is None]
    if names != [spec.served_name]:
        raise UserError(
            "another server answers on the port of this run's vLLM server",
            where=client.url,
            value=names,
            expected=spec.served_name,
            hint="it took the port while ours was starting: start the run again",
        )
    if spec.max_lora_rank is not None:
        check_runtime_lora(client)


def warm_up(client: VLLMClient, config: RunConfig) -> None:
    """One completion as the run will ask for them: it must work, and the first one compiles code.

    Raises:
        ServerGone, RequestRefused: as `VLLMClient.complete`.
    """
    ebft = config.ebft
    client.complete(
        _PROMPT,
        n=2,
        max_tokens=2,
        temperature=ebft.temperature,
        top_p=ebft.top_p,
        top_k=ebft.top_k,
        min_p=ebft.min_p,
        repetition_penalty=ebft.repetition_penalty,
        seed=0,
    )


def check_foreign(config: RunConfig) -> ServerState:
    """Look at the server of `vllm.url` and return what the run has to know about it.

    Raises:
        UserError: nobody answers, it is no vLLM server, serves several base models, has too short a
            context, does not take adapters at run time, or cannot complete a prompt.
    """
    url = config.vllm.url
    assert url is not None  # the caller looked
    client = VLLMClient(url, "", _FOREIGN_SECONDS, _FOREIGN_ATTEMPTS)
    try:
        base = _single_base(client)
        _check_length(config, base)
        if config.lora is not None:
            check_runtime_lora(client)
        client.model_name, client.timeout = base.name, _FIRST_ANSWER_SECONDS
        warm_up(client, config)
    except ServerGone as error:
        raise UserError(
            "no answer from the vLLM server", where="vllm.url", value=url, hint=str(error)
        ) from error
    except RequestRefused as error:
        hint = f"set {API_KEY} to the server's key" if error.status in (401, 403) else None
        raise UserError(
            f"the server does not do what a vLLM server does: {error}",
            where="vllm.url",
            value=url,
            expected="vLLM's OpenAI-compatible server, 0.22 or later",
            hint=hint,
        ) from error
    finally:
        client.close()
    return ServerState(
        url=client.url, model_name=base.name, phase="ready", model=base.root, max_model_len=base.max_model_len
    )


def check_runtime_lora(client: VLLMClient) -> None:
    """Raise UserError unless the server offers to load adapters while it runs; loads none."""
    try:
        client.load_adapter("", "")
    except RequestRefused as error:
        if error.status not in (404, 405):
            return  # the address exists and complains about the empty name
    raise UserError(
        "the server does not take adapters while it runs",
        where="vllm.url",
        value=client.url,
        expected="a server started with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
        hint="restart it that way, or leave `vllm.url` out: the run then starts its own",
    )


def _single_base(client: VLLMClient) -> ServedModel:
    bases = [model for model in client.models() if model.parent is None]
    if len(bases) != 1:
        raise UserError(
            "the server must serve one base model",
            where="vllm.url",
            value=[model.name for model in bases],
            expected="a single name in /v1/models that is no adapter",
            hint="start it with one --served-model-name",
        )
    return bases[0]


def _check_length(config: RunConfig, base: ServedModel) -> None:
    if base.max_model_len is not None and base.max_model_len <= config.ebft.max_completion_length:
        raise UserError(
            "the server's context is too short for the run's completions",
            where="vllm.url, ebft.max_completion_length",
            value=f"{base.max_model_len} ≤ {config.ebft.max_completion_length}",
            expected="a longer --max-model-len, or shorter completions",
        )
