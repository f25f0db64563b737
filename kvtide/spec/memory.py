"""A model's whole memory: its pools, how they hang together, and the slices that ranks own.

`ModelMemory` is what every other room receives. It is frozen and validated at construction, so
the owner of one may rely on all that the checks below promise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvtide.spec.pool import ALL, PoolSpec, Reuse, SpecError
from kvtide.spec.tier import Tier


@dataclass(frozen=True, slots=True)
class RankSlice:
    """Which part of the model a memory describes: a range of global layers, a tensor rank."""

    first_layer: int
    end_layer: int
    tensor_rank: int = 0
    tensor_ranks: int = 1

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)


@dataclass(frozen=True, slots=True, order=True)
class RankShape:
    """How many ranks divide a model: pipeline stages, and tensor ranks of each of them."""

    stages: int = 1
    tensor_ranks: int = 1

    @property
    def ranks(self) -> int:
        return self.stages * self.tensor_ranks

    def __str__(self) -> str:
        return f"--pp {self.stages} --tp {self.tensor_ranks}"


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The pools of one model, or of one rank's slice of it.

    holdback  how many tokens past its end a page depends on. A draft's entry at position i is
              computed from token i+1 (EAGLE3, MTP), so a page is whole, and known by its key,
              only together with the next `holdback` tokens. 0 without such a draft.
    sliced_from  the memory that `part` is a part of; see `whole`
    """

    model: str
    page_tokens: int
    pools: tuple[PoolSpec, ...]
    layers: int
    holdback: int = 0
    part: RankSlice | None = None
    sliced_from: ModelMemory | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = [problem for check in _CHECKS for problem in check(self)]
        if problems:
            raise SpecError("; ".join(problems))

    # -- how the pools hang together --------------------------------------------------------

    @property
    def anchors(self) -> tuple[PoolSpec, ...]:
        """The pools that own slots, in declaration order: their number is their id everywhere."""
        return tuple(pool for pool in self.pools if pool.is_anchor)

    def pool(self, name: str) -> PoolSpec:
        for pool in self.pools:
            if pool.name == name:
                return pool
        names = ", ".join(pool.name for pool in self.pools)
        raise SpecError(f"{self.model}: no pool named {name}; it has {names}")

    def group(self, anchor: str) -> tuple[PoolSpec, ...]:
        """An anchor with its sidecars: what one slot of the anchor stands for."""
        return tuple(p for p in self.pools if p.name == anchor or p.follows == anchor)

    def optional_sidecars(self, anchor: str) -> tuple[str, ...]:
        """Sidecars that a usable page of the anchor may lack: a draft's KV."""
        return tuple(p.name for p in self.pools if p.follows == anchor and not p.reuse.required)

    @property
    def draft_sidecars(self) -> tuple[str, ...]:
        """The optional sidecars that a draft's layers alone write: the model's own never do."""
        optional = (pool for pool in self.pools if pool.follows and not pool.reuse.required)
        return tuple(p.name for p in optional if all(x >= self.layers for x in p.layers))

    def object_pools(self, name: str) -> tuple[PoolSpec, ...]:
        """The pools of one stored object: an optional sidecar alone, an anchor with the others."""
        return tuple(p for p in self.group(name) if p.name == name or p.reuse.required)

    @property
    def without_draft(self) -> ModelMemory:
        """The pools that every page has: what a server without a draft keeps of the same model."""
        pools = tuple(p for p in self.pools if p.is_anchor or p.reuse.required)
        part = self.part
        if part is not None:
            part = replace(part, end_layer=min(part.end_layer, self.layers))
        return replace(self, pools=pools, holdback=0, part=part)

    @property
    def at_rest(self) -> ModelMemory:
        """The pools of a whole page, without those that hold state within a page.

        The host and storage have these, and transfers move these.
        """
        lasting = tuple(pool for pool in self.pools if pool.reuse.reach != 0)
        return self if lasting == self.pools else replace(self, pools=lasting)

    @property
    def hot_pools(self) -> tuple[PoolSpec, ...]:
        """The pools whose pages are on the host while requests run; all of them are anchors."""
        return tuple(pool for pool in self.pools if pool.hot is not None)

    @property
    def in_device_pages(self) -> ModelMemory:
        """The pools whose pages are on the device while requests run."""
        resident = tuple(pool for pool in self.pools if pool.hot is None)
        return self if resident == self.pools else replace(self, pools=resident)

    def kept_in(self, tier: Tier) -> ModelMemory:
        return self.in_device_pages if tier is Tier.DEVICE else self.at_rest

    # -- sizes ------------------------------------------------------------------------------

    def slot_bytes(self, anchor: str) -> int:
        """Bytes behind one slot of an anchor, its sidecars included."""
        return sum(pool.page_bytes(self.page_tokens) for pool in self.group(anchor))

    def history_bytes_per_token(self) -> float:
        """Bytes that grow with every token: the pools whose reach is ALL."""
        grows = (pool for pool in self.pools if pool.reuse.reach is ALL)
        return sum(pool.page_bytes(self.page_tokens) for pool in grows) / self.page_tokens

    def resume_bytes(self) -> int:
        """Bytes besides the history that a resume needs: windows, states, checkpoints."""
        total = 0
        for pool in self.pools:
            pages = pool.reuse.reach_pages(self.page_tokens)
            if pages is not None and pool.reuse.required:
                total += pages * pool.page_bytes(self.page_tokens)
        return total

    # -- slices -----------------------------------------------------------------------------

    @property
    def whole(self) -> ModelMemory:
        """The memory of all ranks together, with the pools it had when it was sliced."""
        return self.sliced_from or self

    @property
    def own_layers(self) -> range:
        """The model's layers in this slice, without a draft's."""
        if self.part is None:
            return range(self.layers)
        return range(self.part.first_layer, min(self.part.end_layer, self.layers))

    @property
    def is_first_stage(self) -> bool:
        """Whether this slice has the model's first layer."""
        return self.own_layers.start == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this slice has the model's last layer."""
        return self.own_layers.stop == self.layers

    @property
    def end_layer(self) -> int:
        """One past the last global layer: the model's own layers, then a draft's."""
        return max([self.layers, *(pool.layers[-1] + 1 for pool in self.pools if pool.layers)])

    def slice(
        self, layers: range | None = None, tensor_rank: int = 0, tensor_ranks: int = 1
    ) -> ModelMemory:
        """The memory of one pipeline stage (a range of global layers) and one tensor rank.

        Anchors stay in every slice, if need be without a layer and so without a byte: every rank
        then has the same tree and makes the same decisions. So do optional sidecars, since the
        tree records which pages have them. Any other sidecar without a layer is left out.
        """
        layers = range(self.end_layer) if layers is None else layers
        if self.part is not None:
            raise SpecError(f"{self.model}: this is a slice already; slice the whole memory")
        if not layers or layers.step != 1 or layers.start < 0 or layers.stop > self.end_layer:
            raise SpecError(
                f"{self.model}: cannot slice layers {layers.start}..{layers.stop}; "
                f"use a range within 0..{self.end_layer}"
            )
        if not 0 <= tensor_rank < tensor_ranks:
            raise SpecError(
                f"{self.model}: tensor rank {tensor_rank} of {tensor_ranks}; "
                "ranks count from 0 and there is at least one"
            )
        owned = tuple(pool.on_layers(layers, tensor_ranks) for pool in self.pools)
        return replace(
            self,
            pools=tuple(p for p in owned if p.layers or p.is_anchor or not p.reuse.required),
            part=RankSlice(layers.start, layers.stop, tensor_rank, tensor_ranks),
            sliced_from=self,
        )

    def ranks(self, shape: RankShape) -> list[ModelMemory]:
        """The memories of all ranks of a shape, in the order of ranks; one rank has the whole."""
        if shape.ranks == 1:
            return [self]
        columns = [
            self.stages(shape.stages, tensor_rank, shape.tensor_ranks)
            for tensor_rank in range(shape.tensor_ranks)
        ]
        return [memory for stage in zip(*columns, strict=True) for memory in stage]

    def first_rank(self, shape: RankShape) -> ModelMemory:
        """The first of `ranks`, without the others."""
        if shape.ranks == 1:
            return self
        return next(self.stages(shape.stages, 0, shape.tensor_ranks))

    def stages(
        self, pipeline_ranks: int, tensor_rank: int = 0, tensor_ranks: int = 1
    ) -> Iterator[ModelMemory]:
        """Equal pipeline stages; the first ones take one layer more where it does not divide.

        A draft's layers go to the last stage, where the target's hidden states come out.
        """
        if not 1 <= pipeline_ranks <= self.layers:
            raise SpecError(
                f"{self.model}: {self.layers} layers over {pipeline_ranks} pipeline ranks; "
                f"use 1 to {self.layers}"
            )
        per_stage, extra = divmod(self.layers, pipeline_ranks)
        start = 0
        for stage in range(pipeline_ranks):
            stop = start + per_stage + (stage < extra)
            last = stage == pipeline_ranks - 1
            layers = range(start, self.end_layer if last else stop)
            yield self.slice(layers, tensor_rank, tensor_ranks)
            start = stop

    # -- identity ---------------------------------------------------------------------------

    def schema_digest(self) -> bytes:
        """A digest of everything that decides what stored bytes mean, the slice included."""
        parts = [f"page={self.page_tokens} holdback={self.holdback} part={self.part}"]
        parts += [repr(pool) for pool in self.pools]
        return hashlib.sha256("\n".join(parts).encode()).digest()


def with_draft(memory: ModelMemory, draft: ModelMemory, holdback: int = 1) -> ModelMemory:
    """`memory` plus the state of a draft model of any number of layers.

    A draft's pools follow anchors of the target and are not required: a prefix restored without
    them is right, only drafted worse. The draft's layers are numbered after the target's.
    """
    if draft.page_tokens != memory.page_tokens:
        raise SpecError(
            f"draft {draft.model}: pages of {draft.page_tokens} tokens beside a target's pages of "
            f"{memory.page_tokens}; declare the draft with page_tokens={memory.page_tokens}"
        )
    pools = tuple(
        replace(
            pool,
            name="draft" if len(draft.pools) == 1 else f"draft_{pool.name}",
            layers=tuple(memory.end_layer + layer for layer in pool.layers),
            follows=_anchor_for(memory, draft, pool).name,
            reuse=replace(pool.reuse, required=False),
        )
        for pool in draft.pools
    )
    return replace(
        memory,
        model=f"{memory.model} + {draft.model}",
        pools=memory.pools + pools,
        holdback=max(memory.holdback, holdback),
    )


def _anchor_for(memory: ModelMemory, draft: ModelMemory, pool: PoolSpec) -> PoolSpec:
    """The target's anchor with the shortest reach that still covers the draft's pool."""
    resident = memory.in_device_pages.anchors
    covering = [anchor for anchor in resident if _outlasts(anchor, pool)]
    if not covering:
        raise SpecError(
            f"draft {draft.model}: pool {pool.name} reaches further back than every anchor of "
            f"{memory.model}; a draft can only follow a target that keeps as much history"
        )
    return min(covering, key=_reach_order)


# -- what a memory must be ------------------------------------------------------------------


def _has_an_anchor(memory: ModelMemory) -> Iterator[str]:
    if memory.page_tokens < 1:
        yield f"{memory.model}: a page of {memory.page_tokens} tokens; use at least 1"
    if not memory.anchors:
        yield f"{memory.model}: no pool owns slots; declare one without `follows`"
    if not 0 <= memory.holdback < max(memory.page_tokens, 1):
        yield (
            f"{memory.model}: a holdback of {memory.holdback} tokens must be less than a page; "
            f"use 0 to {memory.page_tokens - 1}"
        )


def _anchors_keep_something(memory: ModelMemory) -> Iterator[str]:
    for pool in memory.anchors:
        if pool.reuse.reach == 0:
            yield f"pool {pool.name}: owns slots for nothing; use a reach of at least 1"


def _names_are_distinct(memory: ModelMemory) -> Iterator[str]:
    names = [pool.name for pool in memory.pools]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{memory.model}: two pools named {name}; rename one"


def _sidecars_follow_anchors(memory: ModelMemory) -> Iterator[str]:
    by_name = {pool.name: pool for pool in memory.pools}
    for pool in memory.pools:
        if pool.follows is None:
            continue
        anchor = by_name.get(pool.follows)
        if anchor is None or not anchor.is_anchor:
            anchors = ", ".join(a.name for a in memory.anchors) or "none"
            yield f"pool {pool.name}: follows {pool.follows}, which owns no slots; use {anchors}"
        elif not _outlasts(anchor, pool):
            yield (
                f"pool {pool.name}: reaches further back than {anchor.name}, whose slots it uses; "
                "shorten its reach or make it an anchor"
            )
        elif pool.reuse.required and not anchor.reuse.required:
            yield (
                f"pool {pool.name}: required, but {anchor.name}, which it follows, is not; "
                "make both required or neither"
            )


def _outlasts(anchor: PoolSpec, sidecar: PoolSpec) -> bool:
    if anchor.reuse.reach is ALL:
        return True
    return sidecar.reuse.reach is not ALL and sidecar.reuse.reach <= anchor.reuse.reach


def _reach_order(pool: PoolSpec) -> float:
    return math.inf if pool.reuse.reach is ALL else pool.reuse.reach


def _pages_hold_whole_entries(memory: ModelMemory) -> Iterator[str]:
    for pool in memory.pools:
        if memory.page_tokens % pool.tokens_per_entry:
            yield (
                f"pool {pool.name}: a page of {memory.page_tokens} tokens does not hold whole "
                f"entries of {pool.tokens_per_entry}; use a multiple of {pool.tokens_per_entry}"
            )


def _strides_meet_page_ends(memory: ModelMemory) -> Iterator[str]:
    page = memory.page_tokens
    for pool in memory.pools:
        stride = pool.reuse.stride
        if stride and page > 0 and stride % page and page % stride:
            yield (
                f"pool {pool.name}: checkpoints every {stride} tokens never meet the ends of pages "
                f"of {page}; make one a multiple of the other"
            )


def _hot_pools_are_selected_from(memory: ModelMemory) -> Iterator[str]:
    for pool in memory.hot_pools:
        if pool.selected is None:
            yield (
                f"pool {pool.name}: attention reads all its entries, so none of them can stay on "
                "the host; leave it resident"
            )
        elif pool.hot is not None and pool.hot < pool.selected:
            yield (
                f"pool {pool.name}: a hot buffer of {pool.hot:,} entries, and a query selects up "
                f"to {pool.selected:,}; use at least {pool.selected:,}"
            )
        if pool.follows is not None or pool.reuse != Reuse():
            yield f"pool {pool.name}: hot, and no history with slots of its own; make it one"
        if any(other.follows == pool.name for other in memory.pools):
            yield f"pool {pool.name}: hot, and others follow it to the host; let them own slots"
    if memory.hot_pools and not any(a.hot is None and a.reuse.reach is ALL for a in memory.anchors):
        yield f"{memory.model}: no history stays on the device; leave one resident"


_CHECKS = (
    _has_an_anchor,
    _anchors_keep_something,
    _names_are_distinct,
    _sidecars_follow_anchors,
    _pages_hold_whole_entries,
    _strides_meet_page_ends,
    _hot_pools_are_selected_from,
)
