"""A cache over a folder, random traffic over both, and a publisher that follows them.

The test's thread is the engine's. What a consumer ought to know of STORAGE is asked of the store
itself: of all pages that prompts of this life had, those whose objects are there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvtide.cache import Namespace
from kvtide.server.kv_events.block_hashes import VllmHashes
from kvtide.server.kv_events.kv_event_settings import KVEventSettings
from kvtide.server.kv_events.kv_groups import kv_groups
from kvtide.server.kv_events.publisher import Publisher
from kvtide.server.kv_events.publishing import FollowStorage
from kvtide.spec import ModelMemory, RankShape, Tier
from kvtide.storage import Store, open_store
from kvtide.storage.objects import object_key
from tests.cache.building import Rig
from tests.cache.memories import PAGE
from tests.cache.stores import WAIT, settle
from tests.server.kv_events.consuming import Consumer, Known, block_names, held, published

LOCAL = "tcp://127.0.0.1:0"
CAP_BYTES = 30 * 4096
"""Of the folder: about as many pages, which take a block each. The host has room for fewer."""
NAMESPACES = (Namespace(), Namespace(), Namespace(adapter="lora"), Namespace(cache_salt="salt"))
Asked = tuple[tuple[int, ...], Namespace]


class Stocked:
    """One life of a server: its cache, the store in the folder, the publisher.

    seen  the prompts of this life
    """

    def __init__(
        self,
        memory: ModelMemory,
        folder: Path,
        seed: int,
        settings: KVEventSettings | None = None,
        codec: str = "none",
    ) -> None:
        self.chance = random.Random(seed)
        self.seen: dict[Asked, None] = {}
        self._folder = folder
        self._codec = codec
        self._calls: list[Callable[[], None]] = []
        self.rig = Rig(memory, device=12, host=16, patience=WAIT, write_policy="write_through")
        self.cache = self.rig.cache
        self.attach()
        chosen = replace(settings or KVEventSettings(LOCAL, LOCAL), beacon_s=0.1)
        self.publisher = Publisher(chosen, self.cache.index, self._ask)
        self.publisher.read(self.cache.index)
        self.cache.storage.listen(FollowStorage(self.publisher, self.cache, RankShape()))

    def attach(self) -> None:
        settings = f"cap={CAP_BYTES}&floor=0&threads=2&codec={self._codec}"
        url = f"file://{self._folder}?{settings}"
        self.store: Store = open_store(url, self.cache.storage.space)
        self.cache.storage.attach(self.store)

    def _ask(self) -> None:
        self._calls.append(lambda: self.publisher.read(self.cache.index))

    def between_steps(self) -> None:
        while self._calls:
            self._calls.pop()()

    def settle(self) -> None:
        settle(self.rig)

    def close(self) -> None:
        """As at a signal: what is queued is stored, then all is closed."""
        settle(self.rig)
        self.cache.storage.detach(5.0)
        settle(self.rig)
        self.publisher.close()
        self.cache.storage.join(5.0)
        self.rig.end()

    def kill(self) -> None:
        """As by SIGKILL: the publisher's process alone notices that the server has ended."""
        self.publisher._closing.set()
        self.publisher._process.end()
        self.store.close()

    # -- what happens -----------------------------------------------------------------------

    def go(self, steps: int) -> None:
        for _ in range(steps):
            verbs = {
                self.remember: 10, self.ask: 3, self.forget_pages: 1, self.forget_device: 1,
                self.remove: 1, self.quarantine: 0.4, self.clear: 0.1,
            }  # fmt: skip
            (verb,) = self.chance.choices(list(verbs), list(verbs.values()))
            verb()
            self.settle()
            self.between_steps()
        assert self.rig.problems() == []

    def prompt(self) -> Asked:
        """Often one of the folder's, cut short or continued."""
        chance, tokens, namespace = self.chance, (), self.chance.choice(NAMESPACES)
        known = [(row, space) for row, space in self.seen if space == namespace]
        if known and chance.random() < 0.8:
            tokens = chance.choice(known)[0]
            tokens = tokens[: chance.randrange(len(tokens) + 1)]
        for _ in range(chance.randrange(1, 4)):
            tokens += (chance.randrange(4),) * PAGE
        asked = (tokens[: 9 * PAGE], namespace)
        self.seen[asked] = None
        return asked

    def ask(self, asked: Asked | None = None) -> Asked:
        """A prompt arrives, and what the store has of it is fetched."""
        tokens, namespace = asked or self.prompt()
        self.seen[tokens, namespace] = None
        # A page is sought if a token comes after it, which is to be computed.
        more = (9,) if len(tokens) % PAGE == 0 else ()
        self.cache.storage.fetch(self.cache.prompt(tokens + more, namespace))
        settle(self.rig)
        return tokens, namespace

    def remember(self) -> None:
        """A request computes its prompt, and it is stored."""
        tokens, namespace = self.ask()
        lease = self.rig.begin(tokens, namespace=namespace)
        if lease is None:
            return
        self.rig.settle()
        self.rig.compute(lease)
        self.cache.release(lease)
        self.settle()

    def forget_pages(self) -> None:
        """Only the store has them from now on."""
        for tier in (Tier.DEVICE, Tier.HOST):
            self.cache.flush(tier)

    def forget_device(self) -> None:
        self.cache.flush(Tier.DEVICE)

    def remove(self) -> None:
        """Objects of a prompt go, as corrupt ones do."""
        if self.seen:
            keys = self._objects(self.chance.choice(list(self.seen)))
            self.store.remove(self.chance.sample(keys, self.chance.randrange(len(keys) + 1)))

    def quarantine(self) -> None:
        if self.seen:
            tokens, namespace = self.chance.choice(list(self.seen))
            self.rig.quarantine(self.cache.prompt(tokens, namespace))

    def clear(self) -> None:
        self.store.clear()

    # -- what a consumer ought to know ------------------------------------------------------

    def _objects(self, asked: Asked) -> list[bytes]:
        """The keys of the history's objects, page by page."""
        groups = kv_groups(self.cache.memory)
        history = next(anchor for anchor, group in groups.items() if group.history)
        (suffix,) = self.cache.storage.object_suffixes(history, RankShape())
        pages = self.cache.index.page_keys(self.cache.index.prompt(*asked))
        return [object_key(page.key, suffix) for page in pages]

    def wanted(self) -> Known:
        """All that is held, by medium and group; of the store, what is there."""
        index, hashes = self.cache.index, VllmHashes()
        found = held(index)
        there = set()
        for asked in self.seen:
            objects = self._objects(asked)
            names = block_names(index, index.prompt(*asked).packed, asked[1], hashes)
            exists = self.store.exists(objects)
            there |= {name for name, has in zip(names, exists, strict=False) if has}
        if there:
            found["STORAGE", 0] = {published(hashes, name) for name in there}
        return found

    def known_to(self, consumer: Consumer) -> None:
        consumer.until(self.wanted, self.between_steps)
        assert consumer.complaints == []
