"""A model's anchors as vLLM's KV cache groups, and tiers as media.

Consumers that know prefixes alone, such as Dynamo's indexer, count the blocks of full attention
and leave windows and states aside. So exactly one group is of such a kind: the first anchor that
keeps the whole history and that a resume needs. Further histories and optional anchors are
`unknown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.spec import ALL, ModelMemory, PoolSpec, Tier

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"}
_LATENT = {"latent", "nope"}
"""Fields of MLA's entries."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """`window` is the sliding window in tokens; `history`: prefixes are counted by its blocks."""

    index: int
    kind: str
    window: int | None
    history: bool


def kv_groups(memory: ModelMemory) -> dict[str, KVGroup]:
    """By anchor, in the order of declaration."""
    groups: dict[str, KVGroup] = {}
    for number, anchor in enumerate(memory.anchors):
        counted = any(group.history for group in groups.values())
        groups[anchor.name] = _group(number, anchor, memory.group(anchor.name), counted)
    return groups


def _group(number: int, anchor: PoolSpec, pools: Sequence[PoolSpec], counted: bool) -> KVGroup:
    reuse = anchor.reuse
    latent = any(field.name in _LATENT for pool in pools for field in pool.entry.fields)
    if not reuse.required or (reuse.reach is ALL and counted):
        return KVGroup(number, "unknown", None, history=False)
    if reuse.reach is ALL:
        kind = "mla_attention" if latent else "full_attention"
        return KVGroup(number, kind, None, history=True)
    if reuse.stride is not None:
        return KVGroup(number, "mamba", None, history=False)
    kind = "sliding_window_mla" if latent else "sliding_window"
    return KVGroup(number, kind, reuse.reach + 1, history=False)
