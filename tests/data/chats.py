"""Chat tokenizers and templates of the families that matter, and conversations for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ebft_core.scratch.tokenizer import byte_backend

BOS, EOS = "<s>", "</s>"
MARKS = ["<|im_start|>", "<|im_end|>", "<|end|>", "<think>", "</think>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
CLOSES_WITH_EOS = (  # like Phi-3: a finished conversation gets one more token behind its last turn
    "{% for m in messages %}{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% else %}{{ eos_token }}{% endif %}"
)
NO_HEADER = (  # like Mistral: no generation prompt, the turn ends with the end of the sequence
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
APPENDING = {"chatml": CHATML, "bos": WITH_BOS, "eos": CLOSES_WITH_EOS, "no header": NO_HEADER}

# Like Qwen3: thinking of turns before the last question is dropped, the others have a block even if empty;
# `enable_thinking: false` closes the block in the generation prompt.
RETHINKING = """
{%- set ns = namespace(asked=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role != 'assistant' %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- else %}
        {%- set thought, answer = '', m.content %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in m.content %}
            {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set answer = m.content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.asked and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- answer.lstrip('\n') + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '' if enable_thinking is not defined or enable_thinking else '<think>\n\n</think>\n\n' }}
{%- endif %}"""


def chat_tokenizer(template: str | None, *, bos: bool = False, merges: bool = False) -> Any:
    """Bytes and the marks of the templates above as tokens of their own.

    With `bos` the tokenizer itself begins every sequence with `<s>`; with `merges` two line breaks, and
    a line break and an `x`, are one token, which can span the border between prompt and answer.
    """
    backend = byte_backend()
    if merges:
        vocabulary = backend.get_vocab(with_added_tokens=False)
        pairs = [("Ċ", "Ċ"), ("Ċ", "x")]
        vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(pairs)}
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in (BOS, EOS, *MARKS)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def talk(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation in which user and assistant take turns."""
    turns = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    return ([{"role": "system", "content": system}] if system else []) + turns


_TEXT = st.text(st.sampled_from("ab x\né世"), min_size=1, max_size=8).filter(str.strip)
TALKS = st.builds(
    lambda texts, system: talk(*texts, system=system),
    st.lists(_TEXT, min_size=2, max_size=6),
    st.none() | _TEXT,
)
