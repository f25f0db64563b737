"""Machines for prefill and for decode, by hand and from replays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvtide.engine.handoff.handoffs import HANDOFF_MIN_TOKENS
from kvtide.planner import study, workloads
from kvtide.planner.handoff_plan import MIN_TOKENS, WINDOW_S, HandoffRates, plan_handoff
from kvtide.planner.study import Study
from kvtide.planner.traces import Trace, TraceError, TraceRequest
from kvtide.spec import ALL, ModelMemory, Tier, catalog

RATES = HandoffRates(
    prefill_tokens_s=10_000.0,
    decode_step_s=0.01,
    decode_batch=10,
    peer_bytes_s=1e9,
    chunk_tokens=1000,
    min_tokens=256,
    busy=0.5,
)


def trace_of(requests: Sequence[tuple[float, int, int]]) -> Trace:
    """(arrival, prompt tokens, output tokens)."""

    def walk() -> Iterator[TraceRequest]:
        for arrival_s, tokens, outputs in requests:
            yield TraceRequest(arrival_s, np.zeros(tokens, np.int32), outputs)

    lengths = [tokens for _, tokens, _ in requests]
    return Trace("by hand", len(requests), sum(lengths), max(lengths), walk)


@pytest.fixture(scope="module")
def memory() -> ModelMemory:
    return catalog.resolve("qwen3-8b")


def steady(seconds: int, tokens: int = 4096, outputs: int = 100) -> Trace:
    """A request each second."""
    return trace_of([(float(at), tokens, outputs) for at in range(seconds + 1)])


def test_what_a_steady_load_asks_for_is_what_its_requests_ask_for(memory: ModelMemory) -> None:
    found = plan_handoff(memory, steady(100), [2048] * 101, RATES, None)
    each_s = 101 / 100
    assert found.mean.requests == pytest.approx(each_s)
    assert found.mean.handed_tokens == pytest.approx(2048 * each_s)
    assert found.mean.prefill_s == pytest.approx(0.2048 * each_s)
    assert found.mean.decode_s == pytest.approx(100 * 0.01 / 10 * each_s)
    assert found.mean.local_s == 0
    # 0.21 busy seconds a second, of which a machine gives 0.5; and 0.1.
    assert (found.mean_machines.prefill, found.mean_machines.decode) == (1, 1)
    busy = replace(RATES, busy=0.1, peer_bytes_s=1e12)
    twice = plan_handoff(memory, steady(100), [2048] * 101, busy, None)
    assert (twice.mean_machines.prefill, twice.mean_machines.decode) == (3, 2)
    assert twice.mean_machines.both_roles == math.ceil(0.3048 * each_s / 0.1)


def test_bytes_are_those_of_the_missing_pages_and_of_the_tail(memory: ModelMemory) -> None:
    found = plan_handoff(memory, steady(100), [2048] * 101, RATES, None)
    (anchor,) = memory.anchors
    assert anchor.reuse.reach is ALL
    pages = 2048 // memory.page_tokens + 1
    assert found.mean.handed_bytes == pytest.approx(1.01 * pages * memory.slot_bytes(anchor.name))
    seconds = found.mean.handed_bytes / RATES.peer_bytes_s
    assert found.mean_machines.by_link == math.ceil(seconds / RATES.busy)
    slow = plan_handoff(memory, steady(100), [2048] * 101, replace(RATES, peer_bytes_s=1e7), None)
    assert slow.mean_machines.prefill == slow.mean_machines.by_link > 10


def test_prompts_that_lack_little_are_prefilled_where_they_are_decoded(memory: ModelMemory) -> None:
    found = plan_handoff(memory, steady(100), [4096 - 255] * 101, RATES, None)
    assert found.handed_requests == 0
    assert found.mean.handed_bytes == found.mean.prefill_s == 0
    assert found.mean.local_s == pytest.approx(0.0255 * 1.01)
    assert (found.mean_machines.prefill, found.mean_machines.by_link) == (0, 0)
    one_more = plan_handoff(memory, steady(100), [4096 - 256] * 101, RATES, None)
    assert one_more.handed_requests == 101


def test_the_peak_is_the_busiest_minute(memory: ModelMemory) -> None:
    quiet = [(float(at), 1000, 10) for at in range(0, 600, 10)]
    burst = [(300 + at / 10, 1000, 10) for at in range(300)]
    trace = trace_of(sorted(quiet + burst))
    found = plan_handoff(memory, trace, [0] * len(trace), RATES, None)
    assert found.peak.requests == pytest.approx((300 + 6) / WINDOW_S)
    assert found.peak.requests > 8 * found.mean.requests
    assert found.peak_machines.prefill > found.mean_machines.prefill


def test_the_device_limits_what_a_decode_machine_runs(memory: ModelMemory) -> None:
    sequence = 4096 + 100
    roomy, tight, tiny = (
        plan_handoff(memory, steady(100), [0] * 101, RATES, tokens)
        for tokens in (10 * sequence, 4 * sequence, 10)
    )
    assert (roomy.batch, tight.batch, tiny.batch) == (10, 4, 1)
    assert tight.mean.decode_s == pytest.approx(2.5 * roomy.mean.decode_s)


def test_a_wanted_rate_is_so_many_more_users(memory: ModelMemory) -> None:
    rates = replace(RATES, requests_s=50.5)
    found = plan_handoff(memory, steady(100), [0] * 101, rates, None)
    once = plan_handoff(memory, steady(100), [0] * 101, RATES, None)
    assert found.mean.requests == pytest.approx(50.5) and found.duration_s == once.duration_s
    assert found.peak.decode_s == pytest.approx(50 * once.peak.decode_s)
    at_once = trace_of([(0.0, 1000, 10)] * 10)
    with pytest.raises(TraceError, match="give --requests-per-second"):
        plan_handoff(memory, at_once, [0] * 10, RATES, None)
    assert plan_handoff(memory, at_once, [0] * 10, rates, None).mean.requests == 50.5


def test_first_tokens_wait_for_the_prefill_and_second_ones_for_the_last_chunk_too(
    memory: ModelMemory,
) -> None:
    found = plan_handoff(memory, steady(100), [2048] * 101, RATES, None)
    each = found.mean.handed_bytes / 1.01
    assert found.first_token.p50_s == pytest.approx(0.2048)
    assert found.first_token.p99_s == pytest.approx(0.2048)
    behind = each * RATES.chunk_tokens / 2048 / RATES.peer_bytes_s + RATES.decode_step_s
    assert found.second_token.p50_s == pytest.approx(0.2048 + behind)
    here = plan_handoff(memory, steady(100), [4096 - 255] * 101, RATES, None)
    assert here.first_token.p99_s == pytest.approx(0.0255)
    assert here.second_token.p50_s == pytest.approx(0.0255 + RATES.decode_step_s)


def test_a_replay_tells_what_each_request_lacks() -> None:
    memory = catalog.resolve("deepseek-v4-flash")
    trace = workloads.parse("chat:users=8,turns=4")
    tiers = {Tier.DEVICE: 200 << 20, Tier.HOST: 400 << 20, Tier.STORAGE: 0}
    report = study.run(Study(memory, trace, tiers))
    assert len(report.found_tokens) == trace.requests
    assert sum(report.found_tokens) == report.saved_tokens > 0
    found = plan_handoff(memory, trace, report.found_tokens, RATES, None)
    handed = found.mean.handed_tokens * found.duration_s
    local = found.mean.local_s * RATES.prefill_tokens_s * found.duration_s
    assert handed + local == pytest.approx(trace.prompt_tokens - report.saved_tokens)


def test_the_least_prompt_is_that_of_the_server() -> None:
    assert MIN_TOKENS == HANDOFF_MIN_TOKENS
