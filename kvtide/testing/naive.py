"""A naive model of the index: plain sets of pages, slow and independent.

A test announces which pages should become readable (`expect`), and events report those that did
(`hear`). The model judges boundaries by their definition, one page at a time, and never reads the
index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from kvtide.index.events import CellName, Event, EventKind
from kvtide.index.keys import DEFAULT_NAMESPACE, Namespace, pack
from kvtide.spec import ModelMemory, Tier

Where = tuple[Tier, str]


class NaiveIndex:
    def __init__(self, memory: ModelMemory, fingerprint: bytes = b"") -> None:
        self._memory = memory
        self._fingerprint = fingerprint
        self.readable: dict[Where, set[bytes]] = {
            (tier, pool.name): set() for tier in Tier for pool in memory.anchors
        }
        self._expected: set[tuple[Where, bytes]] = set()
        self._unwanted: set[tuple[Where, bytes]] = set()
        self.carried: dict[tuple[Where, bytes], frozenset[str]] = {}
        self._first: dict[bytes, bytes] = {}
        self._at: dict[tuple[CellName, int], tuple[Namespace, bytes, bytes]] = {}
        self.complaints: list[str] = []

    # -- identity, by definition ------------------------------------------------------------

    def page_keys(
        self, tokens: Iterable[int], namespace: Namespace = DEFAULT_NAMESPACE
    ) -> list[bytes]:
        """The names of all pages of a prompt in events, hashed from the start each time.

        A page is known with the tokens of the holdback after it.
        """
        packed, held = pack(list(tokens)), 4 * self._memory.holdback
        page, names = 4 * self._memory.page_tokens, []
        stored = self.stored_keys(tokens, namespace)
        for number in range(max(0, len(packed) - held) // page):
            after = packed[(number + 1) * page :][:held]
            key = stored[number]
            names.append(hashlib.sha256(key + after).digest() if held else key)
        self._first |= dict.fromkeys(names, stored[0] if stored else b"")
        return names

    def stored_keys(
        self, tokens: Iterable[int], namespace: Namespace = DEFAULT_NAMESPACE
    ) -> list[bytes]:
        """The keys of all whole pages of a prompt, which do not depend on what comes after."""
        packed, page = pack(list(tokens)), 4 * self._memory.page_tokens
        key = hashlib.sha256(namespace.fingerprint(self._fingerprint) + b"\0").digest()
        keys = []
        for start in range(0, len(packed) - page + 1, page):
            key = hashlib.sha256(key + packed[start : start + page]).digest()
            keys.append(key)
        return keys

    def first_of(self, key: bytes) -> bytes:
        """The stored key of the first page of the prompts that have this page."""
        return self._first[key]

    # -- the rule, by definition ------------------------------------------------------------

    def boundary(
        self,
        tokens: list[int],
        namespace: Namespace = DEFAULT_NAMESPACE,
        slowest: Tier = Tier.STORAGE,
    ) -> int:
        """The deepest page boundary that leaves a token to compute and is valid."""
        keys = self.page_keys(tokens, namespace)
        limit = (len(tokens) - max(1, self._memory.holdback)) // self._memory.page_tokens
        for boundary in range(min(limit, len(keys)), 0, -1):
            if self.valid(keys, boundary, slowest):
                return boundary
        return 0

    def valid(self, keys: list[bytes], boundary: int, slowest: Tier = Tier.STORAGE) -> bool:
        """Whether everything a resume at `boundary` needs is readable in these tiers."""
        return all(
            any(
                keys[page] in self.readable[tier, pool.name]
                for tier in Tier
                if tier <= max(slowest, pool.home)
            )
            for pool in self._memory.anchors
            if pool.reuse.required
            for page in self._needed(pool.reuse.reach_pages(self._memory.page_tokens), boundary)
        )

    @staticmethod
    def _needed(reach: int | None, boundary: int) -> range:
        return range(0 if reach is None else max(0, boundary - reach), boundary)

    # -- what happens -----------------------------------------------------------------------

    def expect(self, tier: Tier, anchor: str, keys: Iterable[bytes]) -> None:
        """From now on these pages may be stored there, and by the end of the step must be."""
        self._expected |= {((tier, anchor), key) for key in keys}

    def bring(
        self, tier: Tier, anchor: str, key: bytes, sidecars: frozenset[str], *, add: bool = False
    ) -> None:
        """A page comes with these optional sidecars; what the tier has of it stays as it is.

        `add`: a commit, or a copy of sidecars alone. What the tier has gets them as well.
        """
        where = (tier, anchor)
        if key not in self.readable[where]:
            self.carried[where, key] = sidecars
        elif add:
            self.carried[where, key] |= sidecars

    def quarantine(self, tokens: Iterable[int], namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        """All that shares the first page must not be readable at the end of the step: how much."""
        first = self.stored_keys(tokens, namespace)[:1]
        gone = {
            (where, key)
            for where, readable in self.readable.items()
            for key in readable
            if self._first[key] in first
        }
        self._unwanted |= gone
        return len(gone)

    def hear(self, event: Event) -> list[bytes]:
        """Believe an event; returns the names of its pages."""
        where = (event.tier, event.anchor)
        readable = self.readable[where]
        names = self._stored(event) if event.kind is EventKind.STORED else self._removed(event)
        for key in names:
            if event.kind is EventKind.REMOVED:
                if key not in readable:
                    self.complaints.append(f"{where}: removed a page that was not readable")
                readable.discard(key)
                self.carried.pop((where, key), None)
            else:
                if (where, key) not in self._expected:
                    self.complaints.append(
                        f"{where}: stored a page that was neither computed nor copied"
                    )
                if key in readable:
                    self.complaints.append(f"{where}: stored a page twice")
                readable.add(key)
        return names

    def _stored(self, event: Event) -> list[bytes]:
        """The names of pages that were stored, and from now on of their slots."""
        if event.above is not None:
            namespace, tokens, _ = self._at[event.above]
        else:
            assert event.namespace is not None
            namespace, tokens = event.namespace, b""
        before = len(tokens + event.between)
        tokens += event.between + event.tokens
        page = 4 * self._memory.page_tokens
        numbers = memoryview(tokens + event.after).cast("i").tolist()
        names = self.page_keys(numbers, namespace)[before // page :]
        for count, (slot, name) in enumerate(zip(event.slots.tolist(), names, strict=True), 1):
            self._at[event.cell, slot] = (namespace, tokens[: before + count * page], name)
        return names

    def _removed(self, event: Event) -> list[bytes]:
        return [self._at.pop((event.cell, slot))[2] for slot in event.slots.tolist()]

    def end_step(self) -> list[str]:
        """The complaints of this step, with pages that should be readable now, or should not."""
        complaints, self.complaints = self.complaints, []
        complaints += [
            f"{where}: an expected page is not readable"
            for where, key in self._expected
            if key not in self.readable[where]
        ]
        complaints += [
            f"{where}: a quarantined page is readable"
            for where, key in self._unwanted
            if key in self.readable[where]
        ]
        self._expected, self._unwanted = set(), set()
        return complaints
