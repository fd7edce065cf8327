"""Backends agree; unsupported architectures are refused; a model without a plan is ordinary."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ebft_core import extract_features, packed_logprobs, rollout
from ebft_core.attention import flex, use_ebft_attention
from ebft_core.errors import UserError
from ebft_core.geometry import pack_layout
from ebft_core.masks import dense_mask
from ebft_core.model_parts import prepare_for_packing
from tests.trainer_fixtures import tiny_llama

ANCHORS = torch.tensor([[4, 9, 17, 26], [5, 11, -1, -1]])
DOCUMENTS = torch.tensor([[0] * 16 + [1] * 14, [0] * 8 + [1] * 12 + [-1] * 10])


def _inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (2, 30), generator=generator)
    return ids, torch.randint(0, 40, (2, 4, 3, 4), generator=generator)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one_document", "packed"])
def test_flex_and_sdpa_agree(documents: torch.Tensor | None) -> None:
    model = tiny_llama().eval()
    ids, tokens = _inputs()
    with torch.no_grad():
        by_sdpa, by_flex = (
            packed_logprobs(
                model, ids, ANCHORS, tokens, temperature=0.7, document_ids_RL=documents, attention=backend
            )
            for backend in ("sdpa", "flex")
        )
    torch.testing.assert_close(by_sdpa, by_flex, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one_document", "packed"])
@pytest.mark.parametrize("phase", ["documents", "blocks"])
def test_tiles_hold_every_visible_score(
    monkeypatch: pytest.MonkeyPatch, documents: torch.Tensor | None, phase: str
) -> None:
    """No visible score outside the named tiles; nothing masked inside the tiles that are taken whole."""
    for tile in (3, 4, 7):
        monkeypatch.setattr(flex, "TILE", tile)
        anchors = ANCHORS[:, :0] if phase == "documents" else ANCHORS
        layout = pack_layout(anchors, 3, 4, 30, documents)
        first = 0 if phase == "documents" else 30
        partial, full = flex.tiles(layout, first)
        T = layout.document_RT.shape[1]
        seen = dense_mask(layout, torch.arange(first, T))[:, 0]
        assert not (partial & full).any()
        named = (partial | full).repeat_interleave(tile, 1).repeat_interleave(tile, 2)
        whole = full.repeat_interleave(tile, 1).repeat_interleave(tile, 2)
        assert not (seen & ~named[:, : T - first, :T]).any()
        assert not (whole[:, : T - first, :T] & ~seen).any()
        if documents is None and tile == 3:
            assert full.any()
            assert (~named).sum() > named.numel() // 4  # most of what is masked is never touched


def test_chunks_cover_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama().eval()
    ids, tokens = _inputs()
    whole = packed_logprobs(model, ids, ANCHORS, tokens, temperature=1.0)
    for queries in (1, 20, 30):
        monkeypatch.setattr("ebft_core.attention.chunks.CHUNK_QUERIES", queries)
        torch.testing.assert_close(packed_logprobs(model, ids, ANCHORS, tokens, temperature=1.0), whole)
    uniforms = torch.rand(2, 4, 3, 4, generator=torch.Generator().manual_seed(1))
    sample = {"n_samples": 3, "generate_max_len": 4, "temperature": 1.0, "uniforms_RANG": uniforms}
    reference = rollout(model, ids, ANCHORS, **sample)
    monkeypatch.setattr("ebft_core.attention.decode.CHUNK_BLOCKS", {"cpu": 5})
    assert torch.equal(rollout(model, ids, ANCHORS, **sample), reference)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one_document", "packed"])
def test_both_ways_to_decode_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, documents: torch.Tensor | None
) -> None:
    """GPUs take one softmax over prefix and own tokens; forced here, so that it is tested without one."""
    model = tiny_llama().eval()
    ids, _ = _inputs()
    sample = {"n_samples": 3, "generate_max_len": 4, "temperature": 1.0, "document_ids_RL": documents}
    sample["uniforms_RANG"] = torch.rand(2, 4, 3, 4, generator=torch.Generator().manual_seed(1))
    joined = rollout(model, ids, ANCHORS, **sample)
    monkeypatch.setattr("ebft_core.attention.decode.JOINED_ON", set())
    monkeypatch.setattr("ebft_core.attention.decode.decode_attention", None)
    assert torch.equal(rollout(model, ids, ANCHORS, **sample), joined)


def test_the_head_runs_in_chunks_without_changing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    ids, tokens = _inputs()

    def gradient() -> torch.Tensor:
        model.zero_grad()
        (packed_logprobs(model, ids, ANCHORS, tokens, temperature=0.6) ** 2).sum().backward()
        return model.lm_head.weight.grad.clone()

    whole = gradient()
    monkeypatch.setattr("ebft_core.logprobs.HEAD_ROWS", 7)
    torch.testing.assert_close(gradient(), whole, rtol=1e-4, atol=1e-4)


def test_a_model_with_our_attention_is_an_ordinary_model(tmp_path) -> None:
    model = tiny_llama().eval()
    ids, _ = _inputs()
    padded = torch.ones_like(ids)
    padded[1, :6] = 0
    expected = model(ids, attention_mask=padded).logits
    prompt = {"input_ids": ids[:1, :8], "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(**prompt)
    use_ebft_attention(model)
    torch.testing.assert_close(model(ids, attention_mask=padded).logits, expected)
    assert torch.equal(model.generate(**prompt), generated)
    model.save_pretrained(tmp_path)
    assert "ebft" not in (tmp_path / "config.json").read_text()
    torch.testing.assert_close(
        LlamaForCausalLM.from_pretrained(tmp_path).eval()(ids, attention_mask=padded).logits, expected
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_bfloat16_runs_and_is_close_to_float32(dtype: torch.dtype) -> None:
    model = tiny_llama().eval()
    ids, tokens = _inputs()
    exact = packed_logprobs(model, ids, ANCHORS, tokens, temperature=1.0)
    phi, _ = extract_features(
        model, ids, ANCHORS, tokens, feature_layers=[0.5, 1.0], embed_method="last_token"
    )
    half = tiny_llama().eval().to(dtype)
    rounded = packed_logprobs(half, ids, ANCHORS, tokens, temperature=1.0)
    assert rounded.dtype == torch.float32
    assert (exact - rounded).abs().mean() < 0.1
    phi_half, _ = extract_features(
        half, ids, ANCHORS, tokens, feature_layers=[0.5, 1.0], embed_method="last_token"
    )
    valid = (phi != 0).any(-1)
    assert (phi * phi_half).sum(-1)[valid].min() > 0.99
    rolled = rollout(half, ids, ANCHORS, n_samples=2, generate_max_len=3, temperature=1.0)
    assert rolled.shape == (2, 4, 2, 3)


def test_features_stop_at_the_deepest_layer() -> None:
    model = tiny_llama().eval()
    ids, tokens = _inputs()
    calls = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, i=index: calls.append(i))
    model.lm_head.register_forward_pre_hook(lambda *_: calls.append("head"))
    extract_features(model, ids, ANCHORS, tokens, feature_layers=[0.25, 0.5], embed_method="last_token")
    assert calls == [0, 1, 0, 1]  # documents, then blocks


def _sliding_mistral() -> torch.nn.Module:
    config = MistralConfig(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, sliding_window=16)  # fmt: skip
    return MistralForCausalLM(config)


def _mixed_qwen() -> torch.nn.Module:
    config = Qwen3Config(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8,
                         num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True,
                         sliding_window=16, max_window_layers=1)  # fmt: skip
    return Qwen3ForCausalLM(config)


def _scaled_granite() -> torch.nn.Module:
    config = GraniteConfig(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, logits_scaling=8.0)  # fmt: skip
    return GraniteForCausalLM(config)


def _short_gpt2() -> torch.nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=20))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_sliding_mistral, "window of 16"),
        (_mixed_qwen, "window of 16"),
        (_scaled_granite, "logits_scaling"),
        (_short_gpt2, "20 positions"),
    ],
)
def test_unsupported_architectures_are_refused_by_name(build, reason: str) -> None:
    model = build()
    with pytest.raises(UserError) as caught:
        prepare_for_packing(model, 40)
    assert reason in caught.value.what
    assert caught.value.value == model.config.model_type
    assert caught.value.where == "model.name_or_path"


def test_a_window_wider_than_the_row_is_no_obstacle() -> None:
    prepare_for_packing(_sliding_mistral(), 16)


def test_recurrent_layers_are_refused() -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=2,
                             num_experts_per_tok=1, moe_intermediate_size=16,
                             shared_expert_intermediate_size=16, linear_num_key_heads=2,
                             linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                             layer_types=["linear_attention", "full_attention"])  # fmt: skip
    with pytest.raises(UserError, match="linear_attention"):
        prepare_for_packing(Qwen3NextForCausalLM(config), 16)


def test_rows_without_padding_marks_and_with_them_share_a_mask() -> None:
    """A row that is one document has the same mask with and without document ids."""
    plain = pack_layout(ANCHORS[:1], 2, 3, 30)
    marked = pack_layout(ANCHORS[:1], 2, 3, 30, torch.zeros(1, 30, dtype=torch.int64))
    assert torch.equal(dense_mask(plain), dense_mask(marked))
    assert torch.equal(plain.position_RT, marked.position_RT)
