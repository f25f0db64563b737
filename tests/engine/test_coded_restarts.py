"""Restarts over a store with a codec: `lossless` restores every logprob to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtide.cache import TieredCache
from kvtide.spec import Tier
from kvtide.storage import open_store
from kvtide.storage.codec import CodedStore
from tests.engine.restarting import Life, Past
from tests.engine.restoring import ALL_NAMES, HOT_NAMES, NAMES, family_of
from tests.proofs import Proves

FEW = ("llama", "gpt_oss", "falcon_h1", "glm_moe_dsa-shared", "deepseek_v4")
"""A history; windows; states; index keys; packed pools of several kinds."""
assert set(FEW) <= set(NAMES)
STORES = {"file": "file://{folder}?cap=1GB&floor=1MB&sync=never&", "memory": "memory:{folder}?"}


def cells() -> list[object]:
    """Every family over a folder, and a few over a dictionary, too."""
    families = [*ALL_NAMES, *HOT_NAMES]
    listed = [(family, "file") for family in families] + [(family, "memory") for family in FEW]
    return [
        pytest.param(*cell, marks=() if cell in QUICK_CELLS else pytest.mark.full)
        for cell in listed
    ]


QUICK_CELLS = {*((family, "file") for family in FEW[-1:]), (FEW[0], "memory")}


@pytest.mark.parametrize(("family", "store"), cells())
def test_conversations_go_on_to_the_bit(
    family: str, store: str, tmp_path: Path, proves: Proves
) -> None:
    proves(family_of(family).model, "storage")
    past = Past(STORES[store].format(folder=tmp_path) + "codec=lossless&coders=2")
    coded = 0
    for number, rounds in enumerate((slice(-2, -1), slice(-1, None))):
        life = Life(family, past, chunk_tokens=(64, 257)[number])
        for _ in life.converse(4, rounds=rounds, validate_every=8):
            pass
        assert (life.found[Tier.STORAGE] > 0) == bool(number)
        stats = life.cache.storage.stats()
        assert stats is not None and stats.objects.get("corrupt", 0) == 0
        coded += stats.coded_bytes["store"]
        assert (stats.coded_bytes["fetch"] > 0) == bool(number)
        life.end()
    assert coded > 0, "nothing went through the codec"
    no_page_is_stored_plain(life.cache, past)


def no_page_is_stored_plain(cache: TieredCache, past: Past) -> None:
    coded = past.open(cache)
    assert isinstance(coded, CodedStore) and coded.status().objects
    coded.close()
    plain = open_store(past.url.replace("codec=lossless&coders=2", ""), cache.storage.space)
    assert plain.status().objects == 0
    plain.close()
