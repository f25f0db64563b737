"""Entries and pools, which families are put together from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvtide.spec.config import Config
from kvtide.spec.pool import (
    JOINED_GROUP,
    SCALED_GROUP,
    DType,
    Encoding,
    Entry,
    Field,
    PoolSpec,
    Reuse,
    SpecError,
)

WORD_BYTES = 8
"""The scales of a packed vector are within one word, its last."""


class KVDType(Enum):
    """How keys and values are kept. FP8 packs latents and index keys together with their scales."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"

    @classmethod
    def parse(cls, text: str) -> KVDType:
        try:
            return cls(text)
        except ValueError:
            choices = ", ".join(kind.value for kind in cls)
            raise SpecError(f"'{text}' is not a KV dtype; use one of {choices}") from None

    @property
    def element(self) -> DType:
        return _ELEMENTS[self]

    @property
    def unpacked(self) -> DType:
        """For fields that are never stored in 8 bits: rotary parts, convolution inputs."""
        return DType.BF16 if self is KVDType.FP8 else self.element


_ELEMENTS = {
    KVDType.BF16: DType.BF16,
    KVDType.FP16: DType.FP16,
    KVDType.FP32: DType.FP32,
    KVDType.FP8: DType.FP8_E4M3,
}


@dataclass(frozen=True, slots=True)
class Choices:
    """What the caller decides, beside what the config says.

    checkpoint_tokens  where regular checkpoints of recurrent states stand.
    """

    page_tokens: int
    kv: KVDType
    checkpoint_tokens: int


# -- what one layer keeps --------------------------------------------------------------------


def by_head(heads: int, head_dim: int, dtype: DType) -> Entry:
    """Keys and values by head; heads divide over tensor ranks."""
    return Entry(tuple(Field(name, (heads, head_dim), dtype, sharded=True) for name in ("k", "v")))


def attention_entry(config: Config, kv: KVDType) -> Entry:
    heads = config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", default=heads)
    return by_head(kv_heads, _head_dim(config, heads), kv.element)


def _head_dim(config: Config, heads: int) -> int:
    if config.find("head_dim", "attention_head_dim") is not None:
        return config.count("head_dim", "attention_head_dim")
    hidden = config.count("hidden_size")
    if hidden % heads:
        raise config.refusal(
            f"`hidden_size` {hidden} does not divide by {heads} heads; add `head_dim`"
        )
    return hidden // heads


def latent_entry(config: Config, kv: KVDType) -> Entry:
    """MLA: one latent and one rotary key for all heads, so every tensor rank keeps both."""
    rank, rope = config.count("kv_lora_rank"), config.count("qk_rope_head_dim", minimum=0)
    rotary = [Field("rope", (rope,), kv.unpacked)] if rope else []
    return scaled("latent", rank, kv, *rotary)


def scaled(name: str, width: int, kv: KVDType, *beside: Field) -> Entry:
    """A vector, and plain fields; in 8 bits it carries an fp32 scale for every 128 values."""
    vector = Field(name, (width,), kv.element)
    if kv is not KVDType.FP8:
        return Entry((vector, *beside))
    scales = Field(f"{name}_scale", (-(-width // SCALED_GROUP),), DType.FP32)
    return Entry((vector, scales, *beside), encoding=Encoding.SCALED)


def packed(head_dim: int, rope: int, kv: KVDType) -> Entry:
    """DeepSeek-V4's one vector that is both key and value.

    In 8 bits: the part without rotation in e4m3, the rotary part in bf16, a power-of-two scale
    per 64 values, and padding to 8 bytes; 584 bytes for 448 + 64. A layer's page is padded to
    whole rows of values without scales (576 bytes), which is how the published sizes come about.
    """
    if kv is not KVDType.FP8:
        return Entry((Field("kv", (head_dim,), kv.element),))
    nope = head_dim - rope
    scales = -(-nope // JOINED_GROUP)
    if (nope + 2 * rope) % WORD_BYTES or scales > WORD_BYTES:
        raise SpecError(
            f"{nope} values in 8 bits and {rope} rotary ones in 16: their scales are read as one "
            f"word; use a multiple of {WORD_BYTES} bytes before them and at most "
            f"{WORD_BYTES * JOINED_GROUP} values in 8 bits, or --kv-dtype bf16"
        )
    fields = [
        Field("nope", (nope,), DType.FP8_E4M3),
        Field("rope", (rope,), DType.BF16),
        Field("scale", (scales,), DType.UE8M0),
    ]
    if pad := -scales % WORD_BYTES:
        fields.append(Field("pad", (pad,), DType.UINT8))
    return Entry(tuple(fields), row_align_bytes=nope + 2 * rope, encoding=Encoding.JOINED)


@dataclass(frozen=True, slots=True)
class Conv:
    """The inputs a causal convolution still needs: all but one of its kernel's."""

    kernel: int
    dtype: DType

    def inputs(self, name: str, units: int, channels: int) -> tuple[Field, ...]:
        """`units` heads or groups of so many channels each; units divide over tensor ranks."""
        if self.kernel == 1:
            return ()
        shape = (units * channels, self.kernel - 1)
        return (Field(name, shape, self.dtype, sharded=True, groups=units),)


def recurrent_state(name: str, heads: int, rows: int, columns: int) -> Field:
    """A recurrent state by head. It sums over the whole history, so it stays in fp32."""
    return Field(name, (heads, rows, columns), DType.FP32, sharded=True)


def top_k(config: Config) -> int | None:
    """How many entries an indexer selects for a query; None where the config leaves it out."""
    return None if config.find("index_topk") is None else config.count("index_topk")


# -- pools -----------------------------------------------------------------------------------


def history(layers: Iterable[int], entry: Entry) -> PoolSpec:
    return PoolSpec("kv", tuple(layers), entry)


def windowed(config: Config, layers: Sequence[int], entry: Entry) -> list[PoolSpec]:
    """A window of W tokens counts the new one: W−1 before the boundary must be resident."""
    if not layers:
        return []
    window = config.count("sliding_window")
    if window == 1:
        raise config.refusal("`sliding_window` is 1, which keeps nothing; use at least 2")
    return [PoolSpec("swa", tuple(layers), entry, reuse=Reuse(reach=window - 1))]


def checkpoint(layers: Iterable[int], fields: tuple[Field, ...], choices: Choices) -> PoolSpec:
    """The state after a page's last token. One page is enough to resume, where one was kept."""
    return PoolSpec(
        "state",
        tuple(layers),
        Entry(fields),
        tail_entries=1,
        reuse=Reuse(reach=1, stride=choices.checkpoint_tokens),
    )
