"""A draft's shape: as the target's where its layers attend by head, and what was asked for.

The shape is the draft's `config.json` in the published format, which numbers the layers whose
hidden states it captures by their outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kvtide.layers.rope import rope_parameters
from kvtide.models import fp8
from kvtide.spec.config import Config
from kvtide.spec.families.layer_kinds import language_model
from kvtide.training.prompts import TrainingError

NUMBER_BYTES = 2
"""Of a published weight in bf16."""
SCALE_BYTES = 4
TOKEN_BYTES = 4
"""Of a token of the draft's vocabulary, in d2t."""
HEADER_BYTES = 4096
"""Names and shapes, at the most."""
MLP_STEP = 32
"""The width of an MLP that has to fit into a size is a multiple of this."""
QUANTIZATION = "quantization_config"
"""The field of `config.json` for weights with scales."""
_LATENT_HEAD = 64
"""Of a draft whose target keeps no keys by head."""


class HeadFormat(StrEnum):
    """What a published `lm_head` is in. fp8 has a scale for each block of 128 × 128."""

    BF16 = "bf16"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Numbers of a draft.

    captures    layers of the target whose inputs it takes; their number stands for the last output
    vocabulary  tokens that it may predict; None for all of the target's `target_vocabulary`
    rope        the rotation's fields of `config.json`
    lm_head     what its head is published in; all else is bf16
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    captures: tuple[int, ...]
    vocabulary: int | None
    target_vocabulary: int
    eps: float
    max_positions: int
    rope: Mapping[str, object]
    lm_head: HeadFormat = HeadFormat.BF16

    @property
    def predicted(self) -> int:
        return self.vocabulary or self.target_vocabulary

    @property
    def weights(self) -> int:
        """How many numbers its tensors have."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inputs = self.hidden * (self.layers + 1)
        return (
            len(self.captures) * self.hidden * self.hidden
            + inputs * (queries + 2 * keys)
            + self.layers * (queries * self.hidden + 3 * self.hidden * self.intermediate)
            + self.predicted * self.hidden
            + self.hidden * (2 * self.layers + 2)
        )

    @property
    def bytes(self) -> int:
        """Of the published file, with d2t and t2d, which has a byte for each target's token."""
        mapped = 0
        if self.vocabulary is not None:
            mapped = TOKEN_BYTES * self.vocabulary + self.target_vocabulary
        head = self.predicted * self.hidden
        return NUMBER_BYTES * (self.weights - head) + self._head_bytes + mapped + HEADER_BYTES

    @property
    def _head_bytes(self) -> int:
        if self.lm_head is HeadFormat.BF16:
            return NUMBER_BYTES * self.predicted * self.hidden
        rows, columns = fp8.BLOCK
        scales = -(-self.predicted // rows) * -(-self.hidden // columns)
        return self.predicted * self.hidden + SCALE_BYTES * scales

    def config(self) -> dict[str, object]:
        """The fields of `config.json`."""
        vocabulary = {} if self.vocabulary is None else {"draft_vocab_size": self.vocabulary}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "max_position_embeddings": self.max_positions,
            "vocab_size": self.target_vocabulary,
            **vocabulary,
            **self.rope,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **self._quantization(),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in self.captures],
                "use_aux_hidden_state": True,
            },
        }

    def _quantization(self) -> dict[str, object]:
        if self.lm_head is HeadFormat.BF16:
            return {}
        method = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(fp8.BLOCK),
            "modules_to_not_convert": ["fc", "midlayer", "layers"],
        }
        return {QUANTIZATION: method}


@dataclass(frozen=True, slots=True)
class ShapeRequest:
    """What a draft shall be like; None for what the target suggests.

    max_bytes  of its file: the MLP is as wide as fits
    """

    vocabulary: int = 4096
    layers: int = 1
    intermediate: int | None = None
    captures: Sequence[int] | None = None
    max_bytes: int | None = None
    lm_head: HeadFormat = HeadFormat.BF16


def draft_shape(config: Mapping[str, object], asked: ShapeRequest) -> DraftShape:
    """The shape of a draft for the model with this `config.json`."""
    fields = language_model(Config(str(config.get("model_type")), config))
    _check_streams(fields)
    tokens, hidden = fields.count("vocab_size"), fields.count("hidden_size")
    heads, kv_heads, head_dim = _heads(fields, hidden)
    shape = DraftShape(
        hidden=hidden,
        intermediate=asked.intermediate or fields.count("intermediate_size", default=3 * hidden),
        layers=asked.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        captures=_captures(fields.count("num_hidden_layers"), asked.captures),
        vocabulary=asked.vocabulary if asked.vocabulary < tokens else None,
        target_vocabulary=tokens,
        eps=fields.number("rms_norm_eps", "norm_eps", default=1e-6),
        max_positions=fields.count("max_position_embeddings", default=4096),
        rope=_rope(fields),
        lm_head=asked.lm_head,
    )
    return _fitted(shape, asked)


def _check_streams(fields: Config) -> None:
    if (streams := fields.count("hc_mult", default=1)) > 1:
        raise TrainingError(
            f"{fields.model} has {streams} hidden states of a token, and an EAGLE3 draft takes "
            "one; draft with the model's own layers for multi-token prediction"
        )


def _heads(fields: Config, hidden: int) -> tuple[int, int, int]:
    """Heads, KV heads and their width: the target's, or some where it keeps latents."""
    if fields.find("kv_lora_rank") is None and fields.find("num_attention_heads") is not None:
        heads = fields.count("num_attention_heads")
        dim = fields.count("head_dim", default=max(1, hidden // heads))
        return heads, fields.count("num_key_value_heads", default=heads), dim
    heads = max(1, hidden // _LATENT_HEAD)
    kv_heads = next(count for count in (8, 4, 2, 1) if heads % count == 0)
    return heads, kv_heads, _LATENT_HEAD


def _captures(layers: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    """Three layers near the beginning, the middle and the end, unless others are asked for."""
    if asked is None:
        usual = (2, layers // 2, layers - 3) if layers >= 8 else (1, layers // 2, layers - 1)
        return tuple(sorted({layer for layer in usual if 0 <= layer <= layers}))
    if wrong := [layer for layer in asked if not 0 <= layer <= layers]:
        raise TrainingError(
            f"layer {wrong[0]} cannot be captured: the model has {layers} layers; use numbers in "
            f"0..{layers}"
        )
    return tuple(asked)


def _rope(fields: Config) -> dict[str, object]:
    """The target's rotation, over all of a head."""
    known = rope_parameters(fields)
    theta = {"rope_theta": known.number("rope_theta", default=10_000.0)}
    if str(known.find("rope_type", "type") or "default") == "default":
        return dict(theta)
    left_out = {"rope_theta", "partial_rotary_factor", "max_position_embeddings"}
    scaling = {k: v for k, v in known.values.items() if k not in left_out and v is not None}
    return {**theta, "rope_scaling": scaling}


def _fitted(shape: DraftShape, asked: ShapeRequest) -> DraftShape:
    """With the widest MLP that keeps the draft within `max_bytes`."""
    limit = asked.max_bytes
    if limit is None or shape.bytes <= limit:
        return shape
    per_unit = NUMBER_BYTES * 3 * shape.hidden * shape.layers
    left = limit - shape.bytes + per_unit * shape.intermediate
    width = left // per_unit // MLP_STEP * MLP_STEP
    if asked.intermediate is not None or width < MLP_STEP:
        min_bytes = shape.bytes - per_unit * (shape.intermediate - MLP_STEP)
        needed = shape.bytes if asked.intermediate is not None else min_bytes
        raise TrainingError(
            f"a draft of {shape.predicted:,} tokens takes {needed:,} bytes, and {limit:,} were "
            "asked for; use a smaller --draft-vocab or --intermediate, or a larger --max-size"
        )
    return replace(shape, intermediate=width)
