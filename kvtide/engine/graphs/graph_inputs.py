"""The inputs of a CUDA graph: what changes from one replay to the next, in one buffer.

A graph is captured for a size and replayed with fewer sequences and tokens. The rest is padding:
tokens of sequences without slots, which write nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from kvtide.engine.graphs.graph_capture import GraphCapture
from kvtide.engine.page_tables import Numbers, Table, TableVersion
from kvtide.engine.residency.hot_residency import table_names
from kvtide.layers.step import Batch, Bounds
from kvtide.spec import ModelMemory


class GraphRow(NamedTuple):
    """One sequence of a step: new tokens, how many precede them, and its page table.

    position  of the first token: `past`, unless some pages before it are left out
    lease     with `version` identifies the table, so that an unchanged one is not written again
    """

    tokens: Sequence[int]
    past: int
    position: int
    lease: int
    version: TableVersion
    table: Table


class GraphKind(Enum):
    DECODE = "decode"
    VERIFY = "verify"
    MIXED = "mixed"


class GraphSize(NamedTuple):
    """What a graph is captured for.

    prefills  sequences that may have several tokens
    longest   tokens of a sequence, at the most
    length    of a sequence with its new tokens, at the most
    """

    kind: GraphKind
    tokens: int
    sequences: int
    prefills: int
    longest: int
    length: int

    @property
    def padding(self) -> int:
        """Sequences that take the tokens left over, `longest` each."""
        return 0 if self.kind is GraphKind.DECODE else -(-self.tokens // self.longest)

    @property
    def bounds(self) -> Bounds:
        prompts = self.prefills + (self.padding if self.longest > 1 else 0)
        return Bounds(self.longest, self.length - 1, prompts, singles=True)


class GraphInputs:
    """Buffers for a size, on the host and on the device, all padding at first.

    tokens, positions, batch  on the device, for a `Step`
    extra                     `extra` further numbers on the device; `host_extra` on the host
    used                      tokens that are no padding
    """

    def __init__(
        self, memory: ModelMemory, capture: GraphCapture, size: GraphSize, extra: int = 0
    ) -> None:
        self.size, self._sequences = size, size.sequences + size.padding
        self._names = table_names(memory)
        pages = -(-max(size.length, size.tokens) // memory.page_tokens)
        numbers = 3 * size.tokens + self._sequences * (3 + len(self._names) * pages)
        self._buffer = capture.input_buffer(extra + numbers)
        host = self._buffer.open()
        self.host_extra, self._host = host[:extra], self._parts(host[extra:])
        self._filled: list[tuple[int, TableVersion] | None] = [None] * self._sequences
        self.used = 0
        self.fill(())
        self.send()
        self.extra = self._buffer.on_device[:extra]
        tokens, positions, owners, rows, tables = self._parts(self._buffer.on_device[extra:])
        self.tokens, self.positions = tokens, positions
        # A graph reads these tensors at every replay: the batch keeps their memory taken.
        self.batch = Batch(rows, owners, tables, size.bounds)

    def _parts(self, flat: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Tokens, positions, owners, rows, and page tables by anchor, in one run of numbers."""
        tokens, sequences = self.size.tokens, self._sequences
        each, rest = flat[: 3 * tokens].reshape(3, tokens), flat[3 * tokens :]
        rows = rest[: 3 * sequences].reshape(sequences, 3)
        tables = rest[3 * sequences :].reshape(len(self._names), sequences, -1)
        return *each, rows, {name: tables[i] for i, name in enumerate(self._names)}

    @property
    def host_tokens(self) -> Numbers:
        """To be written between `open` or `fill` and `send`."""
        tokens: Numbers = self._host[0]
        return tokens

    def open(self) -> None:
        """Wait until the device has read what was sent before."""
        self._buffer.open()

    def send(self) -> None:
        """Queue the copy to the device. Does not block."""
        self._buffer.send()

    def fill(self, rows: Sequence[GraphRow]) -> None:
        """Write these rows and padding behind them, on the host."""
        assert all(row.past + len(row.tokens) <= self.size.length for row in rows), "too long"
        tokens, positions, owners, spans, _ = self._host
        counts = [len(row.tokens) for row in rows]
        ends = np.cumsum(counts, dtype=np.int32)
        self.used = used = int(sum(counts))
        given = len(rows)
        past = np.fromiter((row.past for row in rows), np.int32, given)
        tokens[:used] = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int32, used)
        tokens[used:] = 0
        owners[:used] = np.repeat(np.arange(given, dtype=np.int32), counts)
        spans[:given] = np.stack([ends - counts, ends, past], 1)
        first = np.fromiter((row.position for row in rows), np.int32, given)
        positions[:used] = np.arange(used) + np.repeat(first - spans[:given, 0], counts)
        spans[given:] = 0
        # Padding tokens belong to sequences of their own, as long as any may be.
        padding, longest = np.arange(len(tokens) - used), self.size.longest
        owners[used:], positions[used:] = given + padding // longest, padding % longest
        firsts = used + padding[::longest]
        ends = np.minimum(firsts + longest, len(tokens))
        spans[given : given + len(firsts), 0], spans[given : given + len(firsts), 1] = firsts, ends
        for number in range(self._sequences):
            self._fill_table(number, rows[number] if number < given else None)

    def _fill_table(self, number: int, row: GraphRow | None) -> None:
        """Write a page table, unless it stands there already."""
        wanted = None if row is None else (row.lease, row.version)
        if self._filled[number] == wanted:
            return
        self._filled[number] = wanted
        for name, slots_of in self._host[-1].items():
            slots = () if row is None else row.table.get(name, ())
            known = min(len(slots), slots_of.shape[1])
            slots_of[number, :known] = slots[:known]
            slots_of[number, known:] = -1
