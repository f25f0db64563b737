"""Metrics of handoffs follow every state, of whole and of broken ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from kvtide.engine import Engine
from kvtide.engine.handoff.handoff_state import HandoffState
from kvtide.engine.handoff.messages import Complete, Failed, First, Silent, Written
from kvtide.server.handoff.handoff_metrics import decode_metrics, prefill_metrics
from tests.engine.handoff.handing_over import Pair, family_pair
from tests.engine.restoring import PAGE

PROMPT = list(range(1, 6 * PAGE + 3))


@pytest.fixture
def pair() -> Iterator[Pair]:
    opened = family_pair("llama", chunks=(2 * PAGE, 48))
    yield opened
    opened.close()


def samples(of: Callable[[Engine], Iterable[Metric]], engine: Engine) -> dict[str, float]:
    """By name, and the only label behind a colon."""
    return {
        ":".join([sample.name.removeprefix("kvtide_handoff_"), *sample.labels.values()]): value
        for metric in of(engine)
        for sample in metric.samples
        for value in (sample.value,)
    }


def test_open_handoffs_are_counted_by_state_and_then_by_their_end(pair: Pair) -> None:
    none = samples(decode_metrics, pair.decode)
    assert {name for name in none if name.startswith("open")} == {
        "open:offered", "open:reserved", "open:streaming", "open:landed",
    }  # fmt: skip
    assert {name for name in none if name.startswith("ended")} == {
        "ended_total:decoding", "ended_total:failed", "ended_total:aborted", "ended_total:declined",
    }  # fmt: skip
    pair.passes = lambda message: not isinstance(message, Complete)
    request = pair.submit(PROMPT)
    assert samples(decode_metrics, pair.decode)["open:offered"] == 1

    def streams() -> bool:
        return request.handoff is not None and request.handoff.state is HandoffState.STREAMING

    pair.run(streams)
    during = samples(decode_metrics, pair.decode)
    assert during["open:streaming"] == 1 and during["tail_rows_free"] == none["tail_rows_free"] - 1
    assert samples(prefill_metrics, pair.prefill)["rooms"] == 1
    pair.passes = lambda message: True
    pair.run(lambda: request.finish is not None)
    pair.settle()
    after, sent = samples(decode_metrics, pair.decode), samples(prefill_metrics, pair.prefill)
    assert after["ended_total:decoding"] == 1 and after["open:streaming"] == 0
    assert after["tokens_total"] == 6 * PAGE
    memory = pair.decode.cache.memory
    (anchor,) = memory.anchors
    assert after["landed_bytes_total"] == 6 * memory.at_rest.slot_bytes(anchor.name)
    assert sent["rooms"] == 0 and sent["rooms_ended_total:handed_over"] == 1
    assert sent["written_bytes_total"] == after["landed_bytes_total"] + memory.slot_bytes(
        anchor.name
    )
    assert sent["sender_jobs_ended_total:done"] >= 4 and sent["sender_jobs:queued"] == 0


def test_slots_that_may_still_be_written_to_are_counted(pair: Pair) -> None:
    pair.passes = lambda message: (
        not isinstance(message, (Silent, Written, First, Complete, Failed))
    )
    request = pair.submit(PROMPT)
    pair.run(lambda: bool(pair.prefill.handoffs.prefill.rooms))
    pair.decode.abort(request)
    pair.step()
    held = samples(decode_metrics, pair.decode)
    assert held["quarantined"] == 1 and held["quarantined_slots"] == 6
    assert held["ended_total:aborted"] == 1
    pair.passes = lambda message: True
    pair.settle()
    after = samples(decode_metrics, pair.decode)
    assert after["quarantined"] == after["quarantined_slots"] == 0


def test_a_prompt_that_lacks_little_is_declined(pair: Pair) -> None:
    pair.answer([1, 2, 3])
    assert samples(decode_metrics, pair.decode)["ended_total:declined"] == 1


def test_every_metric_is_explained(pair: Pair) -> None:
    guide = (Path(__file__).parents[3] / "docs/HANDOFF.md").read_text()
    metrics = [*decode_metrics(pair.decode), *prefill_metrics(pair.prefill)]
    assert len(metrics) >= 12
    for metric in metrics:
        name = metric.name.removeprefix("kvtide_handoff_").removeprefix("sender_")
        assert f"_{name}" in guide, metric.name
