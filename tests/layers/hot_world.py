"""A hot pool with sequences whose entries are known: every step leaves the right bytes everywhere.

The world plays the engine's part: it hands out host slots and hot rows, makes page tables, advances
the clock, and writes each step's entries to their pages as the write kernels do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.step import HOT_ROWS, Batch, HotPool, Rows, Step, host_table
from kvtide.spec import ModelMemory, PoolSpec
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.layout import Arrangement, Layout

Chunk = tuple[int | None, int]
"""A sequence, None for padding, and how many new tokens it has."""


@dataclass
class HotSequence:
    """Entries by layer as bytes (entries, entry bytes), and how many tokens are computed."""

    row: int
    host_slots: Tensor
    entries: dict[int, Tensor] = field(default_factory=dict)
    past: int = 0


class HotWorld:
    """Hot rows for so many sequences, each of up to `longest` pages.

    `gap`: bytes between the host's rows, as other layouts have them.
    """

    def __init__(
        self,
        pool: PoolSpec,
        page_tokens: int,
        sequences: int,
        longest: int,
        device: torch.device,
        gap: int = 0,
    ) -> None:
        assert pool.hot is not None and pool.selected is not None
        self.pool, self.page_tokens, self.device = pool, page_tokens, device
        self.generator = torch.Generator().manual_seed(11)
        self.page_entries = pool.entries_per_page(page_tokens)
        self.row_bytes = pool.row_bytes(page_tokens)
        rows, self.longest = sequences + 1, longest
        ring = (pool.hot // pool.selected + page_tokens - 2) // page_tokens + 1
        hot_pages = len(pool.layers) * rows * -(-pool.hot // self.page_entries)
        self.gather_pages = sequences * longest
        pages = hot_pages + rows * ring + self.gather_pages
        slots = sequences * longest + 2
        self.host = self._bytes(len(pool.layers), slots, self.row_bytes + gap, pinned=True)
        shape = (len(pool.layers), rows, pool.hot)

        def full(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self.hot = HotPool(
            *(pool.hot, rows, ring, pool.layers, self.page_entries),
            pages=self._bytes(pages, self.row_bytes),
            held=full(-1, *shape),
            used=full(-1, *shape),
            clock=full(0, 1),
            marks=full(-1, rows, longest * self.page_entries),
            wanted=full(0, self.gather_pages * self.page_entries),
            host_rows=self.host_rows,
            counts=full(0, len(pool.layers), 3, dtype=torch.int64),
        )
        free = torch.randperm(slots, generator=self.generator)
        order = torch.randperm(rows, generator=self.generator)
        self.sequences = [
            HotSequence(int(order[n]), free[n * longest : (n + 1) * longest])
            for n in range(sequences)
        ]
        for one in self.sequences:
            none = torch.zeros(0, pool.entry.bytes, dtype=torch.uint8)
            one.entries = dict.fromkeys(pool.layers, none)
        self.fields = self._fields(self.hot.pages)

    def _fields(self, pages: Tensor) -> Mapping[str, Tensor]:
        """Pages as layers see them."""
        pool = replace(self.pool, layers=(0,), hot=None)
        memory = ModelMemory("test", self.page_tokens, (pool,), layers=1)
        arrangement = Arrangement(memory, {pool.name: len(pages)}, Layout.LAYER_FIRST)
        return Buffers(arrangement, pages.flatten()).view(pool.name, 0)

    def _bytes(self, *shape: int, pinned: bool = False) -> Tensor:
        values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator)
        if pinned:
            return values.pin_memory() if self.device.type == "cuda" else values
        return values.to(self.device)

    def host_rows(self, layer: int) -> Tensor:
        return self.host[self.pool.layers.index(layer), :, : self.row_bytes]

    def some(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def place(self, layer: int) -> Place:
        return Place(self.pool, layer)

    def packed(self, count: int) -> Tensor:
        """Random entries as bytes."""
        place = self.place(self.pool.layers[0])
        values = {
            part.logical.name: self.some(count, *part.logical.shape) for part in place.packing.parts
        }
        fields = place.packing.pack(values)
        parts = [fields[part.name].view(torch.uint8) for part in self.pool.entry.fields]
        return torch.cat([part.flatten(1) for part in parts], 1)

    def found(self, number: int, tokens: int) -> None:
        """A sequence begins with so many tokens in the cache: on the host, and none of them hot."""
        one, each = self.sequences[number], self.page_entries
        assert one.past == 0
        one.past = tokens
        entries = torch.arange(tokens // self.pool.tokens_per_entry)
        for layer in self.pool.layers:
            one.entries[layer] = self.packed(len(entries))
            pages = self.by_entry(self.host_rows(layer))
            pages[one.host_slots[entries // each], entries % each] = one.entries[layer]

    # -- steps -----------------------------------------------------------------------------------

    def step(self, chunks: Sequence[Chunk]) -> ForwardPass:
        """The next tokens of these sequences, with new entries in all layers."""
        self.hot.clock.add_(1)
        rows, first, gathered = [], 0, 0
        each = self.pool.tokens_per_entry
        for number, count in chunks:
            if number is None:
                rows.append(Rows(first, first + count, 0, self._no_tables()))
            else:
                one = self.sequences[number]
                is_hot = count * (self.pool.selected or 0) <= self.hot.entries
                rows.append(
                    Rows(first, first + count, one.past, self._tables(one, is_hot, gathered))
                )
                gathered += 0 if is_hot else self.longest
                new = rows[-1].total // each - one.past // each
                for layer, entries in one.entries.items():
                    kept = entries[: one.past // each]
                    one.entries[layer] = torch.cat([kept, self.packed(new)])
            first += count
        at = torch.cat([torch.arange(r.past, r.total) for r in rows]).to(self.device)
        batch = Batch.of(rows, self.device)
        step = Step(
            *(at, at, tuple(rows), self.page_tokens, lambda *_: self.fields, lambda _: None, batch),
            hot={self.pool.name: self.hot},
        )
        return ForwardPass(step)

    def resident(self, run: ForwardPass, chunks: Sequence[Chunk], layer: int) -> ForwardPass:
        """The same step over device pages that hold all entries."""
        pages = torch.zeros(len(chunks) * self.longest, self.row_bytes).byte()
        entries, sequences = self.by_entry(pages), []
        for index, ((number, _), rows) in enumerate(zip(chunks, run.sequences, strict=True)):
            table = index * self.longest + torch.arange(self.longest)
            if number is None:
                table = torch.full_like(table, -1)
            else:
                ours = self.sequences[number].entries[layer]
                at = torch.arange(len(ours))
                entries[table[at // self.page_entries], at % self.page_entries] = ours
            sequences.append(replace(rows, slots={self.pool.name: table.to(self.device)}))
        fields = self._fields(pages.to(self.device))
        batch = Batch.of(sequences, self.device)
        step = replace(run.step, sequences=tuple(sequences), batch=batch, hot={})
        return ForwardPass(replace(step, view=lambda *_: fields))

    def write(self, run: ForwardPass, chunks: Sequence[Chunk], layer: int) -> None:
        """New entries of a layer to the pages of the step."""
        for (number, _), rows in zip(chunks, run.sequences, strict=True):
            if number is None:
                continue
            entries = self.new_entries(rows)
            pages = rows.slots[self.pool.name][entries // self.page_entries]
            at = entries % self.page_entries
            self.by_entry(self.hot.pages)[pages, at] = (
                self.sequences[number].entries[layer][entries].to(self.device)
            )

    def end(self, run: ForwardPass, chunks: Sequence[Chunk], rejected: int = 0) -> None:
        """The step is done; the last tokens of sequences with several were rejected."""
        for (number, count), rows in zip(chunks, run.sequences, strict=True):
            if number is not None:
                self.sequences[number].past = rows.total - min(rejected, max(0, count - 1))

    def new_entries(self, rows: Rows) -> Tensor:
        each = self.pool.tokens_per_entry
        return torch.arange(rows.past // each, rows.total // each)

    def by_entry(self, pages: Tensor) -> Tensor:
        """(pages, entries, bytes)."""
        size = self.page_entries * self.pool.entry.bytes
        return pages[:, :size].unflatten(1, (self.page_entries, -1))

    def _tables(self, one: HotSequence, is_hot: bool, gathered: int) -> dict[str, Tensor]:
        page = torch.arange(self.longest)
        if is_hot:
            pages = self.hot.first_ring + one.row * self.hot.ring_pages + page % self.hot.ring_pages
        else:
            pages = self.hot.first_gather + gathered + page
        hot_row = torch.full((self.longest,), 77).index_fill_(0, torch.tensor([0]), one.row)
        tables = pages, one.host_slots, hot_row
        return self._named(*(table.to(self.device) for table in tables))

    def _no_tables(self) -> dict[str, Tensor]:
        none = torch.full((self.longest,), -1, device=self.device)
        return self._named(none, none, none)

    def _named(self, *tables: Tensor) -> dict[str, Tensor]:
        name = self.pool.name
        return dict(zip((name, host_table(name), HOT_ROWS), tables, strict=True))

    # -- choices ---------------------------------------------------------------------------------

    def choices(self, run: ForwardPass, kind: str) -> Tensor:
        """(tokens, count) entries that each query may see, -1 where there are fewer."""
        count, each = self.pool.selected or 0, self.pool.tokens_per_entry
        chosen = torch.full((len(run.positions), count), -1, dtype=torch.int32)
        for rows in run.sequences:
            for token in range(rows.start, rows.end):
                visible = (rows.past + token - rows.start + 1) // each
                ours = self._chosen(kind, visible, rows, count)[:count]
                chosen[token, : len(ours)] = ours.int()
        return chosen.to(self.device)

    def _chosen(self, kind: str, visible: int, rows: Rows, count: int) -> Tensor:
        if visible == 0:
            return torch.zeros(0)
        if kind == "newest":
            return torch.arange(max(0, visible - count), visible)
        if kind == "same":
            return torch.arange(min(count, visible))
        if kind == "churn":  # Others than in the step before, if there are enough.
            first = int(self.hot.clock) * count
            return torch.unique((first + torch.arange(count)) % visible)
        if kind == "repeats":
            few = torch.randint(0, visible, (count,), generator=self.generator)
            return torch.where(torch.rand(count, generator=self.generator) < 0.3, -1, few)
        assert kind == "random"
        return torch.randperm(visible, generator=self.generator)[:count].sort().values

    def masks(self, run: ForwardPass, chosen: Tensor) -> list[Tensor]:
        """The same choices as the reference takes them."""
        masks = []
        for rows in run.sequences:
            entries = torch.arange(rows.total // self.pool.tokens_per_entry, device=self.device)
            masks.append((chosen[rows.start : rows.end, :, None] == entries).any(1))
        return masks

    # -- what must hold --------------------------------------------------------------------------

    def snapshot(self) -> tuple[HotPool, Tensor]:
        """A copy of all state, for the reference; its host rows are the second."""
        host, hot = self.host.clone(), self.hot
        names = ("pages", "held", "used", "clock", "marks", "wanted", "counts")
        copies = {name: getattr(hot, name).clone() for name in names}
        layers, size = self.pool.layers, self.row_bytes
        return (
            replace(hot, host_rows=lambda layer: host[layers.index(layer), :, :size], **copies),
            host,
        )

    def check_bytes(self, chunks: Sequence[Chunk], layer: int) -> None:
        """Of these sequences: what is hot, and all entries on the host."""
        for number, _ in chunks:
            if number is None:
                continue
            one, each = self.sequences[number], self.page_entries
            entries = torch.arange(len(one.entries[layer]))
            host = self.by_entry(self.host_rows(layer))
            assert torch.equal(
                host[one.host_slots[entries // each], entries % each], one.entries[layer]
            )
            index = self.pool.layers.index(layer)
            held = self.hot.held[index, one.row].cpu()
            slots = torch.nonzero(held >= 0).squeeze(1)
            entries = held[slots].long()
            assert len(torch.unique(entries)) == len(entries), "an entry is hot once"
            first = (index * self.hot.rows + one.row) * self.hot.row_pages
            found = self.by_entry(self.hot.pages)[first + slots // each, slots % each]
            assert torch.equal(found.cpu(), one.entries[layer][entries])

    def check_located(
        self, run: ForwardPass, chunks: Sequence[Chunk], chosen: Tensor, located: Tensor, layer: int
    ) -> None:
        """Every choice lies where it was located."""
        chosen, located = chosen.cpu().long(), located.cpu().long()
        arena = self.by_entry(self.hot.pages).cpu()
        for (number, _), rows in zip(chunks, run.sequences, strict=True):
            ours, where = chosen[rows.start : rows.end], located[rows.start : rows.end]
            if number is None:
                assert bool((where == -1).all())
                continue
            assert torch.equal(where < 0, ours < 0)
            where, ours = where[ours >= 0], ours[ours >= 0]
            found = arena[where // self.page_entries, where % self.page_entries]
            assert torch.equal(found, self.sequences[number].entries[layer][ours])
