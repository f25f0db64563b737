"""`kvtide bench handoff`: a server that prefills and one that decodes, beside one server."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvtide.bench.gpu import shapes
from kvtide.bench.handoff import decode_beside, handoff_speed
from kvtide.bench.handoff.decode_beside import DecodeBatch, HandoffOrNot
from kvtide.bench.handoff.handoff_bed import HandoffBed, handoff_bed
from kvtide.bench.handoff.handoff_case import HandoffCase, HandoffModel
from kvtide.byte_sizes import format_bytes
from kvtide.cli.bench.bench_report import BenchReport, against_goal, ms
from kvtide.cli.console import CommandError
from kvtide.engine.handoff.handoffs import HANDOFF_MIN_TOKENS
from kvtide.server.ranks.rank_processes import freeze_gc
from kvtide.spec.families import KVDType

_HEADER = ("benchmark", "model", "case", "measured", "beside", "goal: value, reached")
PARTS = ("ways", "landing", "turn", "tail", "decode", "threshold")
TRANSPORTS = ("shm", "mooncake")
_LANDING_GOALS = {"shm": 0.9, "mooncake": 0.85}
_THRESHOLD_FACTORS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class HandoffSizes:
    """What is measured: on a GPU, on a CPU, or to test the benchmark itself.

    batch       requests that decode while pages land
    few         requests that decode while prompts come, in `threshold`
    prompts     that come one after another there, in a round
    rooms       prompts that land one after another
    """

    models: dict[str, HandoffModel]
    tokens: tuple[int, ...]
    batch: DecodeBatch
    few: DecodeBatch
    chunk_tokens: int = 8192
    checkpoint_tokens: int = 1024
    prompts: int = 8
    rooms: int = 6
    rounds: int = 5


def _on_gpu() -> HandoffSizes:
    qwen = shapes.qwen3_8b()
    qwen = replace(qwen, config={**qwen.config, "max_position_embeddings": 131_072})
    v4 = shapes.deepseek_v4_flash()
    what = "DeepSeek-V4-Flash, 12 layers, 32 experts"
    return HandoffSizes(
        {
            "qwen3-8b": HandoffModel(qwen, "Qwen3-8B"),
            "v4-flash": HandoffModel(v4, what, KVDType.FP8),
            "v4-flash-hot": HandoffModel(v4, f"{what}, hot:1024", KVDType.FP8, hot=1024),
            "falcon-h1": HandoffModel(shapes.falcon_h1(), "Falcon-H1-34B, 12 layers"),
        },
        tokens=(16_384, 65_536),
        batch=DecodeBatch(16, 2048, 4096),
        few=DecodeBatch(8, 2048, 8192),
        prompts=4,
    )


def _on_cpu() -> HandoffSizes:
    """Pages of a size that a copy is seen, and a model that a core prefills within seconds."""
    given = shapes.qwen3_8b(), shapes.deepseek_v4_flash(), shapes.falcon_h1()
    qwen, v4, falcon = map(shapes.tiny, given)
    wide = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 8,
    }  # fmt: skip
    qwen = replace(qwen, config={**qwen.config, **wide})
    return HandoffSizes(
        {
            "qwen3": HandoffModel(qwen, "Qwen3, 8 layers, hidden 256, f32", dtype="float32"),
            "v4-hot": HandoffModel(v4, "tiny DeepSeek-V4, hot:16", hot=16, dtype="float32"),
            "falcon-h1": HandoffModel(falcon, "tiny Falcon-H1", dtype="float32"),
        },
        tokens=(1024, 2048),
        batch=DecodeBatch(4, 128, 1500),
        few=DecodeBatch(2, 128, 1500),
        chunk_tokens=512,
        checkpoint_tokens=256,
        prompts=4,
        rooms=4,
        rounds=3,
    )


def _tiny() -> HandoffSizes:
    given = shapes.qwen3_8b(), shapes.deepseek_v4_flash(), shapes.falcon_h1()
    qwen, v4, falcon = map(shapes.tiny, given)
    return HandoffSizes(
        {
            "qwen3": HandoffModel(qwen, "tiny Qwen3", dtype="float32"),
            "v4-hot": HandoffModel(v4, "tiny DeepSeek-V4, hot:16", hot=16, dtype="float32"),
            "falcon-h1": HandoffModel(falcon, "tiny Falcon-H1", dtype="float32"),
        },
        tokens=(512,),
        batch=DecodeBatch(2, 64, 1000),
        few=DecodeBatch(2, 64, 1000),
        chunk_tokens=256,
        checkpoint_tokens=128,
        prompts=2,
        rooms=2,
        rounds=1,
    )


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A prefill server in a process of its own and a decode server in this one: real channel, "
        "real transport, random weights. Every row compares two ways in one run."
    )
    parser.add_argument(
        "--only", default=",".join(PARTS), metavar="NAME,…", help=f"some of {', '.join(PARTS)}"
    )
    parser.add_argument("--models", metavar="NAME,…", help="some of the models (all)")
    parser.add_argument("--device", help="cuda or cpu; the GPU if there is one")
    parser.add_argument("--transport", choices=TRANSPORTS, default="shm", help="(shm)")
    parser.add_argument("--tokens", metavar="N,…", help="prompt lengths instead of the usual ones")
    parser.add_argument("--rounds", type=int, metavar="N", help="that are counted, per row")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes, to test the benchmark: no speeds"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    wanted = _chosen(args.only, PARTS, "--only")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CommandError("bench handoff: there is no CUDA device; use --device cpu")
    on_gpu = device.type == "cuda"
    sizes = _tiny() if args.tiny else _on_gpu() if on_gpu else _on_cpu()
    models = _chosen(args.models or ",".join(sizes.models), tuple(sizes.models), "--models")
    if args.tokens:
        sizes = replace(sizes, tokens=_lengths(args.tokens))
    if args.rounds is not None:
        if args.rounds < 1:
            raise CommandError(f"bench handoff: --rounds {args.rounds}; use at least 1")
        sizes = replace(sizes, rounds=args.rounds)
    report = BenchReport(args.json)
    for name in models:
        bench = _Bench(sizes, sizes.models[name], device, args.transport, report)
        with report.guarded(f"{', '.join(wanted)} of {sizes.models[name].what}"):
            bench.measure(wanted)
    if not on_gpu:
        report.note("on a CPU no goal applies: goals are set for two processes on one H200")
    return report.end(_HEADER)


def _chosen(given: str, known: Sequence[str], option: str) -> list[str]:
    names = given.split(",")
    if unknown := sorted(set(names) - set(known)):
        raise CommandError(
            f"bench handoff: {option} {', '.join(unknown)} is not known; use {', '.join(known)}"
        )
    return [name for name in known if name in names]


def _lengths(given: str) -> tuple[int, ...]:
    parts = given.split(",")
    if not all(part.isdecimal() and int(part) >= 256 for part in parts):
        raise CommandError(f"bench handoff: --tokens {given}; use lengths of 256 or more")
    return tuple(int(part) for part in parts)


class _Bench:
    """All parts of one model, between one pair of servers."""

    def __init__(
        self,
        sizes: HandoffSizes,
        model: HandoffModel,
        device: torch.device,
        transport: str,
        report: BenchReport,
    ) -> None:
        self._sizes, self._model, self._device = sizes, model, device
        self._transport, self._report = transport, report

    def measure(self, parts: Sequence[str]) -> None:
        sizes = self._sizes
        batches = {"decode": sizes.batch.tokens, "threshold": sizes.few.tokens}
        cores = os.cpu_count() or 1
        case = HandoffCase(
            self._model,
            str(self._device),
            max(sizes.tokens),
            chunk_tokens=sizes.chunk_tokens,
            batch_tokens=max((batches.get(part, 0) for part in parts), default=0),
            room_tokens=sizes.rooms * sizes.tokens[0] if "decode" in parts else 0,
            checkpoint_tokens=sizes.checkpoint_tokens,
            transport=self._transport,
            threads=max(1, cores // 2),
        )
        with handoff_bed(case) as bed:
            self._report.note(f"both servers of {self._model.what} are up")
            freeze_gc()  # As a server does.
            for part in parts:
                with self._report.guarded(f"{part} of {self._model.what}"):
                    getattr(self, f"_{part}")(bed)
        gc.unfreeze()

    def _row(self, *cells: str, found: dict[str, Any]) -> None:
        part, *rest = cells
        row = (part, self._model.what, *rest)
        numbers = {"model": self._model.shape.name, "what": self._model.what}
        self._report.row(row, numbers | {"transport": self._transport} | found)

    def _goal(self, value: float, wanted: float, unit: str = "×", *, at_most: bool = False) -> str:
        """On a GPU; elsewhere the value alone."""
        if self._device.type == "cuda":
            return against_goal(value, wanted, unit, at_most=at_most)
        signed = f"{value:+.1%}" if at_most else f"{value:.1%}"
        return signed if unit == "%" else f"{value:.2f} ×"

    def _ways(self, bed: HandoffBed) -> None:
        for tokens in self._sizes.tokens:
            found = handoff_speed.write_ways(bed, tokens, self._sizes.rounds)
            case = f"{tokens:,} tokens, {format_bytes(found.page_bytes)}"
            first, second = ms(found.straight.first_s), ms(found.straight.second_s)
            numbers = found.as_json()
            if found.staged is not None and found.of_staged is not None:
                ratio = self._goal(found.of_staged, -0.1, "%", at_most=True)
                self._row(
                    *("ways", f"{case}, second token", second),
                    *(f"staged through the device {ms(found.staged.second_s)}", ratio),
                    found=numbers,
                )
            if found.chunked is not None and found.of_chunked is not None:
                self._row(
                    *("ways", f"{case}, second token", second),
                    f"staged write by write {ms(found.chunked.second_s)}",
                    *(f"{found.of_chunked:+.1%}",),
                    found=numbers,
                )
            is_goal = tokens == self._sizes.tokens[0]
            added = f"{found.added:+.1%}"
            self._row(
                *("ways", f"{case}, first token", first),
                f"one server {ms(found.alone.first_s)}",
                self._goal(found.added, 0.05, "%", at_most=True) if is_goal else added,
                found=numbers,
            )
            self._row(
                *("ways", f"{case}, second token", second),
                f"one server {ms(found.alone.second_s)}",
                f"{found.added_to_second:+.1%}",
                found=numbers,
            )

    def _landing(self, bed: HandoffBed) -> None:
        tokens = self._sizes.tokens[-1]
        found = handoff_speed.landing(bed, tokens, self._sizes.rounds)
        own = "Mooncake's own calls" if self._transport == "mooncake" else "a plain copy"
        self._row(
            *("landing", f"{tokens:,} tokens, {format_bytes(found.written_bytes)}"),
            f"{found.bytes_s / 1e9:.2f} GB/s, end to end {ms(found.end_to_end_s)}",
            f"{own} {found.plain_bytes_s / 1e9:.2f} GB/s",
            self._goal(found.of_plain, _LANDING_GOALS[self._transport], "%"),
            found=found.as_json(),
        )

    def _turn(self, bed: HandoffBed) -> None:
        tokens = self._sizes.tokens[0]
        found = handoff_speed.second_turn(bed, tokens, self._sizes.rounds)
        both = f"{tokens:,} tokens, {found.kept_tokens:,} on both sides"
        alone = f"{tokens:,} tokens, {found.kept_tokens:,} on the decode side alone"
        compared = (
            (both, found.on_both, "the rest computed, all sent", found.on_prefill),
            (both, found.on_both, "all computed and sent", found.on_neither),
            (both, found.on_both, "the rest prefilled there", found.by_decode),
            (alone, found.on_decode, "all computed and sent", found.on_neither),
        )
        for number, (case, mine, what, other) in enumerate(compared):
            first, second = other.of(mine), other.second_of(mine)
            self._row(
                *("turn", f"{case}, first token", ms(mine.first_s)),
                f"{what} {ms(other.first_s)}",
                f"{first:.2f} ×" if number else self._goal(first, 5),
                found=found.as_json(),
            )
            self._row(
                *("turn", f"{case}, second token", ms(mine.second_s)),
                *(f"{what} {ms(other.second_s)}", f"{second:.2f} ×"),
                found=found.as_json(),
            )

    def _tail(self, bed: HandoffBed) -> None:
        found = handoff_speed.tail_ways(bed, self._sizes.tokens[0], self._sizes.rounds)
        what = f"{found.tail_tokens:,} tokens in {format_bytes(found.tail_bytes)}"
        self._row(
            *("tail", f"{found.tokens:,} tokens, and a tail of {what}"),
            f"second token {ms(found.sent.second_s)}",
            f"the tail computed again {ms(found.recomputed.second_s)}",
            f"saves {ms(found.saved_s)}",
            found=found.as_json(),
        )

    def _decode(self, bed: HandoffBed) -> None:
        sizes, tokens, batch = self._sizes, self._sizes.tokens[0], self._sizes.batch
        for answers, what in ((1, "land"), (2, "land and join it")):
            found = decode_beside.decode_while_landing(
                bed, batch, tokens, answers, sizes.rooms, sizes.rounds
            )
            landed = f"{found.landed_bytes_s / 1e9:.2f} GB/s land"
            relative = f"{found.relative_speed:.1%}"
            self._row(
                "decode",
                f"batch {batch.requests} at {batch.context:,}, prompts of {tokens:,} {what}",
                f"{found.landing_tokens_s:,.1f} tokens/s, {landed}",
                f"nothing lands {found.quiet_tokens_s:,.1f} tokens/s",
                self._goal(found.relative_speed, 0.98, "%") if answers == 1 else relative,
                found=found.as_json(),
            )

    def _threshold(self, bed: HandoffBed) -> None:
        few, longest, page = self._sizes.few, self._sizes.tokens[-1], bed.page_tokens
        found: list[HandoffOrNot] = []
        lengths = [page * n for n in _THRESHOLD_FACTORS if page * n <= longest]
        for each in decode_beside.threshold(
            bed, few, lengths, self._sizes.prompts, self._sizes.rounds
        ):
            found.append(each)
            here, there = each.alone, each.handed_over
            self._row(
                *("threshold", f"{each.tokens:,} tokens beside {few.requests} that decode"),
                f"second token {ms(there.second_s)}, holds the batch up {ms(there.delay_s)}",
                f"prefilled there {ms(here.second_s)}, holds it up {ms(here.delay_s)}",
                f"saves {ms(each.saved_s)}",
                found=each.as_json(),
            )
        worth = decode_beside.shortest_worth(found)
        shown = "at no length" if worth is None else f"from {worth:,} tokens"
        self._report.note(
            f"{self._model.what}: handing over holds the batch up less than a prefill {shown}; "
            f"--handoff-min-tokens is {HANDOFF_MIN_TOKENS:,}"
        )
