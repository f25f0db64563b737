"""Write policies: what they copy, what is found again, and what storage is spared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtide.cache.write_policies import POLICIES
from kvtide.planner import study, workloads
from kvtide.planner.replay import Report, Setup, replay
from kvtide.planner.storage_admission import (
    SECOND_USE,
    SELECTIVE,
    WRITE_POLICIES,
    WRITE_THROUGH,
    RequestedPages,
    WritePolicy,
)
from kvtide.planner.study import Study
from kvtide.planner.traces import Trace
from kvtide.spec import ModelMemory, Tier, catalog
from tests.planner.test_replay import FULL, HYBRID, PAGE, prompt, requests

PAGE_BYTES = 160


def serve(
    policy: WritePolicy, pages: tuple[int, ...], *texts: str, memory: ModelMemory = FULL
) -> Report:
    """Prompts of one page per letter and one token more; `pages` of every pool per tier."""
    tiers = dict(zip(Tier, pages, strict=False))
    capacity = {t: {a.name: count for a in memory.anchors} for t, count in tiers.items()}
    setup = Setup(memory, capacity, "lru", write_policy=policy)
    return replay(setup, requests(*([*prompt(text), 1] for text in texts)))


def pages_moved(report: Report) -> dict[str, int]:
    return {link: moved // PAGE_BYTES for link, moved in report.moved_bytes.items()}


def test_served_policies_are_those_of_the_cache() -> None:
    served = {name for name, policy in WRITE_POLICIES.items() if policy.served}
    assert served == {"write_through", "write_through_selective"} <= POLICIES.keys()
    assert SECOND_USE.name not in POLICIES


def test_selective_copies_what_a_second_prompt_finds_and_nothing_else() -> None:
    report = serve(SELECTIVE, (9, 9, 9), "abc", "xy", "abd")
    assert pages_moved(report) == {"load": 0, "backup": 2, "fetch": 0, "store": 2}
    assert report.saved_tokens == 2 * PAGE


def test_selective_loses_what_the_device_gave_up_before_it_was_found() -> None:
    assert serve(WRITE_THROUGH, (4, 9, 9), "abc", "xyz", "abc").saved_tokens == 3 * PAGE
    assert serve(SELECTIVE, (4, 9, 9), "abc", "xyz", "abc").saved_tokens == 0


def test_second_use_copies_all_to_the_host_and_what_two_prompts_have_to_storage() -> None:
    report = serve(SECOND_USE, (9, 9, 9), "abc", "xy", "abd")
    assert pages_moved(report) == {"load": 0, "backup": 6, "fetch": 0, "store": 2}


def test_pages_that_were_lost_and_computed_again_are_a_second_use() -> None:
    texts = ("abc", "xyz", "abc", "xyz", "abc")
    report = serve(SECOND_USE, (4, 3, 20), *texts)
    assert pages_moved(report)["store"] == 6
    assert report.hit_tokens == {Tier.DEVICE: 0, Tier.HOST: 0, Tier.STORAGE: 3 * PAGE}
    assert serve(WRITE_THROUGH, (4, 3, 20), *texts).hit_tokens[Tier.STORAGE] == 9 * PAGE


def test_second_use_writes_the_windows_that_a_resume_needs() -> None:
    report = serve(SECOND_USE, (9, 4, 20), "abcd", "abcd", "uvwxyz", "abcd", memory=HYBRID)
    assert report.moved_bytes["store"] == 4 * 160 + 2 * 112
    assert report.saved_tokens == 8 * PAGE


def test_requested_pages_are_counted_as_whole_prefixes() -> None:
    requested = RequestedPages(PAGE)
    added = [requested.add(np.array(prompt(text), np.int32)) for text in ("abc", "abd", "bc", "ab")]
    assert added == [0, 2, 0, 2]


# -- studies --------------------------------------------------------------------------------

MODEL = catalog.resolve("qwen3-8b")
GB = 10**9


def asked(trace: Trace, host_bytes: int) -> Study:
    tiers = {Tier.DEVICE: 3 * GB, Tier.HOST: host_bytes, Tier.STORAGE: 1000 * GB}
    return Study(MODEL, trace, tiers)


@pytest.fixture(scope="module")
def questions() -> Trace:
    """Most pages have one use: a few documents are asked about often, and every question is new."""
    return workloads.parse("rag:requests=200,documents=60,retrieved=2")


def test_a_host_that_keeps_pages_until_their_second_use_spares_storage_at_an_equal_hit_rate(
    questions: Trace,
) -> None:
    base = asked(questions, 200 * GB)
    through, selective, second = study.writing(base, study.run(base))
    assert (through.policy, selective.policy, second.policy) == tuple(WRITE_POLICIES.values())
    assert second.report.hit_rate == through.report.hit_rate > 0.1
    assert 0.5 < second.saved < 1
    assert second.stored_bytes == pytest.approx((1 - second.saved) * through.stored_bytes)
    assert selective.report.hit_rate < through.report.hit_rate - study.EQUAL_HIT_RATE
    assert study.thriftiest([through, selective, second]) is second


def test_a_small_host_loses_pages_before_their_second_use(questions: Trace) -> None:
    base = asked(questions, 4 * GB)
    through, _, second = costs = study.writing(base, study.run(base))
    assert second.report.hit_rate < through.report.hit_rate - study.EQUAL_HIT_RATE
    assert second.report.tier_hit_rate(Tier.STORAGE) > 0
    assert study.thriftiest(costs) is through


def test_the_policy_of_the_study_is_not_replayed_again(questions: Trace) -> None:
    base = replace(asked(questions, 4 * GB), write_policy=SECOND_USE)
    report = study.run(base)
    labels: list[str] = []

    def walk(trace: Trace, label: str) -> Trace:
        labels.append(label)
        return trace

    costs = study.writing(base, report, walk)
    assert labels == ["write_through", "write_through_selective"]
    assert costs[2].report is report
    assert costs[0].saved == 0
