"""Block hashes equal vLLM's, number for number."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvtide.index import Namespace
from kvtide.server.kv_events.block_hashes import NONE_HASH, PageKeyHashes, VllmHashes, extra_keys
from kvtide.server.kv_events.block_table import BlockTable
from kvtide.server.kv_events.event_encoding import TokenPacker
from kvtide.server.kv_events.index_feed import PagesStored
from kvtide.server.kv_events.kv_groups import kv_groups
from tests.index.building import build
from tests.index.memories import FULL, PAGE
from tests.integrations import engines
from tests.server.kv_events.consuming import published

ROOT = Path(__file__).resolve().parents[3]
FIRST, SECOND = tuple(range(16)), tuple(range(16, 32))
VECTORS = {
    # namespace: (hash of FIRST; published of FIRST, of SECOND after it), as vLLM 0.32 computes
    # them: the test below asks it.
    Namespace(): (
        "fe8fa5dda3210d0ca2031e37cbe3b001186773cd1c710beb2d45fcb51d434798",
        3262291359910021016,
        7142137847444424233,
    ),
    Namespace(cache_salt="salt"): (
        "7225e09bdf78719ca393b80f21b31bf135b1ea08f14f344f4803d0cfc18d4042",
        5189220786385010754,
        10770811695067087650,
    ),
}
LARGEST_IDS = (151644, 0, 70000, 2147483647)


@pytest.mark.parametrize("namespace", VECTORS, ids=str)
def test_hashes_are_those_of_vllm(namespace: Namespace) -> None:
    hashes, (digest, first, second) = VllmHashes(), VECTORS[namespace]
    one = hashes.of(b"", None, FIRST, namespace)
    two = hashes.of(b"", one, SECOND, namespace)
    assert one.hex() == digest
    assert (published(hashes, one), published(hashes, two)) == (first, second)


@pytest.mark.parametrize("name", ["lora", "cache_salt", "same"])
def test_hashes_do_not_depend_on_which_objects_have_the_names(name: str) -> None:
    parted = [name[:2] + name[2:] for _ in range(2)]
    assert parted[0] is not parted[1]
    found = {
        VllmHashes().of(b"", None, FIRST, namespace)
        for namespace in (Namespace(name, name), Namespace(*parted))
    }
    assert len(found) == 1


def test_the_largest_token_ids_are_hashed_as_vllm_does() -> None:
    digest = VllmHashes().of(b"", None, LARGEST_IDS, Namespace())
    assert published(VllmHashes(), digest) == 15231668173138491958


@pytest.mark.full
def test_vllm_itself_gives_these_hashes() -> None:
    """Computed by its requests, in an environment of its own: those above, and random prompts."""
    chance = random.Random(5)
    texts = [[*FIRST, *SECOND], [chance.randrange(200_000) for _ in range(100 * 16)]]
    asked = [(text, salt) for text in texts for salt in ("", "salt", "other")]
    done = subprocess.run(
        [engines.vllm("0.32.0"), "-m", "tests.server.kv_events.vllm_hashes", "16"],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for (text, salt), answer in zip(asked, json.loads(done.stdout), strict=True):
        hashes, ours, namespace = VllmHashes(), list[bytes](), Namespace(cache_salt=salt)
        for start in range(0, len(text), 16):
            parent = ours[-1] if ours else None
            ours.append(hashes.of(b"", parent, tuple(text[start : start + 16]), namespace))
        assert answer == [[one.hex(), published(hashes, one)] for one in ours]
    for namespace, (digest, first, second) in VECTORS.items():
        answer = json.loads(done.stdout)[asked.index((texts[0], namespace.cache_salt))]
        assert (answer[0], answer[1][1]) == ([digest, first], second)


def test_the_hashes_follow_from_the_stated_derivation() -> None:
    """The pickle of protocol 5, written out opcode by opcode."""
    frame = b"\x8c\x0evllm-none-hash\x94."
    none = hashlib.sha256(b"\x80\x05\x95" + struct.pack("<Q", len(frame)) + frame).digest()
    assert none == NONE_HASH
    numbers = b"".join(b"K" + bytes([token]) for token in FIRST)
    frame = b"C\x20" + none + b"\x94(" + numbers + b"t\x94N\x87\x94."
    pickled = b"\x80\x05\x95" + struct.pack("<Q", len(frame)) + frame
    found = VllmHashes().of(b"", None, FIRST, Namespace())
    assert found == hashlib.sha256(pickled).digest()


def test_an_adapter_and_a_salt_of_one_name_have_hashes_of_their_own() -> None:
    hashes = VllmHashes()
    one, other = Namespace(adapter="a"), Namespace(cache_salt="a")
    assert hashes.of(b"", None, FIRST, one) != hashes.of(b"", None, FIRST, other)


def test_a_salt_is_a_key_of_the_first_block_and_an_adapter_of_all() -> None:
    both = Namespace(adapter="lora", cache_salt="salt")
    assert extra_keys(both, first=True) == ("lora", "salt")
    assert extra_keys(both, first=False) == ("lora",)
    assert extra_keys(Namespace(cache_salt="salt"), first=False) is None
    assert extra_keys(Namespace(), first=True) is None


@pytest.mark.parametrize("namespace", VECTORS, ids=str)
def test_page_keys_are_those_of_the_index(namespace: Namespace) -> None:
    index, text = build(FULL, fingerprint=b"model"), list(range(3 * PAGE))
    prompt = index.prompt(text, namespace)
    table = BlockTable(kv_groups(FULL), PageKeyHashes(), PAGE, TokenPacker(PAGE), b"model")
    slots = np.arange(3, dtype=np.int32).tobytes()
    table.hear(PagesStored(0, slots, prompt.packed, namespace=namespace))
    found = [published(PageKeyHashes(), digest) for digest in table.blocks]
    assert found == [page.key for page in index.page_keys(prompt)]
    assert {block.key for block in table.blocks.values()} == set(found)
