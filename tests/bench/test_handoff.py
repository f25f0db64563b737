"""`kvtide bench handoff` measures what its rows name, in tiny shapes on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtide.bench.gpu.shapes import qwen3_8b, tiny
from kvtide.bench.handoff import decode_beside, handoff_speed
from kvtide.bench.handoff.decode_beside import DecodeBatch, HandoffOrNot, PromptCost
from kvtide.bench.handoff.handoff_bed import HandoffBed, handoff_bed
from kvtide.bench.handoff.handoff_case import HandoffCase, HandoffModel
from kvtide.bench.handoff.plain_copies import PlainCopies
from kvtide.bench.handoff.prefill_process import PrefillProcessError
from kvtide.bench.handoff.served_engine import TimedAnswer
from kvtide.bench.handoff.switched_transport import (
    TAIL_REGION,
    WHOLE_WAYS,
    HostStaging,
    SwitchedTransport,
    WriteWay,
)
from kvtide.cli.main import main
from kvtide.tiers import host_arena
from kvtide.transfer.peer.transport import Region, TransportError, WriteBatch, write
from kvtide.transfer.peer.transport_registry import open_transport

CPU = torch.device("cpu")
PAGE = 64


# -- pages on their way -----------------------------------------------------------------------


@pytest.mark.parametrize("way", WHOLE_WAYS)
def test_every_way_brings_all_bytes_by_the_tail(way: WriteWay) -> None:
    pages, tail = (host_arena(1 << 16, pinned=False, shared=True) for _ in range(2))
    receiver = open_transport("shm")
    transport = SwitchedTransport(open_transport("shm"), CPU, 1 << 16)
    transport.way = way
    link = transport.connect(receiver.expose([Region.of(pages), Region.of(tail)]))
    source = torch.arange(1 << 14, dtype=torch.int32).view(torch.uint8)
    base = source.data_ptr()
    for prompt in range(2):  # HostStaging is used again.
        pages.data.zero_()
        tail.data.zero_()
        for first in range(0, 4096, 1024):
            write(link, WriteBatch.of(base + first, 8192 + first, 1024), 10.0)
        arrived = bool((pages.data[8192:12288] == source[:4096]).all())
        assert arrived == (way is not WriteWay.STAGED), f"prompt {prompt}"
        write(link, WriteBatch.of(base + 4096, 64, 512, region=TAIL_REGION), 10.0)
        assert torch.equal(pages.data[8192:12288], source[:4096])
        assert torch.equal(tail.data[64:576], source[4096:4608])
        assert not pages.data[:8192].any() and not tail.data[576:].any()
    link.close()


def test_pages_may_go_without_the_tail() -> None:
    pages, tail = (host_arena(1 << 16, pinned=False, shared=True) for _ in range(2))
    transport = SwitchedTransport(open_transport("shm"), CPU, 1 << 16)
    transport.way = WriteWay.WITHOUT_TAIL
    link = transport.connect(open_transport("shm").expose([Region.of(pages), Region.of(tail)]))
    source = torch.full((1024,), 7, dtype=torch.uint8)
    for region in range(2):
        write(link, WriteBatch.of(source.data_ptr(), 64, 512, region=region), 10.0)
    assert (pages.data[64:576] == 7).all() and not tail.data.any()
    link.close()


def test_a_prompt_larger_than_staging_is_refused() -> None:
    staging = HostStaging(CPU, 1024)
    source = torch.ones(2048, dtype=torch.uint8)
    batch = WriteBatch.of(source.data_ptr(), 0, 1025)
    with pytest.raises(TransportError, match="staging of 1,024 B is full"):
        staging.take(batch)


def test_a_plain_copy_has_a_speed() -> None:
    assert PlainCopies(CPU, 1 << 20).bytes_s() > 0


# -- two processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bed() -> Iterator[HandoffBed]:
    model = HandoffModel(tiny(qwen3_8b()), "tiny", dtype="float32")
    sizes = {"chunk_tokens": 128, "batch_tokens": 4096, "room_tokens": 1024}
    with handoff_bed(HandoffCase(model, "cpu", 512, checkpoint_tokens=128, **sizes)) as opened:
        yield opened


def tokens_of(answered: TimedAnswer) -> list[int]:
    return [each.token for each in answered.request.output]


def test_the_answer_is_the_same_in_every_way(bed: HandoffBed) -> None:
    prompt = bed.prompt(500)
    expected = tokens_of(bed.alone(prompt, 6))
    for way in WHOLE_WAYS:
        bed.flush()
        bed.switch(way)
        answered = bed.handed_over(prompt, 6)
        assert tokens_of(answered) == expected, way
        assert 0 < answered.first_s <= answered.last_s
    bed.switch(WriteWay.STRAIGHT)


def test_landing_counts_the_bytes_of_the_pages(bed: HandoffBed) -> None:
    found = handoff_speed.landing(bed, 500, 1)
    memory = bed.decode.engine.cache.memory
    page_bytes = sum(memory.slot_bytes(anchor.name) for anchor in memory.anchors)
    assert found.written_bytes == (499 // PAGE + 1) * page_bytes
    assert found.bytes_s > 0 and found.plain_bytes_s > 0


def test_a_second_turn_sends_what_the_decode_side_lacks(bed: HandoffBed) -> None:
    found = handoff_speed.second_turn(bed, 512, 1)
    assert found.kept_tokens == 6 * PAGE
    bed.flush()
    prompt = bed.prompt(512)
    bed.handed_over(prompt[: found.kept_tokens + 1])
    second = bed.handed_over(prompt).request
    assert second.handoff is not None and second.handoff.tokens == PAGE
    assert found.on_neither.of(found.on_both) > 0


def test_a_tail_that_is_not_sent_is_computed_again(bed: HandoffBed) -> None:
    prompt = bed.prompt(4 * PAGE + 20)
    bed.flush()
    expected = tokens_of(bed.alone(prompt, 6))
    bed.flush()
    with bed.without_tails():
        answered = bed.handed_over(prompt, 6)
    assert tokens_of(answered) == expected
    found = handoff_speed.tail_ways(bed, 4 * PAGE, 1)
    assert found.tail_tokens == PAGE // 2 and found.tail_bytes > 0


def test_a_batch_decodes_while_pages_land(bed: HandoffBed) -> None:
    batch = DecodeBatch(2, PAGE, 1500)
    found = decode_beside.decode_while_landing(bed, batch, 300, 2, 2, 1)
    assert found.handoffs == 2 and found.landed_bytes_s > 0
    assert found.quiet_tokens_s > 0 and found.landing_tokens_s > 0


def test_an_error_of_the_child_comes_with_its_traceback(bed: HandoffBed) -> None:
    with pytest.raises(PrefillProcessError, match="not a valid WriteWay"):
        bed.prefill._do("switch", "sideways")
    assert bed.prefill.sent().bytes >= 0, "it serves on"


# -- the threshold ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handed", "worth"),
    [((9, 9, 9), None), ((1, 1, 1), 128), ((1, 9, 1), 512), ((1, 1, 9), None)],
)
def test_a_handoff_is_worth_it_from_where_no_longer_prompt_is_cheaper_here(
    handed: tuple[int, ...], worth: int | None
) -> None:
    lengths = (128, 256, 512)
    costs = [
        HandoffOrNot(tokens, 4, PromptCost(1.0, 5.0), PromptCost(1.0, delay))
        for tokens, delay in zip(lengths, handed, strict=True)
    ]
    order = np.random.default_rng(3).permutation(len(costs))
    assert decode_beside.shortest_worth([costs[n] for n in order]) == worth


# -- the command ------------------------------------------------------------------------------


@pytest.mark.full
def test_every_part_has_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    args = ["bench", "handoff", "--device", "cpu", "--tiny", "--json", str(found)]
    assert main(args) == 0, capsys.readouterr().out
    numbers = json.loads(found.read_text())
    assert {name: len(rows) for name, rows in numbers.items()} == {
        "ways": 12, "landing": 3, "turn": 24, "tail": 3, "decode": 6, "threshold": 8, "failed": 0,
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert "no goal applies" in printed and ", yes" not in printed and ", no |" not in printed


@pytest.mark.full
def test_mooncake_lands_beside_its_own_calls(tmp_path: Path) -> None:
    pytest.importorskip("mooncake.engine")
    found = tmp_path / "found.json"
    args = ["bench", "handoff", "--device", "cpu", "--tiny", "--models", "qwen3"]
    only = ["--only", "landing", "--transport", "mooncake", "--json", str(found)]
    assert main([*args, *only]) == 0
    (row,) = json.loads(found.read_text())["landing"]
    assert row["transport"] == "mooncake" and row["plain_bytes_s"] > 0


@pytest.mark.parametrize(
    "args",
    [
        ["--only", "speed"], ["--models", "gpt"], ["--tokens", "12"], ["--rounds", "0"],
    ],
    ids=lambda args: args[0],
)  # fmt: skip
def test_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "handoff", "--device", "cpu", "--tiny", *args]) == 2
    assert "bench handoff" in capsys.readouterr().err
