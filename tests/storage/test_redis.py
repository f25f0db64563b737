"""The Redis store, against a real server: sound, full, frozen, killed, and one that misbehaves."""

from __future__ import annotations

import socket
import ssl
import threading
import time

import pytest
import trustme

from kvtide.storage import StoreError, conformance, open_store
from kvtide.storage.store import MISSING
from kvtide.storage.trial import in_memory, memories, new_keys, new_objects, new_space
from tests.processes import free_port
from tests.storage import servers

TIMEOUT_S = 0.5
LATE_S = 5.0
"""How much later than its time-out a call may come back on a busy machine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    one = servers.redis(tmp_path_factory.mktemp("redis"), "--databases", "4")
    one.start()
    yield one
    one.stop()


@pytest.fixture
def own_server(tmp_path):
    one = servers.redis(tmp_path)
    one.start()
    yield one
    one.stop()


def _url(server, path="/0", **settings):
    wanted = {"timeout": TIMEOUT_S, **settings}
    return f"redis://127.0.0.1:{server.port}{path}?" + "&".join(
        f"{k}={v}" for k, v in wanted.items()
    )


@pytest.fixture
def open_here():
    opened = []

    def open_here(url, space=None):
        opened.append(open_store(url, space or new_space()))
        return opened[-1]

    yield open_here
    for store in opened:
        store.close()


def _read(store, objects):
    targets = memories([len(content) for content in objects.values()])
    lengths = store.read(list(objects), targets)
    return [bytes(t[:n]) if n != MISSING else None for t, n in zip(targets, lengths, strict=True)]


def _read_in_the_end(store, objects):
    """A server that has just thawed may be slow for a while."""
    until = time.monotonic() + 30
    while True:
        try:
            return _read(store, objects)
        except StoreError:
            if time.monotonic() > until:
                raise


def _raises_in_time(call):
    start = time.monotonic()
    with pytest.raises(StoreError) as raised:
        call()
    assert time.monotonic() - start < TIMEOUT_S + LATE_S
    return str(raised.value)


# -- sound ----------------------------------------------------------------------------------


@pytest.mark.parametrize("connections", [1, 4])
def test_it_keeps_the_rules(server, connections):
    url = _url(server, timeout=20, connections=connections)
    assert conformance.violations(lambda space: open_store(url, space)) == []


def test_nothing_is_left_after_the_checks(server, open_here):
    url = _url(server, path="/2", timeout=20)
    conformance.violations(lambda space: open_store(url, space))
    assert "the database holds 0 keys of all users" in open_here(url).status().notes


def test_two_stores_share_a_server_and_databases_stay_apart(server, open_here):
    space, objects = new_space(), new_objects([100, 70_001])
    one, two = open_here(_url(server), space), open_here(_url(server), space)
    elsewhere = open_here(_url(server, path="/1"), space)
    one.write(list(objects), in_memory(objects))
    assert _read(two, objects) == list(objects.values())
    assert elsewhere.exists(list(objects)) == [False, False]
    assert two.clear().objects == 2
    assert one.exists(list(objects)) == [False, False]


def test_keys_are_readable_names(server, open_here):
    space, (key, *_) = new_space(), new_keys(1)
    open_here(_url(server), space).write([key], memories([10]))
    assert _say(server, f"STRLEN kvtide:{space.hex()}:{key.hex()}") == b":10\r\n"


def test_ten_thousand_keys_are_asked_for_at_once(server, open_here):
    store = open_here(_url(server, timeout=5))
    keys = new_keys(10_000)
    store.write(keys[::3], memories([1] * len(keys[::3])))
    assert store.exists(keys) == [n % 3 == 0 for n in range(10_000)]
    assert store.clear().objects == len(keys[::3])


def test_many_threads_share_few_connections(server, open_here):
    store = open_here(_url(server, timeout=10, connections=2))
    objects = new_objects([100_000] * 100)
    store.write(list(objects), in_memory(objects))
    wrong = []

    def read():
        for _ in range(5):
            if _read(store, objects) != list(objects.values()):
                wrong.append(1)

    threads = [threading.Thread(target=read) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_status_says_what_to_set(server, open_here):
    notes = " ".join(open_here(_url(server)).status().notes)
    assert "set maxmemory" in notes and "allkeys-lru" in notes


# -- full -----------------------------------------------------------------------------------


def test_a_full_server_refuses_objects_and_keeps_what_it_has(tmp_path, open_here):
    limit = ("--maxmemory", "12mb", "--maxmemory-policy", "noeviction")
    server = servers.redis(tmp_path, *limit)
    server.start()
    try:
        store = open_here(_url(server, timeout=10))
        objects = new_objects([1 << 20] * 20)
        written = store.write(list(objects), in_memory(objects))
        assert True in written and False in written
        assert store.exists(list(objects)) == written
        kept = [c if w else None for c, w in zip(objects.values(), written, strict=True)]
        assert _read(store, objects) == kept
        assert store.write(list(objects), in_memory(objects)) == written
        status = store.status()
        assert status.capacity_bytes == 12 << 20
        assert any(f"refused {2 * written.count(False)} objects" in n for n in status.notes)
    finally:
        server.stop()


def test_a_full_server_that_may_evict_takes_what_is_new(tmp_path, open_here):
    server = servers.redis(tmp_path, "--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru")
    server.start()
    try:
        store = open_here(_url(server, timeout=10))
        objects = new_objects([1 << 20] * 20)
        for key, content in objects.items():
            assert store.write([key], in_memory({key: content})) == [True]
        assert store.exists(list(objects))[-1] and not all(store.exists(list(objects)))
        assert any("evicted" in note for note in store.status().notes)
    finally:
        server.stop()


# -- gone, and back -------------------------------------------------------------------------


@pytest.mark.full
def test_a_killed_server_is_an_error_and_the_next_call_finds_a_new_one(own_server, open_here):
    store, objects = open_here(_url(own_server)), new_objects([1000] * 3)
    store.write(list(objects), in_memory(objects))
    own_server.kill()
    assert "start the server" in _raises_in_time(lambda: store.exists(list(objects)))
    assert "start the server" in _raises_in_time(
        lambda: store.write(list(objects), in_memory(objects))
    )
    own_server.start()
    assert store.exists(list(objects)) == [False] * 3
    assert store.write(list(objects), in_memory(objects)) == [True] * 3
    assert _read(store, objects) == list(objects.values())


def test_a_server_that_restarted_between_calls_is_not_noticed(own_server, open_here):
    store, keys = open_here(_url(own_server)), new_keys(3)
    for _ in range(3):
        store.write(keys, memories([10] * 3))
        own_server.kill()
        own_server.start()
        assert store.exists(keys) == [False] * 3


@pytest.mark.full
def test_a_server_killed_in_the_middle_of_calls_never_makes_it_lie(own_server, open_here):
    store = open_here(_url(own_server, timeout=5))
    objects = new_objects([1 << 20] * 24)
    store.write(list(objects), in_memory(objects))
    failed, lied, done = [], [], threading.Event()

    def read():
        while not done.is_set():
            try:
                found = _read(store, objects)
                lied.extend(1 for f, c in zip(found, objects.values(), strict=True) if f and f != c)
            except StoreError:
                failed.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(3):
        time.sleep(0.15)
        own_server.kill()
        own_server.start()
        store.write(list(objects), in_memory(objects))
    done.set()
    reader.join()
    assert failed and not lied
    assert _read(store, objects) == list(objects.values())


@pytest.mark.full
def test_a_frozen_server_is_an_error_in_time_and_works_when_it_thaws(own_server, open_here):
    store, objects = open_here(_url(own_server)), new_objects([1 << 20] * 32)
    store.write(list(objects), in_memory(objects))
    targets = memories([1 << 20] * 32)
    own_server.freeze()
    try:
        assert "?timeout=" in _raises_in_time(lambda: store.read(list(objects), targets))
        _raises_in_time(lambda: store.write(new_keys(32), in_memory(objects)))
        _raises_in_time(lambda: store.exists(list(objects)))
        _raises_in_time(store.clear)
        _raises_in_time(lambda: open_store(_url(own_server), new_space()))
    finally:
        own_server.thaw()
    # What the frozen server had not answered comes late, on connections that are no longer read.
    assert _read_in_the_end(store, objects) == list(objects.values())


def test_waiting_for_a_connection_ends_in_time(own_server, open_here):
    store, keys = open_here(_url(own_server, connections=1)), new_keys(2)
    own_server.freeze()
    took = []

    def ask():
        start = time.monotonic()
        with pytest.raises(StoreError):
            store.exists(keys)
        took.append(time.monotonic() - start)

    threads = [threading.Thread(target=ask) for _ in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    own_server.thaw()
    assert len(took) == 16 and max(took) < TIMEOUT_S + LATE_S


# -- misbehaving ----------------------------------------------------------------------------


def _answering(answer):
    """A server that answers PING, and everything else with the same bytes."""

    def script(one):
        while asked := one.recv(1 << 20):
            one.sendall(b"+PONG\r\n" if b"PING" in asked else answer)

    return servers.Scripted(script)


@pytest.mark.parametrize(
    "answer",
    [
        b"$100\r\nhalf",
        b"$5\r\nlonger than five\r\n",
        b"$-7x\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*1\r\n$3\r\nabc\r\n",
        b"x" * 100_000,
    ],
)
def test_what_is_no_reply_is_an_error_and_the_connection_is_not_used_again(answer, open_here):
    server = _answering(answer)
    store = open_here(_url(server, connections=1))
    _raises_in_time(lambda: store.read(new_keys(1), memories([4096])))
    before = server.connections
    _raises_in_time(lambda: store.read(new_keys(1), memories([4096])))
    assert server.connections > before
    server.close()


def test_an_object_that_goes_between_two_pieces_is_a_miss(open_here):
    piece = b"$%d\r\n%b\r\n" % (1 << 20, bytes(1 << 20))

    def script(one):
        asked = one.recv(1 << 20)
        one.sendall(b"+PONG\r\n")
        while asked := one.recv(1 << 20):
            first = piece if b"STRLEN" in asked else b""
            one.sendall(b":3145728\r\n" * asked.count(b"STRLEN") + first)
            one.sendall(b"$0\r\n\r\n" * (asked.count(b"GETRANGE") - bool(first)))

    server = servers.Scripted(script)
    store = open_here(_url(server, connections=1))
    assert store.read(new_keys(1), memories([3 << 20])) == [MISSING]
    server.close()


def test_a_server_that_closes_in_the_middle_of_a_reply_is_an_error(open_here):
    def script(one):
        if b"PING" in one.recv(1 << 20):
            one.sendall(b"+PONG\r\n")
            one.recv(1 << 20)
        one.sendall(b"$70001\r\n" + bytes(30_000))

    server = servers.Scripted(script)
    store = open_here(_url(server, timeout=20))
    with pytest.raises(StoreError, match="closed the connection"):
        store.read(new_keys(1), memories([70_001]))
    server.close()


def test_replies_in_crumbs_are_put_together(own_server, open_here):
    """A proxy that passes on a few bytes at a time, cutting everywhere."""

    def script(one):
        with socket.create_connection(("127.0.0.1", own_server.port)) as real:

            def back():
                while data := real.recv(4096):
                    for start in range(0, len(data), 7):
                        one.sendall(data[start : start + 7])

            threading.Thread(target=back, daemon=True).start()
            while data := one.recv(1 << 16):
                real.sendall(data)

    proxy = servers.Scripted(script)
    store, objects = open_here(_url(proxy, timeout=20)), new_objects([1, 2, 5, 4096, 9001] * 5)
    assert store.write(list(objects), in_memory(objects)) == [True] * 25
    assert store.exists([*objects, *new_keys(5)]) == [True] * 25 + [False] * 5
    assert _read(store, objects) == list(objects.values())
    assert store.clear().objects == 25
    proxy.close()


def test_values_of_others_come_with_their_own_lengths(server, open_here):
    space, keys = new_space(), new_keys(4)
    store = open_here(_url(server), space)
    names = [f"kvtide:{space.hex()}:{key.hex()}" for key in keys]
    _say(server, f"SET {names[0]} abc", f"SET {names[1]} ''", f"LPUSH {names[2]} a")
    assert store.read(keys, memories([10] * 4)) == [3, 0, MISSING, MISSING]
    assert store.read(keys, memories([2] * 4)) == [MISSING, 0, MISSING, MISSING]


# -- refusals -------------------------------------------------------------------------------


def _refusal(url):
    with pytest.raises(StoreError) as raised:
        open_store(url, new_space())
    return str(raised.value)


def test_refusals_name_the_remedy(server):
    port = server.port
    unused = free_port()
    assert "start the server" in _refusal(f"redis://127.0.0.1:{unused}/0")
    assert "check host" in _refusal("redis://no-such-host.invalid/0?timeout=5")
    assert "most servers have 0 to 15" in _refusal(f"redis://127.0.0.1:{port}/99")
    assert "is a number" in _refusal(f"redis://127.0.0.1:{port}/pages")
    assert "no setting cap" in _refusal(f"redis://127.0.0.1:{port}/0?cap=1GB")
    assert "leave it out" in _refusal(f"redis://:secret@127.0.0.1:{port}/0")
    assert "TLS" in _refusal(f"rediss://127.0.0.1:{port}/0?timeout=2")
    assert "write rediss://" in _refusal(f"redis://127.0.0.1:{port}/0?ca=/ca.pem")
    assert "name a PEM file" in _refusal(f"rediss://127.0.0.1:{port}/0?ca=/no/such/file")


def test_passwords_are_used_and_never_shown(tmp_path, open_here):
    server = servers.redis(tmp_path, "--requirepass", "s3cret/word")
    server.start()
    try:
        host = f"127.0.0.1:{server.port}/0"
        for wrong in (f"redis://{host}", f"redis://:wrong@{host}", f"redis://me:s3cret@{host}"):
            refusal = _refusal(wrong)
            assert "password" in refusal and "wrong@" not in refusal and "s3cret" not in refusal
        for right in (f"redis://:s3cret%2Fword@{host}", f"redis://default:s3cret%2Fword@{host}"):
            store = open_here(right)
            assert store.exists(new_keys(1)) == [False]
            assert "s3cret" not in store.name
    finally:
        server.stop()


def _say(server, *lines):
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        plain.sendall("".join(f"{line}\r\n" for line in lines).encode())
        time.sleep(0.1)
        return plain.recv(1000)


def test_a_user_without_the_right_to_write_is_refused_with_what_to_allow(own_server, open_here):
    _say(own_server, "ACL SETUSER reader on >pw ~kvtide:* +get +exists +ping")
    store = open_here(f"redis://reader:pw@127.0.0.1:{own_server.port}/0")
    assert store.exists(new_keys(1)) == [False]
    with pytest.raises(StoreError, match=r"\+set"):
        store.write(new_keys(2), memories([10, 10]))
    assert store.exists(new_keys(1)) == [False]


def test_a_replica_is_refused_with_the_remedy(server, tmp_path, open_here):
    replica = servers.redis(tmp_path, "--replicaof", "127.0.0.1", str(server.port))
    replica.start()
    try:
        store = open_here(_url(replica, timeout=5))
        with pytest.raises(StoreError, match="address of the primary"):
            store.write(new_keys(1), memories([10]))
    finally:
        replica.stop()


# -- TLS ------------------------------------------------------------------------------------


@pytest.mark.full
def test_it_keeps_the_rules_over_tls(server, tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)

    def script(one):
        with (
            context.wrap_socket(one, server_side=True) as safe,
            socket.create_connection(("127.0.0.1", server.port)) as real,
        ):
            _pump(safe, real)

    proxy = servers.Scripted(script)
    url = f"rediss://localhost:{proxy.port}/0?timeout=20&ca={tmp_path / 'ca.pem'}"
    assert conformance.violations(lambda space: open_store(url, space)) == []
    assert "no TLS" in _refusal(f"rediss://localhost:{proxy.port}/0")
    proxy.close()


def _pump(safe, real):
    """Pass bytes on both ways. One thread, since a TLS socket must not be used by two at once."""
    safe.setblocking(False)
    real.setblocking(False)
    waiting = {safe: bytearray(), real: bytearray()}
    other = {safe: real, real: safe}
    while True:
        idle = True
        for source, target in other.items():
            try:
                if len(waiting[target]) < 1 << 22:
                    if not (data := source.recv(1 << 18)):
                        return
                    waiting[target] += data
                    idle = False
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass
            try:
                if waiting[target]:
                    sent = target.send(bytes(waiting[target]))
                    del waiting[target][:sent]
                    idle = False
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass
        if idle:
            time.sleep(0.0005)
