"""Refuses a model that keeps tensors between steps without declaring them.

Such a tensor would be missing from every restored prefix, and the output would differ. So before it
serves, a model runs three tiny steps over memory of their own. In the first two it may build
constant tables. The third has a prefill, a continued prefill and a decode; it must add no tensor to
what the model references, and change none. All steps may view declared pools only, and must view
each of them: a pool without a writer is declared wrongly. A draft runs beside its target and is
checked alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvtide.engine.declared_state.reachable_tensors import Sighting, tensors
from kvtide.engine.residency.hot_residency import hot_pools, hot_tables
from kvtide.layers import Rows, Step
from kvtide.models import Model
from kvtide.models.draft import DraftModel
from kvtide.spec import ModelMemory, PoolSpec
from kvtide.spec.residency import HotShape
from kvtide.tiers import Arrangement, Buffers, HotBuffers, Layout

_GUIDE = "docs/ADDING_A_MODEL.md says how"
_SEQUENCES = 3


class EngineError(ValueError):
    """A model that cannot be served. The message names the remedy."""


def check_declared_state(
    model: Model, device: torch.device, draft: DraftModel | None = None
) -> None:
    """Raise `EngineError` if the model, or its draft, keeps other state than it declares."""
    # Long enough to complete an entry of every pool.
    prompt = 2 + max(pool.tokens_per_entry for pool in model.memory.pools)
    probe = Probe(model, device, prompt + 3, draft)
    probe.step((prompt, 1))
    probe.step((1, 2))
    before = tensors(draft, "draft") | tensors(model, "model")
    probe.step((2, 1, prompt))
    after = tensors(draft, "draft") | tensors(model, "model")
    _refuse_strays(model.memory.model, before, after)
    _refuse_unused(model.memory, probe.asked, draft is not None)


class Probe:
    """A few sequences of up to so many tokens, over pages of their own.

    `asked`: the pools that the model has asked for, and for which of its layers.
    """

    def __init__(
        self, model: Model, device: torch.device, tokens: int, draft: DraftModel | None = None
    ) -> None:
        self.asked: set[tuple[str, int]] = set()
        self._draft = draft
        self._model, self._memory, self._device = model, model.memory, device
        self._pages = -(-tokens // self._memory.page_tokens)
        self._past = [0] * _SEQUENCES
        pages = _SEQUENCES * self._pages
        slots = {anchor.name: pages for anchor in self._memory.anchors}
        arrangement = Arrangement(self._memory, slots, Layout.LAYER_FIRST)
        block = torch.zeros(arrangement.bytes, dtype=torch.uint8, device=device)
        self._buffers = Buffers(arrangement, block)
        page = self._memory.page_tokens
        self._hot = {
            pool.name: HotBuffers(pool, HotShape.of(pool, page, _SEQUENCES, pages), page, device)
            for pool in map(_with_few_hot, self._memory.hot_pools)
        }

    def step(self, counts: tuple[int, ...]) -> None:
        """The next so many tokens of each sequence."""
        positions: list[int] = []
        sequences = []
        for number, count in enumerate(counts):
            past, start = self._past[number], len(positions)
            sequences.append(Rows(start, start + count, past, self._slots(number, count)))
            positions += range(past, past + count)
            self._past[number] += count
        at = torch.tensor(positions, device=self._device)
        tokens, page = at % self._model.vocabulary, self._memory.page_tokens
        hot = hot_pools(self._hot, self._buffers)
        step = Step(tokens, at, tuple(sequences), page, self._view, lambda layer: None, None, hot)
        try:
            self._pass(step)
        except (RuntimeError, IndexError) as flaw:
            raise EngineError(
                f"{self._memory.model}: a first step fails ({flaw}); the weights are not those "
                "that the config describes: download both again"
            ) from flaw

    def _pass(self, step: Step) -> None:
        """As a stage sees it: what the one before would give is as good as any."""
        before = None
        if not self._memory.is_first_stage:
            before = self._model.carried(step.tokens).fill_(1)
        hidden = self._model.forward(step, before)
        if self._memory.is_last_stage:
            self._model.logits(hidden[-1:])
        if self._draft is not None:
            self._draft_pass(self._draft, step)

    def _draft_pass(self, draft: DraftModel, step: Step) -> None:
        """What the target's layers would give is as good as any."""
        captured = [self._model.carried(step.tokens).fill_(1) for _ in draft.captures]
        hidden = draft.forward(step, draft.features(torch.cat(captured, dim=-1)))
        draft.logits(hidden[-1:])

    def _slots(self, sequence: int, count: int) -> Mapping[str, Tensor]:
        first = sequence * self._pages
        slots = np.arange(first, first + self._pages, dtype=np.int32)
        tables = {anchor.name: slots for anchor in self._memory.anchors}
        if self._hot:
            tables |= hot_tables(self._hot, tables, sequence, count, first, self._pages)
        return _Tables(
            {name: torch.from_numpy(t).long().to(self._device) for name, t in tables.items()}
        )

    def _view(self, pool: str, layer: int) -> Mapping[str, Tensor]:
        if not any(p.name == pool and layer in p.layers for p in self._memory.pools):
            raise _undeclared(f"{pool} for layer {layer}")
        self.asked.add((pool, layer))
        return self._hot[pool].view if pool in self._hot else self._buffers.view(pool, layer)


class _Tables(dict[str, Tensor]):
    """A sequence's page tables."""

    def __missing__(self, anchor: str) -> Tensor:
        raise _undeclared(f"{anchor} with slots of its own")


def _with_few_hot(pool: PoolSpec) -> PoolSpec:
    """The pool with a hot buffer for two queries: the device has little left beside its tier."""
    assert pool.hot is not None and pool.selected is not None
    return replace(pool, hot=min(pool.hot, 2 * pool.selected))


def _undeclared(pool: str) -> EngineError:
    return EngineError(
        f"the forward pass asks for a pool {pool}, which the model's memory does not declare; "
        f"declare it ({_GUIDE})"
    )


def _refuse_strays(
    name: str, before: Mapping[int, Sighting], after: Mapping[int, Sighting]
) -> None:
    found = []
    for identity, now in after.items():
        if identity not in before:
            found.append(f"{now.path} holds a new tensor {list(now.shape)} after a step")
        elif now.state != before[identity].state:
            found.append(f"{now.path} was changed in place by a step")
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise EngineError(
            f"{name}: {found[0]}{more}, and no pool keeps it, so a restored prefix would be "
            f"without it; declare a pool for it and keep it there ({_GUIDE}), or let it go"
        )


def _refuse_unused(memory: ModelMemory, asked: set[tuple[str, int]], drafts: bool) -> None:
    """A draft's pools are not required and are the draft's to fill, where it runs."""
    for pool in memory.pools:
        unused = [layer for layer in pool.layers if (pool.name, layer) not in asked]
        wanted = pool.reuse.required or drafts
        if unused and wanted and pool.row_bytes(memory.page_tokens):
            raise EngineError(
                f"{memory.model}: pool {pool.name} is declared for layers {unused}, and the "
                "forward pass never asked for it there; take them out of the declaration, or keep "
                "their state in it"
            )
