"""A consumer of KV events, as routers have them, and what it ought to know of an index."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Self

import msgpack
import zmq

from kvtide.index import Index, Namespace
from kvtide.index.keys import chain, root_key
from kvtide.index.tree.node import Node, Root
from kvtide.server.kv_events.block_hashes import BlockHashes, VllmHashes
from kvtide.server.kv_events.kv_groups import MEDIA, kv_groups
from kvtide.spec import Tier

DEADLINE_S = 60.0
Known = dict[tuple[str, int], set[Any]]


class Consumer:
    """Follows one publisher, and asks for a replay where numbers have a gap.

    known       hashes by medium and group
    complaints  what a consumer could not make sense of
    deaf        live batches are lost
    """

    def __init__(self, endpoint: str, replay: str, topic: str = "") -> None:
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(topic)
        self._live.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay)
        self._next: int | None = None
        self._known: Known = defaultdict(set)
        self.tokens: dict[Any, tuple[Any, list[int]]] = {}
        self.complaints: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.deaf = False
        self.replays = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    @property
    def known(self) -> Known:
        return {where: set(hashes) for where, hashes in self._known.items() if hashes}

    def poll(self, timeout_ms: int = 5) -> None:
        """Take in what has come."""
        while self._live.poll(timeout_ms):
            timeout_ms = 0
            _, number, payload = self._live.recv_multipart()
            if not self.deaf:
                self._hear(int.from_bytes(number, "big"), payload)

    def connected(self) -> None:
        """Wait for the first batch."""
        deadline = time.monotonic() + DEADLINE_S
        while self._next is None:
            self.poll()
            assert time.monotonic() < deadline, "no batch comes"

    def until(self, wanted: Callable[[], Known], meanwhile: Callable[[], object] = int) -> None:
        """Poll until the consumer knows what is wanted."""
        deadline = time.monotonic() + DEADLINE_S
        while self.known != wanted():
            meanwhile()
            self.poll()
            assert time.monotonic() < deadline, self.difference(wanted())

    def difference(self, wanted: Known) -> str:
        return "; ".join(
            f"{where}: lacks {wanted.get(where, set()) - self._known[where]}, "
            f"has {self._known[where] - wanted.get(where, set())} too many"
            for where in {*wanted, *self._known}
            if wanted.get(where, set()) != self._known[where]
        )

    def ask_for_state(self) -> None:
        """As one that has missed more than the publisher keeps."""
        assert self._next is not None
        self._ask(self._next - 1000)

    def _hear(self, number: int, payload: bytes) -> None:
        if self._next is None or number > self._next:
            self._ask(0 if self._next is None else self._next)
        if self._next is None or number >= self._next:
            self._apply(number, payload)

    def _ask(self, first: int) -> None:
        self.replays += 1
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        last = None
        while True:
            assert self._replay.poll(DEADLINE_S * 1000), "a replay does not end"
            empty, _, number, payload = self._replay.recv_multipart()
            if not payload:
                assert (empty, int.from_bytes(number, "big", signed=True)) == (b"", -1)
                return
            found = int.from_bytes(number, "big")
            assert found >= first and (last is None or found == last + 1)
            last = found
            self._apply(found, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        at, events, rank = msgpack.unpackb(payload)
        assert isinstance(at, float) and rank == 0
        self.events += events
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self._known.clear()
            elif event["type"] == "BlockStored":
                self._stored(event)
            else:
                self._removed(event)

    def _stored(self, event: dict[str, Any]) -> None:
        hashes, size = event["block_hashes"], event["block_size"]
        here = self._known[event["medium"], event["group_idx"]]
        parent = event["parent_block_hash"]
        if here & set(hashes):
            self.complaints.append("stored twice")
        counted = event["kv_cache_spec_kind"] in ("full_attention", "mla_attention")
        if event["medium"] == "GPU" and counted and parent is not None and parent not in here:
            self.complaints.append("on the GPU without the block before it")
        if len(event["token_ids"]) != size * len(hashes):
            self.complaints.append("tokens and blocks do not fit")
        for number, name in enumerate(hashes):
            tokens = event["token_ids"][number * size : (number + 1) * size]
            if self.tokens.setdefault(name, (parent, tokens)) != (parent, tokens):
                self.complaints.append("one hash, two blocks")
            parent = name
        here.update(hashes)

    def _removed(self, event: dict[str, Any]) -> None:
        here = self._known[event["medium"], event["group_idx"]]
        if set(event["block_hashes"]) - here:
            self.complaints.append("removed what was not there")
        here.difference_update(event["block_hashes"])


def until(true: Callable[[], object]) -> None:
    """Wait for what takes a moment."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, "it does not come to be"
        time.sleep(0.005)


# -- what an index has ----------------------------------------------------------------------------


def published(hashes: BlockHashes, digest: bytes) -> Any:
    """A hash as a consumer has it."""
    return msgpack.unpackb(hashes.published(digest))


def unpacked(tokens: bytes) -> tuple[int, ...]:
    return tuple(memoryview(tokens).cast("i"))


def held(index: Index, hashes: BlockHashes | None = None) -> Known:
    """The hashes of all readable pages, by medium and group, hashed from the start each time."""
    hashes, groups = hashes or VllmHashes(), kv_groups(index.memory)
    found: Known = defaultdict(set)
    for node, names in _named(index, hashes):
        for number, cell in enumerate(index.tree.cells):
            group = groups[index.anchor_names[cell.anchor]]
            if cell.tier is Tier.STORAGE and not group.history:
                continue
            if not node.resident >> number & 1:
                continue
            if cell.tier is Tier.DEVICE and group.history and not _closed(node, number):
                continue
            found[MEDIA[cell.tier], group.index] |= {published(hashes, name) for name in names}
    return {where: set(names) for where, names in found.items() if names}


def _named(index: Index, hashes: BlockHashes) -> Iterator[tuple[Node, list[bytes]]]:
    after = index.tree.after_bytes
    for node in index.tree.walk():
        if node.hidden:
            continue
        path = index.tree.path(node)
        root = path[0].parent
        assert isinstance(root, Root)
        namespace, head = root.name
        assert isinstance(namespace, Namespace)
        tokens = head + b"".join(each.tokens for each in path)
        named = block_names(index, tokens[: len(tokens) - after], namespace, hashes)
        yield node, named[node.depth :]


def block_names(
    index: Index, packed: bytes, namespace: Namespace, hashes: BlockHashes
) -> list[bytes]:
    """The hashes of all whole pages of a prompt."""
    size, found = index.page_bytes, list[bytes]()
    whole = packed[: len(packed) // size * size]
    for number, key in enumerate(chain(root_key(index.fingerprint, namespace), whole, size)):
        tokens = unpacked(whole[number * size : (number + 1) * size])
        found.append(hashes.of(key, found[-1] if found else None, tokens, namespace))
    return found


def _closed(node: Node, cell: int) -> bool:
    """Whether all pages before the node are in this cell."""
    above = node.parent
    while above is not None and above.parent is not None:
        if not above.resident >> cell & 1:
            return False
        above = above.parent
    return True
