"""A small memory of every kind that families declare, and what tests need to copy them.

Memories come from `declare`, as real ones do, so what is copied here is what models will keep.
Sketches are strided copies that no memory gives. Blocks of bytes have guard bands: a copy that
writes one byte too far is seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtide.spec import ModelMemory, PageMove, Slots, Tier, with_draft
from kvtide.spec.families import KVDType, declare, draft_for
from kvtide.tiers.arena import host_arena
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.layout import Arrangement, Layout, Piece
from kvtide.transfer.strided import PieceTable, Strided, Way

# -- memories -------------------------------------------------------------------------------

_HEADS = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_WINDOW = {"sliding_window": 12, "head_dim": 8}
_MLA = {"kv_lora_rank": 32, "qk_rope_head_dim": 8}
_DSA = _MLA | {"index_head_dim": 16}
_DSA_PUBLISHED = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 1}
_NEMOTRON = {
    "num_hidden_layers": 5,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 4,
    "hybrid_override_pattern": "MEM*-",
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 8,
}
_KDA = _MLA | {"num_hidden_layers": 5, "linear_num_heads": 2, "linear_head_dim": 6}
_V4 = {
    "num_hidden_layers": 6,
    "sliding_window": 12,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "index_head_dim": 32,
}
_V4_PUBLISHED = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}

CONFIGS: dict[str, dict[str, object]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1, 3]},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _DSA,
    "deepseek_v4": _V4,
    "falcon_h1": _MAMBA | {"num_hidden_layers": 2},
    "gemma2": _WINDOW,
    "gemma3": {"text_config": _HEADS | _WINDOW | {"num_hidden_layers": 7}},
    "gemma3_text": _WINDOW | {"sliding_window_pattern": 2},
    "glm4_moe_lite": _MLA | {"qk_rope_head_dim": 0},
    "glm_moe_dsa": _DSA | {"index_topk_pattern": "FSSF"},
    "gpt_oss": _WINDOW,
    "granitemoehybrid": _MAMBA,
    "kimi_linear": _KDA,
    "lfm2": {"full_attn_idxs": [1, 3], "hidden_size": 36, "conv_L_cache": 2},
    "llama": {},
    "mistral": _WINDOW,
    "mixtral": {},
    "nemotron_h": _NEMOTRON,
    "qwen2": _WINDOW | {"use_sliding_window": True, "max_window_layers": 3},
    "qwen3": {"head_dim": 8},
    "qwen3_5": {"text_config": _HEADS | _DELTA},
    "qwen3_5_moe": {"text_config": _HEADS | _DELTA},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_moe": {},
    "qwen3_next": _DELTA | {"full_attention_interval": 2},
    "smollm3": {},
}
"""Of every `model_type` that `declare` reads, the fields that make it small."""


def family(
    model_type: str, page_tokens: int, kv: KVDType | None = None, **fields: object
) -> ModelMemory:
    config = _HEADS | CONFIGS[model_type] | fields | {"model_type": model_type}
    return declare(config, model=model_type, page_tokens=page_tokens, kv_dtype=kv)


def _v4(
    page_tokens: int, kv: KVDType | None = None, heavy: int | None = None, **fields: object
) -> ModelMemory:
    """Two layers of each kind. Pages this small need a heavy kind of fewer than 128 tokens."""
    heavy = page_tokens if heavy is None else heavy
    ratios = [0, 4, heavy, 4, heavy, 0]
    return family("deepseek_v4", page_tokens, kv, compress_ratios=ratios, **fields)


def memories(page_tokens: int) -> dict[str, ModelMemory]:
    """Every family by its name, then the variants that keep other bytes."""
    page, v4 = page_tokens, _v4(page_tokens)
    found = {name: family(name, page) for name in CONFIGS if name != "deepseek_v4"}
    dsa = family("glm_moe_dsa", page, KVDType.FP8)
    hybrid, windows = found["qwen3_next"], found["gpt_oss"]
    own_draft = family("deepseek_v4", page, num_hidden_layers=1, compress_ratios=[0])
    return found | {
        "deepseek_v4": v4,
        "deepseek_v4_published_heads": _v4(page, num_hidden_layers=3, **_V4_PUBLISHED),
        "deepseek_v4_published_heads_bf16": _v4(
            page, KVDType.BF16, num_hidden_layers=3, **_V4_PUBLISHED
        ),
        "deepseek_v4_bf16": _v4(page, KVDType.BF16),
        "deepseek_v4_windows_only": _v4(page).slice(range(0, 1)),
        "llama_every_head": family("llama", page, num_key_value_heads=4),
        "llama_fp32": family("llama", page, KVDType.FP32),
        "llama_fp16": family("llama", page, KVDType.FP16),
        "llama_fp8": family("llama", page, KVDType.FP8),
        "deepseek_v3_fp8": family("deepseek_v3", page, KVDType.FP8),
        "deepseek_v32_published_heads_fp8": family(
            "deepseek_v32", page, KVDType.FP8, num_hidden_layers=2, **_DSA_PUBLISHED
        ),
        "glm_moe_dsa_fp8": dsa,
        "qwen3_next_fp8": family("qwen3_next", page, KVDType.FP8),
        "granite_with_attention": family(
            "granitemoehybrid", page, layer_types=["mamba", "attention"] * 2
        ),
        "gpt_oss_draft": with_draft(windows, draft_for(windows, 2)),
        "deepseek_v4_draft_of_its_kind": with_draft(v4, own_draft),
        "glm_moe_dsa_stage": dsa.slice(range(2, 4)),
        "gpt_oss_draft_last_stage": list(with_draft(windows, draft_for(windows, 2)).stages(3))[-1],
        "deepseek_v4_stage": v4.slice(range(3, 6)),
        "qwen3_next_stage": hybrid.slice(range(1, 3)),
        "nemotron_h_stage_without_a_byte": found["nemotron_h"].slice(range(4, 5)),
        "nemotron_h_rank": found["nemotron_h"].slice(tensor_rank=3, tensor_ranks=4),
        "llama_stage_and_rank": found["llama"].slice(range(2, 4), tensor_rank=1, tensor_ranks=2),
    }


PAGE_TOKENS = 16

MEMORIES = memories(PAGE_TOKENS) | {
    "deepseek_v4_published_pages": _v4(256, heavy=128),
}

LAYOUT_PAIRS = [(device, host) for device in Layout for host in Layout]


def some_slots(memory: ModelMemory, first: int) -> dict[str, int]:
    """A different number for every anchor, so that no two could be taken for each other."""
    return {anchor.name: first + number for number, anchor in enumerate(memory.anchors)}


# -- strided copies -------------------------------------------------------------------------

Origins = dict[int, int]
"""Target byte → source byte."""


@dataclass(frozen=True)
class Place:
    """All that a table needs to know of a tier's buffers."""

    address: int


@dataclass(frozen=True)
class Sketch:
    """What a strided copy is made from: pieces by leg, and slots. Offsets are within a block."""

    legs: tuple[tuple[Piece, ...], ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def pieces(self) -> list[Piece]:
        return [piece for leg in self.legs for piece in leg]

    @property
    def bytes(self) -> int:
        """How large a block has to be that holds these slots of any piece."""
        last = max((*self.sources, *self.targets), default=0)
        return max(
            max(p.source_offset, p.target_offset)
            + last * max(p.source_stride, p.target_stride)
            + p.bytes
            for p in self.pieces
        )

    def work(self, source: int = 0, target: int = 0, way: Way = Way.LOAD) -> Strided:
        """The copy between two blocks at these addresses."""
        ends = Place(source), Place(target)
        table = PieceTable.of(way, *ends, self.legs)  # type: ignore[arg-type]
        return Strided(table, np.array(self.sources, np.int64), np.array(self.targets, np.int64))

    def naive(self, leg: int, base: int = 0) -> Origins:
        """The bytes of a leg, one at a time."""
        return {
            base + piece.target_offset + there * piece.target_stride + byte: (
                base + piece.source_offset + here * piece.source_stride + byte
            )
            for piece in self.legs[leg]
            for here, there in zip(self.sources, self.targets, strict=True)
            for byte in range(piece.bytes)
        }


# -- blocks ---------------------------------------------------------------------------------

GUARD_BYTES = 4096


class Block:
    """A tier's buffers between two guard bands, filled with random bytes."""

    def __init__(self, arrangement: Arrangement, whole: torch.Tensor) -> None:
        self.whole = whole
        inside = whole[GUARD_BYTES : GUARD_BYTES + arrangement.bytes]
        self.buffers = Buffers(arrangement, inside)

    def fill(self, rng: np.random.Generator) -> None:
        self.whole.copy_(random_bytes(rng, self.whole.numel()))

    def bytes(self) -> torch.Tensor:
        """All that there is now, guard bands included, as a copy on the CPU."""
        if self.whole.is_cuda:
            torch.cuda.synchronize()
        return self.whole.cpu().clone()


class Tiers:
    """A device block and a host block, with a naive model that says what should be in them."""

    def __init__(
        self,
        memory: ModelMemory,
        layouts: tuple[Layout, Layout],
        device: torch.device,
        slots: tuple[Mapping[str, int], Mapping[str, int]],
    ) -> None:
        self.memory = memory
        on_device, on_host = (
            Arrangement(kept, count, layout)
            for kept, count, layout in zip((memory, memory.at_rest), slots, layouts, strict=True)
        )
        pinned = device.type == "cuda"
        # The arena is pinned for as long as it is referenced.
        self._arena = host_arena(on_host.bytes + 2 * GUARD_BYTES, pinned)
        beside = torch.empty(on_device.bytes + 2 * GUARD_BYTES, dtype=torch.uint8, device=device)
        self.blocks = {
            Tier.DEVICE: Block(on_device, beside),
            Tier.HOST: Block(on_host, self._arena.data),
        }
        self.model: dict[Tier, Block] = {}

    @property
    def device(self) -> Buffers:
        return self.blocks[Tier.DEVICE].buffers

    @property
    def host(self) -> Buffers:
        return self.blocks[Tier.HOST].buffers

    def fill(self, rng: np.random.Generator) -> None:
        for block in self.blocks.values():
            block.fill(rng)
        self.model = {
            tier: Block(block.buffers.arrangement, block.bytes())
            for tier, block in self.blocks.items()
        }

    def poison(self, tier: Tier, anchor: str, slots: Slots) -> None:
        """Turn every bit of these pages over, here and in the model."""
        for blocks in (self.blocks, self.model):
            for pool, layer in self.rows_of(anchor):
                rows = blocks[tier].buffers.rows(pool, layer)
                rows[slots.tolist()] = 255 - rows[slots.tolist()]

    def expect(self, move: PageMove) -> None:
        """Do to the model what the move should have done, one row at a time."""
        for pool, layer in self.rows_of(move.anchor):
            source, target = (
                self.model[tier].buffers.rows(pool, layer) for tier in (move.source, move.target)
            )
            for here, there in zip(move.source_slots, move.target_slots, strict=True):
                target[int(there)] = source[int(here)]

    def assert_as_expected(self) -> None:
        """Every byte of both blocks, guard bands included."""
        for tier, block in self.blocks.items():
            wrong = torch.nonzero(block.bytes() != self.model[tier].whole).flatten()
            assert not len(wrong), f"{tier.name}: {len(wrong)} bytes differ, first at {wrong[0]}"

    def kept(self, anchor: str, slots: Slots) -> list[torch.Tensor]:
        """What there is to move of these pages on the device, row by row."""
        return [self.device.rows(*row)[slots.tolist()] for row in self.rows_of(anchor)]

    def rows_of(self, anchor: str) -> list[tuple[str, int]]:
        """What moves: all but the unfinished part of a page."""
        group = self.memory.at_rest.group(anchor)
        return [(pool.name, layer) for pool in group for layer in pool.layers]


def random_bytes(rng: np.random.Generator, count: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(rng.bytes(count)), np.uint8))


def pick(rng: np.random.Generator, slots: int, count: int) -> Slots:
    """Distinct slots in random order."""
    return rng.permutation(slots)[:count].astype(np.int32)


def slot_array(slots: Sequence[int]) -> Slots:
    return np.array(slots, np.int32)
