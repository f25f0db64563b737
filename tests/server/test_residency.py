"""Over HTTP: a server with pages of running requests on the host answers as one without."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import open_engine
from kvtide.spec import SpecError
from kvtide.tiers import TierError
from tests.models.tiny import oracle, prompt

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
    assert opened(model=folder, device_tokens=256) == ""
    chosen = opened(model=folder, device_bytes=32_000_000, resident="auto")
    assert chosen.startswith(f"residency: hot:{2 * TOPK}, since 2 requests of 32,768 tokens take")
    assert opened(model=folder, device_tokens=256, resident="hot:30").startswith(
        "residency: hot:30"
    )
    assert chosen.endswith("; 2 of them run instead of 1")
    small = opened(model=folder, device_tokens=256, resident="auto")
    assert small.startswith("residency: all, since 2 requests of 32,768 tokens take")
    assert small.endswith("hot buffers would leave room for 0 of them and not 0")
    dense = opened(model=str(model_folder), device_tokens=256, resident="auto")
    assert dense == "residency: all, since attention reads all entries of all its pools"
    without = opened(model=folder, device_tokens=256, host_ratio=0, resident="auto")
    assert without == "residency: all, since there is no host tier"


def test_what_cannot_be_served_hot_is_refused_in_a_sentence(
    folder: str, model_folder: Path
) -> None:
    with pytest.raises(SpecError, match=f"up to {TOPK} of kv; use --resident hot:{TOPK}$"):
        opened(model=folder, device_tokens=256, resident=f"hot:{TOPK - 1}")
    drafts = {"speculate": "ngram", "draft_tokens": 3}
    with pytest.raises(SpecError, match=f"4 queries of a step; use --resident hot:{4 * TOPK}$"):
        opened(model=folder, device_tokens=256, resident=f"hot:{2 * TOPK}", **drafts)
    with pytest.raises(SpecError, match=r"none can stay on the host; use --resident all$"):
        opened(model=str(model_folder), device_tokens=256, resident="hot:64")
    with pytest.raises(TierError, match=r"hot buffers of 2 requests take .* use fewer requests"):
        opened(model=folder, device_bytes=50_000, resident="hot:64")
