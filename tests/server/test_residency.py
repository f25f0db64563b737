"""Over HTTP: a server with pages of running requests on the host answers as one without."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtide.engine import RequestParams, SamplingParams
from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import open_engine
from kvtide.spec import SpecError
from kvtide.tiers import TierError
from tests.models.tiny import oracle, prompt
from tests.server.test_speculation import save_mtp

NAME, TOPK = "deepseek_v32", 24
ROOT = prompt(70, seed=1)
PROMPTS = [ROOT + prompt(9, seed=2), ROOT + prompt(30, seed=3), prompt(20, seed=4)]
SIZES = {"device_tokens": 256, "host_tokens": 1024, "max_running": 3, "deterministic": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("sparse")
    oracle(NAME).save_pretrained(path)
    return str(path)


def test_answers_are_those_of_a_server_with_resident_pools(
    serve: Callable[..., Any], folder: str
) -> None:
    """The second time, prefixes are found; requests run at once, and drafts are verified."""
    answers = []
    for chosen in (
        {"resident": "all"},
        {"resident": f"hot:{TOPK}"},
        {"resident": f"hot:{4 * TOPK}", "speculate": "ngram", "draft_tokens": 3},
    ):
        server = serve(model=folder, **SIZES, **chosen)
        logprobs = []
        for _ in range(2):
            with ThreadPoolExecutor(3) as clients:
                made = clients.map(
                    lambda tokens, client=server.client: client.complete(
                        tokens, max_tokens=9, logprobs=3, ignore_eos=True, temperature=0
                    ),
                    PROMPTS,
                )
                logprobs += [answer["choices"][0]["logprobs"] for answer in made]
        report = server.settled()
        assert report["violations"] == []
        hot = {pool["name"] for pool in report["pools"] if pool["hot"]}
        assert hot == (set() if chosen["resident"] == "all" else {"kv"})
        answers.append(logprobs)
    assert answers[0] == answers[1] == answers[2]


def opened(**chosen: Any) -> str:
    """The sentence about residency of a server that starts."""
    serving = open_engine(Settings(**{"storage": "none", "max_running": 2, **chosen}))
    assert serving.engine.cache.close()
    return serving.residency


def test_a_server_says_which_residency_it_chose(folder: str, model_folder: Path) -> None:
    """The model has 4,096 positions: `auto` counts with requests of so many tokens."""
    assert opened(model=folder, device_tokens=256) == ""
    hot = opened(model=folder, device_tokens=256, resident="hot:30")
    assert hot == "residency: hot:30, pages of running requests on the host"
    auto = "since 2 requests of 4,096 tokens take 5.24 MB, and the device tier has"
    chosen = opened(model=folder, device_bytes=4_000_000, resident="auto")
    assert chosen == f"residency: hot:{2 * TOPK}, {auto} 4.00 MB; 2 of them run instead of 1"
    fitting = opened(model=folder, device_bytes=6_000_000, resident="auto")
    assert fitting == f"residency: all, {auto} 6.00 MB"
    small = opened(model=folder, device_tokens=256, resident="auto")
    assert small.startswith(f"residency: all, {auto}")
    assert small.endswith("hot buffers would leave room for 0 of them and not 0")
    dense = opened(model=str(model_folder), device_tokens=256, resident="auto")
    assert dense == "residency: all, since attention reads all entries of all its pools"
    without = opened(model=folder, device_tokens=256, host_ratio=0, resident="auto")
    assert without == "residency: all, since there is no host tier"


def test_a_server_with_a_store_says_which_pages_it_does_not_read(
    folder: str, model_folder: Path, tmp_path: Path
) -> None:
    stored = {"device_bytes": 4_000_000, "storage": f"file://{tmp_path}"}
    hot = opened(model=folder, resident="hot:30", **stored)
    assert hot.endswith("; pages that were stored with --resident all are not read")
    chosen = opened(model=folder, resident="auto", **stored)
    assert chosen.endswith("with --resident all are not read, name a residency to keep to it")
    fitting = opened(model=folder, resident="auto", **stored | {"device_bytes": 6_000_000})
    assert "; pages that were stored with --resident hot:B are not read" in fitting
    assert "stored" not in opened(model=str(model_folder), resident="auto", **stored)


@pytest.mark.parametrize("entries", [2 * TOPK, 4 * TOPK])
def test_a_small_hot_buffer_allows_fewer_drafts(folder: str, entries: int) -> None:
    asked = {"speculate": "ngram", "draft_tokens": 3, "resident": f"hot:{entries}"}
    settings = Settings(model=folder, storage="none", max_running=2, device_tokens=256, **asked)
    serving, fitting = open_engine(settings), entries // TOPK - 1
    assert serving.speculation == f"speculation: ngram, up to {fitting} drafts"
    fewer = f"; up to {fitting} drafts in a step, since 3 need hot:{4 * TOPK}"
    assert serving.residency.endswith("on the host" + ("" if fitting == 3 else fewer))
    same = SamplingParams(logit_bias=((7, 100.0),))
    serving.engine.submit(RequestParams((7,) * 40, 40, same))
    drafted = set()
    while not serving.engine.idle:
        serving.engine.step()
        drafted |= {len(each.drafts) for each in serving.engine.scheduler.running}
    assert 0 < max(drafted) <= fitting
    assert serving.engine.cache.close()


def test_a_draft_that_was_found_and_has_no_room_is_left_out(tmp_path: Path) -> None:
    """Of a checkpoint with a layer for multi-token prediction."""
    model = save_mtp("deepseek_v32-mtp", tmp_path / "model")
    sizes = {"model": str(model), "storage": "none", "max_running": 2, "device_tokens": 256}
    serving = open_engine(Settings(**sizes, resident=f"hot:{2 * TOPK - 1}"))
    none = "speculation: none; mtp has no room for a draft in hot buffers"
    assert serving.speculation == none and not serving.engine.cache.memory.draft_sidecars
    assert serving.engine.cache.close()
    with pytest.raises(SpecError, match=f"use --resident hot:{2 * TOPK}$"):
        open_engine(Settings(**sizes, resident=f"hot:{2 * TOPK - 1}", speculate="mtp"))


def test_what_cannot_be_served_hot_is_refused_in_a_sentence(
    folder: str, model_folder: Path
) -> None:
    with pytest.raises(SpecError, match=f"up to {TOPK} of kv; use --resident hot:{TOPK}$"):
        opened(model=folder, device_tokens=256, resident=f"hot:{TOPK - 1}")
    drafts = {"speculate": "ngram", "draft_tokens": 3}
    with pytest.raises(SpecError, match=f"2 queries of a step; use --resident hot:{2 * TOPK}$"):
        opened(model=folder, device_tokens=256, resident=f"hot:{2 * TOPK - 1}", **drafts)
    with pytest.raises(SpecError, match=r"none can stay on the host; use --resident all$"):
        opened(model=str(model_folder), device_tokens=256, resident="hot:64")
    with pytest.raises(TierError, match=r"hot buffers of 2 requests take .* use fewer requests"):
        opened(model=folder, device_bytes=50_000, resident="hot:64")
