"""The draft that is trained is the one that is served: the same logits, from the published file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from kvtide.models import fp8
from kvtide.models.draft_checkpoint import open_draft
from kvtide.models.model import Decoder
from kvtide.training.draft_shape import HeadFormat, ShapeRequest, draft_shape
from kvtide.training.draft_vocabulary import DraftVocabulary
from kvtide.training.publish import TrainedDraft
from kvtide.training.trainable_eagle3 import TrainableEagle3
from tests.models.drafting import DraftChunk, DraftPlayer
from tests.models.tiny import VOCABULARY, checkpoint, ours, prompt

TARGET, TOKENS, CLOSE = "llama", 40, 2e-5
FORMS = {
    "one-layer": ShapeRequest(vocabulary=64, captures=(0, 1, 2)),
    "two-layers": ShapeRequest(vocabulary=64, layers=2, captures=(1, 3)),
    "all-tokens": ShapeRequest(vocabulary=VOCABULARY, intermediate=48),
    "fp8-head": ShapeRequest(vocabulary=150, captures=(0, 1, 2), lm_head=HeadFormat.FP8),
}


def random_draft(asked: ShapeRequest) -> tuple[TrainableEagle3, DraftVocabulary | None]:
    torch.manual_seed(3)
    draft = TrainableEagle3(draft_shape(checkpoint(TARGET).config, asked))
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if "norm" in name:
                weight.add_(0.2 * torch.randn_like(weight))
    if draft.shape.vocabulary is None:
        return draft, None
    tokens = torch.randperm(VOCABULARY)[: draft.shape.vocabulary].sort().values
    return draft, DraftVocabulary(tokens, VOCABULARY, 1.0)


@pytest.mark.parametrize("form", FORMS)
def test_a_published_draft_gives_the_trained_logits_at_every_recurrent_step(
    form: str, tmp_path: Path
) -> None:
    trained, vocabulary = random_draft(FORMS[form])
    TrainedDraft.of(trained, vocabulary, torch.float32).publish(tmp_path)
    source = open_draft(tmp_path)
    target = ours(TARGET, draft=source)
    assert isinstance(target, Decoder)
    draft = source.build(target)
    assert draft.captures == trained.shape.captures
    if vocabulary is not None:
        assert draft.vocabulary is not None and torch.equal(draft.vocabulary, vocabulary.tokens)
    player, tokens = DraftPlayer(target, draft), prompt(TOKENS)
    sequence = player.begin(tokens)
    player.step((sequence, TOKENS))
    captured = player.capturing.joined.pop()
    steps, end = 3, TOKENS - 6
    ahead = [torch.tensor([*tokens[1 + s :], *[0] * (1 + s)]) for s in range(steps)]
    given = [target.embedding(one)[None] for one in ahead]
    with torch.no_grad():
        hidden = trained(captured[None], given)
        wanted = [trained.logits(one)[0] for one in hidden]
    features = draft.features(captured[: end + 1])
    chunk = DraftChunk(sequence, 0, tokens[1 : end + 2], features)
    for step in range(steps):
        (rows,) = player.draft_pass(chunk)
        found = draft.logits(rows)
        expected = wanted[step][end - len(found) + 1 : end + 1]
        assert float((found - expected).abs().max()) <= CLOSE, step
        position = end + 1 + step
        chunk = DraftChunk(sequence, position, [tokens[position + 1]], rows[-1:])


@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_as_large_as_its_shape_says_at_the_most(form: str, tmp_path: Path) -> None:
    draft, vocabulary = random_draft(FORMS[form])
    assert draft.shape.weights == sum(weight.numel() for weight in draft.parameters())
    size = TrainedDraft.of(draft, vocabulary).publish(tmp_path)
    assert draft.shape.bytes - 4096 < size <= draft.shape.bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_tensors_have_their_published_names_and_dtypes() -> None:
    draft, vocabulary = random_draft(FORMS["two-layers"])
    tensors = TrainedDraft.of(draft, vocabulary).tensors
    layer = [
        "input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj",
        "post_attention_layernorm", "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj",
        "self_attn.v_proj",
    ]  # fmt: skip
    named = ["fc", "norm", "lm_head", "midlayer.hidden_norm"]
    named += [f"{prefix}.{name}" for prefix in ("midlayer", "layers.1") for name in layer]
    assert tensors.keys() == {*(f"{name}.weight" for name in named), "d2t", "t2d"}
    assert tensors["d2t"].dtype == torch.int32 and tensors["t2d"].dtype == torch.bool
    assert {tensors[f"{name}.weight"].dtype for name in named} == {torch.bfloat16}


def test_a_head_in_fp8_is_published_with_scales_and_read_back_rounded(tmp_path: Path) -> None:
    """150 rows of 96: two blocks, smaller than 128 × 128 at both edges."""
    draft, vocabulary = random_draft(FORMS["fp8-head"])
    TrainedDraft.of(draft, vocabulary).publish(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    head, scales = stored["lm_head.weight"], stored["lm_head.weight_scale_inv"]
    assert head.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    assert head.shape == (150, 96) and scales.shape == (2, 1)
    by_hand = torch.cat([head[:128].float() * scales[0], head[128:].float() * scales[1]])
    opened = open_draft(tmp_path)
    assert torch.equal(opened.weights.get("lm_head.weight"), by_hand)
    assert torch.equal(opened.weights.get("lm_head.weight").bfloat16().float(), by_hand)
    trained = draft.lm_head.weight.detach()
    assert not torch.equal(by_hand, trained) and torch.allclose(by_hand, trained, rtol=1 / 16)
    others = {one.dtype for name, one in stored.items() if name.startswith(("fc", "mid", "norm"))}
    assert others == {torch.bfloat16}
    method = opened.config.nested("quantization_config")
    assert method is not None and method.values["quant_method"] == "fp8"
    assert method.values["weight_block_size"] == [128, 128]


def test_a_head_in_fp8_is_trained_through_its_rounding() -> None:
    draft, _ = random_draft(FORMS["fp8-head"])
    hidden = torch.randn(5, 96)
    draft.logits(hidden).square().sum().backward()
    normed, head = draft.norm(hidden), fp8.rounded(draft.lm_head.weight.detach())
    wanted = (2 * functional.linear(normed, head)).T @ normed
    assert draft.lm_head.weight.grad is not None
    assert torch.allclose(draft.lm_head.weight.grad, wanted, rtol=1e-4, atol=1e-5)
