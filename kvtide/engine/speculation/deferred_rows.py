"""Decoded tokens that the draft is yet to be extended over.

While no request gets drafts, a pass of the draft over one token of each would be spent for nothing.
So what the target captured of these tokens is kept, and one pass extends the draft over many of
them: when drafts are wished for, when a page is complete, whose draft is committed with it, or when
enough are kept. Nothing of the draft is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvtide.cache import Lease
from kvtide.engine.request import Request
from kvtide.engine.staging import Staging

MAX_STEPS = 16
"""Steps whose captured states are kept: 32 MB of 64 requests with 32 KB for a token."""


class DraftRow(NamedTuple):
    """New rows of one sequence: tokens at `position` + 1 and on.

    source  the first row of what the features are given by, as many as there are tokens
    """

    lease: Lease
    position: int
    tokens: Sequence[int]
    source: int

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)


class DeferredRows:
    """Of each request the rows of several steps, one token each."""

    def __init__(self, page_tokens: int, staging: Staging) -> None:
        self._page, self._staging = page_tokens, staging
        self._rows: dict[Request, list[DraftRow]] = {}
        self._captured: list[Tensor] = []
        self._total = 0

    def end(self, request: Request) -> int | None:
        """Where the request's rows end; None if it has none."""
        rows = self._rows.get(request)
        return rows[-1].end if rows and rows[-1].lease is request.lease else None

    def add(self, rows: Mapping[Request, DraftRow], captured: Tensor) -> bool:
        """A step's rows, and what it captured; whether they are to be taken now."""
        due = len(self._captured) + 1 >= MAX_STEPS
        for request, row in rows.items():
            if self.end(request) is None:
                self._rows[request] = []
            self._rows[request].append(row._replace(source=self._total + row.source))
            due |= row.end % self._page == 0
        self._captured.append(captured.clone())
        self._total += len(captured)
        return due

    def take(self) -> tuple[list[DraftRow], Tensor] | None:
        """One row of each request that runs, with all its tokens, and what was captured of them;
        None if there are none."""
        running = [rows for each, rows in self._rows.items() if self.end(each) is not None]
        sources = [row.source for rows in running for row in rows]
        captured, self._captured, self._total = self._captured, [], 0
        self._rows = {}
        if not sources:
            return None
        joined, first = list[DraftRow](), 0
        for rows in running:
            tokens = [token for row in rows for token in row.tokens]
            joined.append(rows[0]._replace(tokens=tokens, source=first))
            first += len(tokens)
        return joined, torch.cat(captured)[self._staging.indices(sources)]
