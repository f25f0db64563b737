"""Stored responses, so that a request can name the one it continues. In memory, and bounded.

A stored response keeps its own input and output and refers to the one before: a conversation of
many turns is stored once. Responses that were used longest ago are forgotten when there are too
many or too many bytes. A forgotten or deleted one can no longer be named; its items stay as long as
a later response of the conversation does.

    forgotten ◀── least recently used ── named ── put, chain, get
        │
        └── bytes are freed when no later response refers to it
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

MAX_RESPONSES = 4096
MAX_BYTES = 256 << 20


@dataclass(slots=True, eq=False)
class _Stored:
    """`users` are its name and the stored responses that continue it."""

    response: Json
    items: list[Json]
    before: _Stored | None
    size: int
    users: int = 1


class ResponseHistory:
    """Responses by id. All methods may be called from any thread."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._named: OrderedDict[str, _Stored] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._named)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all items and responses that are kept, named or not."""
        return self._bytes

    def get(self, response_id: str) -> Json | None:
        with self._lock:
            stored = self._used(response_id)
            return None if stored is None else stored.response

    def chain(self, response_id: str) -> list[Json] | None:
        """The items of a conversation up to this response's output; None if it is unknown."""
        with self._lock:
            stored = self._used(response_id)
            if stored is None:
                return None
            turns = []
            while stored is not None:
                turns.append([*stored.items, *stored.response["output"]])
                stored = stored.before
            return [item for turn in reversed(turns) for item in turn]

    def input_of(self, response_id: str) -> list[Json] | None:
        """The items that a response followed; None if it is unknown."""
        found = self.chain(response_id)
        response = self.get(response_id)
        if found is None or response is None:
            return None
        return found[: len(found) - len(response["output"])]

    def put(self, response: Json, items: list[Json], before: str | None) -> bool:
        """Store a response with the input of its turn.

        False, and nothing is stored, where it is larger than all room, or the response before it
        has been forgotten meanwhile.
        """
        size = len(json.dumps([response, items]))
        with self._lock:
            previous = None if before is None else self._named.get(before)
            if size > self._max_bytes or (before is not None and previous is None):
                return False
            if previous is not None:
                previous.users += 1
            self._named[response["id"]] = _Stored(response, items, previous, size)
            self._bytes += size
            self._trim()
            return response["id"] in self._named

    def delete(self, response_id: str) -> bool:
        """Whether there was such a response."""
        with self._lock:
            stored = self._named.pop(response_id, None)
            if stored is not None:
                self._release(stored)
            return stored is not None

    def _used(self, response_id: str) -> _Stored | None:
        stored = self._named.get(response_id)
        if stored is not None:
            self._named.move_to_end(response_id)
        return stored

    def _trim(self) -> None:
        while len(self._named) > self._max_responses or self._bytes > self._max_bytes:
            _, oldest = self._named.popitem(last=False)
            self._release(oldest)

    def _release(self, stored: _Stored) -> None:
        """One user less; without users its bytes go, and those before it lose a user."""
        released: _Stored | None = stored
        while released is not None:
            released.users -= 1
            if released.users:
                return
            self._bytes -= released.size
            released = released.before
