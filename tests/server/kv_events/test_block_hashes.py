"""Block hashes equal vLLM's, number for number."""

from __future__ import annotations

import hashlib
import struct

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
from tests.server.kv_events.consuming import published

FIRST, SECOND = tuple(range(16)), tuple(range(16, 32))
VECTORS = {
    # namespace: (hash of FIRST, of SECOND after it), computed by vLLM's `hash_block_tokens` with
    # its default `sha256` and `init_none_hash`, and converted by `maybe_convert_block_hash`.
    Namespace(): (
        "fe8fa5dda3210d0ca2031e37cbe3b001186773cd1c710beb2d45fcb51d434798",
        3262291359910021016,
        7142137847444424233,
    ),
    Namespace(cache_salt="salt"): (
        "6cb493e72f0512827a5b2382a86d950fe713d54febd18092b8c02418c50fcd40",
        13312680187311148352,
        14748061713874430785,
    ),
    Namespace(adapter="lora", cache_salt="salt"): (
        "2c897754ed4ce2100beaeadc4891aeb9137cab84117be8f3e0538592fb471550",
        16164410353890301264,
        10958754706731303334,
    ),
}


@pytest.mark.parametrize("namespace", VECTORS, ids=str)
def test_hashes_are_those_of_vllm(namespace: Namespace) -> None:
    hashes, (digest, first, second) = VllmHashes(), VECTORS[namespace]
    one = hashes.of(b"", None, FIRST, namespace)
    two = hashes.of(b"", one, SECOND, namespace)
    assert one.hex() == digest
    assert (published(hashes, one), published(hashes, two)) == (first, second)


def test_the_largest_token_ids_are_hashed_as_vllm_does() -> None:
    digest = VllmHashes().of(b"", None, (151644, 0, 70000, 2147483647), Namespace())
    assert published(VllmHashes(), digest) == 15231668173138491958


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
