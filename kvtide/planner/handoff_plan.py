"""How many prefill and decode machines a load needs, from a replay and measured rates.

    found in the replay ──▶ what a prompt lacks ──▶ prefilled, handed over    ──▶ prefill machines
                                    │                  └─▶ bytes between them  ──▶ links of both
                                    └─ little: prefilled where it is decoded ──▶ decode machines
    output tokens ──▶ steps of a batch ─────────────────────────────────────────▶ decode machines

Assumptions, all of them on the safe side or named in the report:

- Both sides find what the replay finds. The decode side also has the answers, which the replay
  counts as lacking.
- A conversation stays with one machine of either side.
- A decode machine runs `decode_batch` requests, or as many as its device holds if these are fewer.
- No machine is planned to be busy for more than `busy` of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.planner.traces import Trace, TraceError
from kvtide.spec import ALL, ModelMemory

MIN_TOKENS = 256
"""The server's `--handoff-min-tokens`, which is not imported from there: a plan needs no torch."""
WINDOW_S = 60.0
"""The peak is the busiest window of this length."""
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HandoffRates:
    """What one machine of either side does.

    decode_step_s  a step of `decode_batch` running requests
    peer_bytes_s   from a prefill machine, and to a decode machine
    chunk_tokens   pages leave chunk by chunk: the last chunk's are behind the prefill
    min_tokens     prompts that lack fewer are prefilled where they are decoded
    busy           the most of the time that a machine works
    requests_s     the mean rate of requests: that many more users; None: as in the trace
    """

    prefill_tokens_s: float
    decode_step_s: float
    decode_batch: int
    peer_bytes_s: float
    chunk_tokens: int = 8192
    min_tokens: int = MIN_TOKENS
    busy: float = 0.7
    requests_s: float | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """What a load asks for, each second, at its mean or in its busiest window.

    prefill_s  seconds of prefill on the prefill side
    local_s    seconds of prefill on the decode side
    decode_s   seconds of decode steps
    """

    requests: float
    handed_tokens: float
    handed_bytes: float
    output_tokens: float
    prefill_s: float
    local_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Machines:
    """How many of each side a demand needs.

    by_link    how many of either side its links alone would need
    both_roles how many that prefill and decode would do the same work
    """

    prefill: int
    decode: int
    by_link: int
    both_roles: int


@dataclass(frozen=True, slots=True)
class TokenWait:
    """How long requests wait for a token: half of them, and all but one in a hundred."""

    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, waits: Values) -> TokenWait:
        return cls(float(np.quantile(waits, 0.5)), float(np.quantile(waits, 0.99)))


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """`batch`: requests that a decode machine runs at once, which its device may limit.

    Waits of idle machines: the first token comes with the prefill of what is lacking, before the
    last chunk's bytes. The second comes a decode step behind these.
    """

    rates: HandoffRates
    requests: int
    duration_s: float
    handed_requests: int
    batch: int
    first_token: TokenWait
    second_token: TokenWait
    mean: Demand
    peak: Demand
    mean_machines: Machines
    peak_machines: Machines


def plan_handoff(
    memory: ModelMemory,
    trace: Trace,
    found_tokens: Sequence[int],
    rates: HandoffRates,
    device_tokens: int | None,
) -> HandoffPlan:
    """`device_tokens`: histories that a decode machine's device holds; None: they are elsewhere."""
    load = _Load.of(trace, found_tokens, rates)
    mean_tokens = float((load.prompts + load.outputs).mean())
    batch = rates.decode_batch
    if device_tokens is not None:
        batch = max(1, min(batch, int(device_tokens / mean_tokens)))
    handed = load.lacking >= rates.min_tokens
    sent = np.where(handed, load.lacking, 0.0)
    handed_bytes = _handed_bytes(memory, sent)
    per_request = {
        "requests": np.ones_like(sent),
        "handed_tokens": sent,
        "handed_bytes": handed_bytes,
        "output_tokens": load.outputs,
        "prefill_s": sent / rates.prefill_tokens_s,
        "local_s": np.where(handed, 0.0, load.lacking) / rates.prefill_tokens_s,
        "decode_s": load.outputs * rates.decode_step_s / batch,
    }
    mean, peak = (
        Demand(**{name: load.each_second(values, busiest) for name, values in per_request.items()})
        for busiest in (False, True)
    )
    last = handed_bytes * np.minimum(1.0, rates.chunk_tokens / np.maximum(1.0, sent))
    first = load.lacking / rates.prefill_tokens_s
    second = first + last / rates.peer_bytes_s + rates.decode_step_s
    return HandoffPlan(
        rates,
        trace.requests,
        load.duration_s,
        int(handed.sum()),
        batch,
        TokenWait.of(first),
        TokenWait.of(second),
        mean,
        peak,
        _machines(mean, rates),
        _machines(peak, rates),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    """Requests as arrays. `scale`: at the wanted rate, each stands for so many."""

    arrivals: Values
    prompts: Values
    outputs: Values
    lacking: Values
    duration_s: float
    scale: float = 1.0

    @classmethod
    def of(cls, trace: Trace, found_tokens: Sequence[int], rates: HandoffRates) -> _Load:
        given = [(r.arrival_s, float(len(r.prompt)), float(r.output_tokens)) for r in trace]
        arrivals, prompts, outputs = np.array(given, np.float64).T
        arrivals = arrivals - arrivals.min()
        duration_s = float(arrivals.max())
        if rates.requests_s is not None and not duration_s:
            arrivals = np.arange(len(arrivals)) / rates.requests_s
            duration_s = len(arrivals) / rates.requests_s
        if not duration_s:
            raise TraceError(
                f"{trace.name}: all requests come at once, so there is no load to plan for; give "
                "--requests-per-second"
            )
        lacking = prompts - np.asarray(found_tokens, np.float64)
        given_s = len(arrivals) / duration_s
        scale = 1.0 if rates.requests_s is None else rates.requests_s / given_s
        return cls(arrivals, prompts, outputs, lacking, duration_s, scale)

    def each_second(self, values: Values, busiest: bool) -> float:
        if not busiest or self.duration_s <= WINDOW_S:
            return float(values.sum()) * self.scale / self.duration_s
        windows = np.bincount((self.arrivals // WINDOW_S).astype(np.int64), values)
        whole = windows[: int(self.duration_s // WINDOW_S)]
        return float(whole.max()) * self.scale / WINDOW_S


def _handed_bytes(memory: ModelMemory, tokens: Values) -> Values:
    """Pages of histories that are lacking; windows and states once; the tail."""
    kept, page = memory.at_rest, memory.page_tokens
    history = sum(kept.slot_bytes(a.name) for a in kept.anchors if a.reuse.reach is ALL)
    others = 0
    for anchor in kept.anchors:
        if anchor.reuse.reach is not ALL:
            pages = max(1, -(-int(anchor.reuse.reach) // page))
            others += pages * kept.slot_bytes(anchor.name)
    tail = sum(memory.slot_bytes(anchor.name) for anchor in memory.anchors)
    handed = np.ceil(tokens / page) * history + others + tail
    return np.where(tokens > 0, handed, 0.0)


def _machines(demand: Demand, rates: HandoffRates) -> Machines:
    by_link = _count(demand.handed_bytes / rates.peer_bytes_s, rates.busy)
    prefill = _count(demand.prefill_s, rates.busy)
    decode = max(1, _count(demand.decode_s + demand.local_s, rates.busy))
    seconds = demand.prefill_s + demand.local_s + demand.decode_s
    both = max(1, _count(seconds, rates.busy))
    return Machines(max(prefill, by_link), max(decode, by_link), by_link, both)


def _count(busy_s: float, max_busy: float) -> int:
    """Machines for so many busy seconds a second."""
    return math.ceil(round(busy_s / max_busy, 9))
