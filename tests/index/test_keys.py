"""The identity of a page: namespaces, prompts, chained keys, holdback."""

from __future__ import annotations

import hashlib
import struct
from itertools import combinations

import numpy as np
import pytest

from kvtide.index import Namespace
from kvtide.index.keys import Prompt, chain, pack, root_key
from kvtide.spec import Tier, with_draft
from tests.index.building import build, compute, found, keep, lease_for
from tests.index.memories import DRAFTED, FULL, PAGE

TEXT = list(range(1, 21))


def _sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def _bytes(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def _keys(index, tokens: list[int]) -> list[bytes]:
    nodes = index.match(index.prompt([*tokens, 0])).nodes
    return [page.key for node in nodes for page in index.tree.page_keys(node)]


def test_a_page_key_is_a_sha256_chained_from_the_namespace() -> None:
    index = build(FULL, fingerprint=b"weights")
    keep(index, TEXT[:12])
    empty = (0).to_bytes(8, "little")
    key = _sha(_sha(b"weights", empty, empty), b"\0")
    expected = []
    for start in (0, 4, 8):
        key = _sha(key, _bytes(TEXT[start : start + 4]))
        expected.append(key)
    assert _keys(index, TEXT[:12]) == expected


@pytest.mark.parametrize("holdback", [1, 2, 3])
def test_keys_are_the_same_with_any_holdback(holdback: int) -> None:
    """In nodes of one page and of several, and for a prompt that no tree has."""
    plain, index = build(FULL), build(with_draft(FULL, FULL, holdback))
    for text in (TEXT[:7], TEXT[:16], [*TEXT[:8], *range(90, 99)]):
        for each in (plain, index):
            keep(each, text)
        pages = (len(text) - holdback) // PAGE
        assert _keys(index, text)[:pages] == _keys(plain, text)[:pages]
        found = list(index.page_keys(index.prompt(text)))
        assert [page.key for page in found] == _keys(plain, text)[: len(text) // PAGE]
        afters = [_bytes(text[end : end + holdback]) for end in range(PAGE, len(text) + 1, PAGE)]
        assert [page.after for page in found] == afters


def test_the_tokens_after_a_page_tell_its_name_apart_and_not_its_key() -> None:
    index = build(DRAFTED)
    one, other = (index.prompt([*TEXT[:PAGE], token]) for token in (1, 2))
    (a,), (b,) = index.page_keys(one), index.page_keys(other)
    assert a.key == b.key and a.after != b.after and a.name != b.name
    (plain,) = build(FULL).page_keys(Prompt(TEXT[:PAGE], Namespace(), 0))
    assert plain.name == plain.key == a.key


def test_namespaces_and_models_have_fingerprints_of_their_own() -> None:
    spaces = [Namespace(), Namespace("a"), Namespace("", "a"), Namespace("a", "a"),
              Namespace("ab"), Namespace("a", "b"), Namespace("", "ab")]  # fmt: skip
    prints = [space.fingerprint(model) for space in spaces for model in (b"m" * 32, b"n" * 32)]
    assert all(a != b for a, b in combinations(prints, 2))


def test_a_known_key_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    index, hashed = build(FULL), []

    def counting(key: bytes, tokens: bytes, page_bytes: int):
        hashed.append(len(tokens) // page_bytes)
        return chain(key, tokens, page_bytes)

    def counting_roots(fingerprint: bytes, namespace: Namespace) -> bytes:
        hashed.append(1)
        return root_key(fingerprint, namespace)

    monkeypatch.setattr("kvtide.index.keys.chain", counting)
    monkeypatch.setattr("kvtide.index.tree.node_keys.root_key", counting_roots)
    keep(index, TEXT[:8])
    keep(index, TEXT[:4] + TEXT[12:20])
    (top,) = index.match(index.prompt(TEXT[:5])).nodes
    tails = list(top.children.values())
    assert hashed == [], "keys are lazy"
    index.tree.key(tails[0])
    assert sum(hashed) == 1 + 1 + tails[0].pages, "root, shared page, tail"
    hashed.clear()
    index.tree.key(tails[1])
    assert sum(hashed) == tails[1].pages, "only what is new"
    hashed.clear()
    index.tree.key(tails[0])
    assert hashed == []


def test_a_split_or_grown_node_gets_right_keys_again() -> None:
    index = build(FULL)
    lease = compute(index, TEXT[:12])
    (node,) = index.tree.walk()
    index.tree.key(node)
    lease.prompt.extend(TEXT[12:16])
    index.reserve(lease, 16)
    index.commit(lease, 16)
    index.release(lease)
    keys = _keys(index, TEXT[:16])
    fresh = build(FULL)
    keep(fresh, TEXT[:16])
    assert keys == _keys(fresh, TEXT[:16])
    index.tree.key(index.match(index.prompt(TEXT[:17])).nodes[-1])
    index.release(lease_for(index, TEXT[:9]))
    assert _keys(index, TEXT[:16]) == keys
    nodes = index.match(index.prompt(TEXT[:17])).nodes
    assert [index.tree.key(node) for node in nodes] == [keys[node.end - 1] for node in nodes]


def test_a_shortened_node_gets_right_keys_again() -> None:
    index, fresh = build(FULL), build(FULL)
    keep(index, TEXT[:12])
    (node,) = index.tree.walk()
    index.tree.key(node)
    assert index.evict(Tier.DEVICE, "kv", 1) == 1
    lease_for(index, TEXT[:9])  # a lease stands there, so what follows becomes a new node
    for each in (index, fresh):
        keep(each, TEXT[:8] + TEXT[12:20])
    assert _keys(index, TEXT[:8] + TEXT[12:20]) == _keys(fresh, TEXT[:8] + TEXT[12:20])
    (node,) = (n for n in index.tree.walk() if n.depth == 0)
    assert index.tree.key(node) in _keys(fresh, TEXT[:8] + TEXT[12:20])


@pytest.mark.parametrize(("holdback", "shared"), [(0, 2), (1, 1), (2, 1), (3, 1)])
def test_holdback_parts_pages_by_the_tokens_after_them(holdback: int, shared: int) -> None:
    """Equal up to the end of page 2, different in the token after it."""
    memory = with_draft(FULL, FULL, holdback) if holdback else FULL
    index = build(memory)
    keep(index, TEXT[:16])
    other = [*TEXT[: 2 * PAGE], 99, *TEXT[2 * PAGE + 1 :]]
    assert index.match(index.prompt(other)).boundary == shared
    assert found(index, TEXT[:15]) == (16 - holdback) // PAGE - (holdback == 0)


@pytest.mark.parametrize("holdback", [0, 1, 3])
def test_a_prompt_grown_in_pieces_equals_one_made_at_once(holdback: int) -> None:
    whole = Prompt(TEXT, Namespace(), holdback)
    for first in range(5):
        grown = Prompt(TEXT[:first], Namespace(), holdback)
        for number, token in enumerate(TEXT[first:]):
            grown.extend([token])
            if number % 3 == 2:
                assert grown.head + grown.body == pack(TEXT[: first + number + 1])
        assert (grown.head, grown.body, grown.tokens) == (whole.head, whole.body, whole.tokens)
    assert whole.head + whole.body == pack(TEXT) and len(whole.head) == 4 * holdback


def test_tokens_pack_alike_in_every_form() -> None:
    forms = (TEXT, tuple(TEXT), np.array(TEXT), np.array(TEXT, np.uint16), _bytes(TEXT))
    assert {pack(form) for form in forms} == {_bytes(TEXT)}
    assert pack([]) == b""


@pytest.mark.parametrize("tokens", [[-1], [2**31], np.array([2**40])])
def test_token_ids_outside_int32_are_refused(tokens) -> None:
    with pytest.raises(ValueError, match="token ids must lie in"):
        pack(tokens)
    assert pack([0, 2**31 - 1]) == _bytes([0, 2**31 - 1])
