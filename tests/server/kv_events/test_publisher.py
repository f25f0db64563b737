"""A subscriber over ZMQ knows what the index has, tier by tier, whatever it missed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtide.index import Namespace
from kvtide.server.kv_events.block_hashes import PageKeyHashes
from kvtide.server.kv_events.kv_event_settings import BlockNames, KVEventSettings
from kvtide.server.kv_events.publisher import Publisher
from kvtide.server.setting_values import SettingsError
from tests.index.building import compute
from tests.index.memories import ALL_MEMORIES, PAGE
from tests.processes import free_port
from tests.server.kv_events.consuming import Consumer, held, until
from tests.server.kv_events.following import LOCAL, Followed


@contextmanager
def followed(name: str = "full", **options: object) -> Iterator[tuple[Followed, Consumer]]:
    made = Followed(name, **options)  # type: ignore[arg-type]
    publisher = made.publisher
    try:
        with Consumer(publisher.endpoint, publisher.replay_endpoint) as consumer:
            consumer.connected()
            yield made, consumer
    finally:
        publisher.close()


@pytest.mark.quick(name=["full", "window and state", "hot v4"])
@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
def test_a_subscriber_knows_what_the_index_has(name: str) -> None:
    with followed(name) as (made, consumer):
        for _ in range(4):
            made.go(60)
            made.known_to(consumer)
        assert made.publisher.counts.dropped == made.publisher.counts.read_anew == 0


def test_traffic_has_evictions_in_every_tier() -> None:
    """Else the test above would not mean much."""
    with followed("window") as (made, consumer):
        made.go(300)
        made.known_to(consumer)
        removed = {e["medium"] for e in consumer.events if e["type"] == "BlockRemoved"}
        assert removed == {"GPU", "CPU", "STORAGE"}
        kinds = {e["kv_cache_spec_kind"] for e in consumer.events if e["type"] == "BlockStored"}
        assert kinds == {"full_attention", "sliding_window"}


def test_a_missed_stretch_is_replayed_from_the_buffer() -> None:
    with followed() as (made, consumer):
        made.go(60)
        made.known_to(consumer)
        before = consumer.replays
        consumer.deaf = True
        made.go(100)
        consumer.poll(50)
        consumer.deaf = False
        made.go(20)
        made.known_to(consumer)
        assert consumer.replays > before
        assert replays(made, consumer)["buffer"] >= 1


def test_a_stretch_that_the_buffer_has_lost_is_made_up_by_the_present_state() -> None:
    settings = KVEventSettings(LOCAL, LOCAL, replay_batches=2)
    with followed("window", settings=settings) as (made, consumer):
        made.go(60)
        made.known_to(consumer)
        before = replays(made, consumer)["state"]
        consumer.deaf = True
        for _ in range(8):
            made.go(20)
            until(lambda: not made.publisher.waiting)
            consumer.poll(20)
        consumer.deaf = False
        made.known_to(consumer)
        assert replays(made, consumer)["state"] > before


def test_the_present_state_is_what_was_published_though_more_is_known() -> None:
    """A replay is asked for while changes arrive: those follow in the next batch, once."""
    settings = KVEventSettings(LOCAL, LOCAL, replay_batches=1)
    with followed("window", settings=settings) as (made, consumer):
        made.go(60)
        made.known_to(consumer)
        for _ in range(60):
            made.go(2)
            consumer.ask_for_state()
            consumer.poll()
        made.known_to(consumer)
        assert replays(made, consumer)["state"] > 30


def test_a_consumer_that_comes_late_learns_everything_though_nothing_happens() -> None:
    with followed("window", settings=KVEventSettings(LOCAL, LOCAL, replay_batches=1)) as (made, _):
        made.go(100)
        until(lambda: not made.publisher.waiting)
        with Consumer(made.publisher.endpoint, made.publisher.replay_endpoint) as late:
            made.known_to(late)
            assert late.known


def test_a_consumer_outlives_a_restart() -> None:
    one, two = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    settings = KVEventSettings(one, two)
    with followed(settings=settings) as (made, consumer):
        made.go(80)
        made.known_to(consumer)
        made.publisher.close()
        again = Followed("full", settings=settings, seed=7)
        try:
            again.go(80)
            again.known_to(consumer)
            assert consumer.known
        finally:
            again.publisher.close()


class Slow(Publisher):
    """Passes nothing on while the gate is shut."""

    gate = threading.Event()

    def _feed(self) -> None:
        if self.gate.is_set():
            super()._feed()


def test_a_full_queue_never_blocks_and_is_made_good_by_reading_the_index_anew() -> None:
    Slow.gate.clear()
    with followed("window", kind=Slow, queue_events=16) as (made, consumer):
        made.go(200)
        assert made.publisher.waiting == 16
        Slow.gate.set()
        made.known_to(consumer)
        counts = made.publisher.counts
        assert counts.read_anew >= 1
        made.go(50)
        made.known_to(consumer)


def test_a_loss_amid_traffic_is_counted() -> None:
    Slow.gate.set()
    with followed(kind=Slow, queue_events=16) as (made, consumer):
        made.go(60)
        made.known_to(consumer)
        Slow.gate.clear()
        made.go(300)
        Slow.gate.set()
        made.known_to(consumer)
        assert made.publisher.counts.dropped > 0


def test_blocks_may_be_named_by_page_keys() -> None:
    settings = KVEventSettings(LOCAL, LOCAL, names=BlockNames.PAGE_KEYS)
    with followed(settings=settings) as (made, consumer):
        made.go(80)
        keys = PageKeyHashes()
        consumer.until(lambda: held(made.index, keys), made.between_steps)
        assert consumer.complaints == [] and consumer.known
        assert all(len(name) == 32 for names in consumer.known.values() for name in names)


def test_batches_have_the_topic() -> None:
    made = Followed("full", KVEventSettings(LOCAL, LOCAL, topic="kv@one"))
    publisher = made.publisher
    try:
        made.go(40)
        with (
            Consumer(publisher.endpoint, publisher.replay_endpoint, "kv@one") as right,
            Consumer(publisher.endpoint, publisher.replay_endpoint, "kv@two") as wrong,
        ):
            made.known_to(right)
            wrong.poll(20)
            assert right.known and not wrong.events
    finally:
        publisher.close()


def test_a_server_that_ends_says_that_nothing_is_left() -> None:
    with followed() as (made, consumer):
        made.go(80)
        made.known_to(consumer)
        assert consumer.known
        made.publisher.close()
        consumer.until(dict)


def test_nonsense_on_the_replay_socket_is_skipped() -> None:
    with followed() as (made, consumer):
        for frames in ([b""], [b"", b"x"], [b"", b"y", b"12345678"], [b"", bytes(9)]):
            consumer._replay.send_multipart(frames)
        consumer._replay.poll(20)
        while consumer._replay.poll(20):
            consumer._replay.recv_multipart()
        made.go(60)
        made.known_to(consumer)


def test_an_address_that_is_taken_is_refused() -> None:
    with (
        followed() as (made, _),
        pytest.raises(SettingsError, match=r"--kv-events cannot listen on tcp.*; choose another"),
    ):
        Followed("full", KVEventSettings(made.publisher.endpoint, LOCAL))


def test_salts_and_adapters_are_named_in_events() -> None:
    text, both = list(range(3 * PAGE)), Namespace("lora", "salt")
    with followed() as (made, consumer):
        for namespace in (Namespace(), Namespace(cache_salt="salt"), both):
            made.index.release(compute(made.index, text[: 2 * PAGE], namespace))
            made.index.release(compute(made.index, text, namespace))
        made.known_to(consumer)
        stored = [e for e in consumer.events if e["type"] == "BlockStored"]
    keys = {(event["lora_name"], event.get("cache_salt")): [] for event in stored}  # type: dict[tuple[str | None, str | None], list[list[str] | None]]
    for event in stored:
        keys[event["lora_name"], event.get("cache_salt")] += event.get("extra_keys", [])
    assert keys == {
        (None, None): [],
        (None, "salt"): [["salt"], None, None],
        ("lora", "salt"): [["lora", "salt"], ["lora"], ["lora"]],
    }


def replays(made: Followed, consumer: Consumer) -> Counter[str]:
    """The publisher's counts, once they have all that the consumer asked for."""
    until(lambda: made.publisher.counts.replays.total() == consumer.replays)
    return made.publisher.counts.replays
