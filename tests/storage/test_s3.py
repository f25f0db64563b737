"""The S3 store, against a real server: sound, frozen, killed, and used wrongly."""

from __future__ import annotations

import sys
import threading
import time

import obstore
import pytest
from obstore.store import S3Store

from kvtide.storage import StoreError, conformance, open_store
from kvtide.storage.store import MISSING
from kvtide.storage.trial import in_memory, memories, new_keys, new_objects, new_space
from tests.processes import free_port
from tests.storage import servers

TIMEOUT_S = 1.0
LATE_S = 5.0
KEY, SECRET = "accesskey", "secretkey"


@pytest.fixture(autouse=True)
def no_keys_of_the_machine(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    one = servers.s3_in_memory(tmp_path_factory.mktemp("s3"), "pages", KEY, SECRET)
    yield one
    one.stop()


@pytest.fixture
def own_server(tmp_path):
    one = servers.s3(tmp_path, "pages", KEY, SECRET)
    one.start()
    yield one
    one.stop()


@pytest.fixture
def open_here():
    opened = []

    def open_here(url, space=None):
        opened.append(open_store(url, space or new_space()))
        return opened[-1]

    yield open_here
    for store in opened:
        store.close()


def _url(server, where="pages/tests", timeout=TIMEOUT_S, keys=f"{KEY}:{SECRET}@"):
    return f"s3://{keys}{where}?endpoint=http://127.0.0.1:{server.port}&timeout={timeout}"


def _make_folder(store):
    """See `servers.s3_in_memory`: a folder should be there before several objects are written."""
    store.write(new_keys(1), memories([1]))


def _read(store, objects):
    targets = memories([len(content) for content in objects.values()])
    lengths = store.read(list(objects), targets)
    return [bytes(t[:n]) if n != MISSING else None for t, n in zip(targets, lengths, strict=True)]


def _raises_in_time(call):
    start = time.monotonic()
    with pytest.raises(StoreError) as raised:
        call()
    assert time.monotonic() - start < TIMEOUT_S + LATE_S
    return str(raised.value)


# -- sound ----------------------------------------------------------------------------------


def _bucket(server):
    return S3Store(
        "pages",
        endpoint=f"http://127.0.0.1:{server.port}",
        client_options={"allow_http": True},
        access_key_id=KEY,
        secret_access_key=SECRET,
    )


def test_it_keeps_the_rules_and_leaves_nothing(server):
    url = _url(server, "pages/rules", timeout=30)
    assert conformance.violations(lambda space: open_store(url, space)) == []
    assert list(obstore.list(_bucket(server), "rules/")) == []


def test_keys_may_come_from_the_environment(server, open_here, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert open_here(_url(server, keys="")).exists(new_keys(1)) == [False]


def test_objects_lie_under_the_prefix_with_readable_names(own_server, open_here):
    space, objects = new_space(), new_objects([123])
    store = open_here(_url(own_server, "pages/some/where"), space)
    store.write(list(objects), in_memory(objects))
    ((key, content),) = objects.items()
    place = f"buckets/pages/some/where/kvtide/{space.hex()}/{key.hex()}"
    assert (own_server.folder / place).read_bytes() == content


def test_prefixes_stay_apart(server, open_here):
    space, objects = new_space(), new_objects([10])
    one, two = (open_here(_url(server, f"pages/{name}"), space) for name in "ab")
    one.write(list(objects), in_memory(objects))
    assert two.exists(list(objects)) == [False]
    assert two.clear().objects == 0
    assert _read(one, objects) == list(objects.values())


def test_clear_takes_more_than_a_page(server, open_here):
    store, keys = open_here(_url(server, timeout=30)), new_keys(1203)
    store.write(keys, memories([3] * len(keys)))
    assert (store.status().objects, store.status().bytes) == (1203, 3609)
    removed = store.clear()
    assert (removed.objects, removed.bytes) == (1203, 3609)
    assert store.status().objects == 0


def test_objects_that_others_damaged_come_with_their_own_lengths(server, open_here):
    space, objects = new_space(), new_objects([1000] * 3)
    store = open_here(_url(server), space)
    store.write(list(objects), in_memory(objects))
    short, long, _ = (f"tests/kvtide/{space.hex()}/{key.hex()}" for key in objects)
    bucket = _bucket(server)
    obstore.put(bucket, short, b"abc")
    obstore.put(bucket, long, bytes(5000))
    assert store.read(list(objects), memories([1000] * 3)) == [3, MISSING, 1000]


# -- gone, and back -------------------------------------------------------------------------


def test_a_killed_server_is_an_error_and_the_next_call_finds_a_new_one(own_server, open_here):
    store, objects = open_here(_url(own_server)), new_objects([1000] * 3)
    _make_folder(store)
    store.write(list(objects), in_memory(objects))
    own_server.kill()
    assert "that the server runs" in _raises_in_time(lambda: store.exists(list(objects)))
    _raises_in_time(lambda: store.write(list(objects), in_memory(objects)))
    own_server.start()
    assert _read(store, objects) == list(objects.values())


@pytest.mark.full
def test_a_server_killed_in_the_middle_of_calls_never_makes_it_lie(own_server, open_here):
    store, objects = open_here(_url(own_server, timeout=10)), new_objects([1 << 20] * 16)
    _make_folder(store)
    store.write(list(objects), in_memory(objects))
    calls, lied, done = [], [], threading.Event()

    def read():
        while not done.is_set():
            try:
                found = _read(store, objects)
                calls.append(found.count(None))
                lied.extend(1 for f, c in zip(found, objects.values(), strict=True) if f and f != c)
            except StoreError:
                calls.append(len(objects))

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.3)
    own_server.kill()
    time.sleep(0.3)
    own_server.start()
    done.set()
    reader.join()
    assert sum(calls) and not lied
    assert _read(store, objects) == list(objects.values())


@pytest.mark.full
def test_a_frozen_server_is_an_error_in_time_and_works_when_it_thaws(server, open_here):
    store, objects = open_here(_url(server)), new_objects([1 << 20] * 16)
    store.write(list(objects), in_memory(objects))
    targets = memories([1 << 20] * 16)
    server.freeze()
    try:
        assert "?timeout=" in _raises_in_time(lambda: store.read(list(objects), targets))
        for target in targets:
            target[:] = bytes(len(target))
        _raises_in_time(lambda: store.write(new_keys(16), in_memory(objects)))
        _raises_in_time(store.clear)
        _raises_in_time(lambda: open_store(_url(server), new_space()))
    finally:
        server.thaw()
    assert _read(store, objects) == list(objects.values())
    assert not any(any(target) for target in targets)


def test_requests_that_fail_are_misses_beside_others_that_work(open_here):
    good, bad = new_keys(2)

    def script(one):
        while asked := one.recv(1 << 16):
            if b"list-type" in asked:
                body = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
                one.sendall(_http(b"200 OK", body))
            elif bad.hex().encode() in asked:
                one.sendall(_http(b"400 Bad Request", b""))
            else:
                one.sendall(_http(b"200 OK", b"0123456789", b"Last-Modified: " + _LONG_AGO))

    server = servers.Scripted(script)
    store = open_here(_url(server, timeout=10))
    assert store.read([good, bad, good], memories([10] * 3)) == [10, MISSING, 10]
    (note,) = store.status().notes
    assert "1 requests failed, the last one" in note and "400 Bad Request" in note
    with pytest.raises(StoreError):
        store.read([bad], memories([10]))
    server.close()


_LONG_AGO = b"Thu, 01 Jan 2026 00:00:00 GMT"


def _http(status, body, *more):
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), b'ETag: "a"', *more]
    return b"\r\n".join([*lines, b"", body])


# -- refusals -------------------------------------------------------------------------------


def _refusal(url):
    with pytest.raises(StoreError) as raised:
        open_store(url, new_space())
    return str(raised.value)


def test_refusals_name_the_remedy(server):
    assert "create the bucket" in _refusal(_url(server, "no-such-bucket"))
    assert "AWS_SECRET_ACCESS_KEY" in _refusal(_url(server, keys=f"{KEY}:wrong@"))
    assert "AWS_ACCESS_KEY_ID" in _refusal(_url(server, keys="unknown:wrong@"))
    assert "that the server runs" in _refusal(
        f"s3://{KEY}:{SECRET}@pages?endpoint=http://127.0.0.1:{free_port()}&timeout=2"
    )
    assert "write http://host:port" in _refusal("s3://pages?endpoint=127.0.0.1:9000")
    assert "write s3://bucket/prefix" in _refusal("s3:?region=eu")
    assert "no setting cap" in _refusal("s3://pages?cap=1GB")


def test_secrets_are_never_shown(server, open_here):
    assert "wrongsecret" not in _refusal(_url(server, keys=f"{KEY}:wrongsecret@"))
    assert SECRET not in open_here(_url(server)).name


def test_a_missing_extra_is_refused_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "kvtide.storage.s3_store", raising=False)
    assert "pip install 'kvtide[s3]'" in _refusal("s3://pages")
