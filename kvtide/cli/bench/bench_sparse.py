"""`kvtide bench sparse`: pools on the host with hot buffers, beside pages all on the device."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from kvtide.bench.gpu import plot, shapes
from kvtide.bench.gpu.engine_bed import Bed
from kvtide.bench.gpu.sparse import row_reads
from kvtide.bench.gpu.sparse import sparse_residency as sparse
from kvtide.bench.gpu.sparse.driven_choices import OWN, OverlapFraction
from kvtide.bench.gpu.sparse.hot_reads import HotReads
from kvtide.bench.gpu.sparse.sparse_residency import (
    OVERLAPS,
    PREFILL_OVERLAPS,
    DecodeLoad,
    SparseShape,
    StepResult,
)
from kvtide.byte_sizes import parse_bytes
from kvtide.cache import Layout
from kvtide.cli.bench.bench_report import BenchReport, against_goal, ms
from kvtide.cli.console import CommandError
from kvtide.server.ranks.rank_processes import freeze_gc

_HEADER = ("benchmark", "model", "case", "measured", "beside", "hot hits", "goal: value, reached")
_OF_MODEL = ("single", "decode", "sum", "prefill")
PARTS = ("rows", *_OF_MODEL, *(f"{name}-v4" for name in _OF_MODEL), "ttft")
_OVERLAP_GOAL = 0.95
"""Goals are set for choices that overlap so much."""
_USUAL_PROMPT = 16_384
"""Tokens of a prompt in `prefill`."""


@dataclass(frozen=True, slots=True)
class SparseSizes:
    """What is measured: on a GPU, or in tiny shapes to test the benchmark itself.

    spread  rows over much host memory: contexts, rows of each, bytes that hold all of them
    """

    v32: SparseShape
    v4: SparseShape
    first_token: SparseShape
    load: DecodeLoad
    row_bytes: tuple[int, ...] = (584, 656, 1152)
    rows: tuple[int, ...] = (512, 2048, 8192)
    max_selected: int = 2048
    row_context: int = 65_536
    host_block: int = 1 << 29
    spread: tuple[int, int, int] = (80, 102, 8 << 30)
    prefill_tokens: tuple[int, ...] = (_USUAL_PROMPT,)
    chunk_tokens: int = 8192
    rounds: int = 5
    new_tokens: tuple[int, ...] = (2, 64)
    dtype: torch.dtype = torch.bfloat16


def _full() -> SparseSizes:
    return SparseSizes(
        SparseShape(
            shapes.deepseek_v32(4, 32, vocab_size=8192),
            4096,
            "DeepSeek-V3.2, 4 layers, 32 experts, 8k vocabulary",
        ),
        SparseShape(
            shapes.deepseek_v4_flash(8, 32, vocab_size=16_384),
            1024,
            "DeepSeek-V4-Flash, 8 layers (3 with C4), 32 experts, 16k vocabulary",
        ),
        SparseShape(
            shapes.deepseek_v32(16, 16, vocab_size=8192),
            4096,
            "DeepSeek-V3.2, 16 layers, 16 experts, 8k vocabulary",
        ),
        DecodeLoad(),
    )


def _tiny() -> SparseSizes:
    v32, v4 = (
        SparseShape(shapes.tiny(shape), 16, f"tiny {shape.name}", None)
        for shape in (shapes.deepseek_v32(), shapes.deepseek_v4_flash())
    )
    load = DecodeLoad(context=512, resident=2, max_hot=3, host_bytes=1 << 30, steps=2)
    return SparseSizes(
        *(v32, v4, v32, load),
        row_bytes=(584,),
        rows=(64,),
        max_selected=32,
        row_context=1024,
        host_block=1 << 22,
        spread=(2, 16, 1 << 22),
        prefill_tokens=(256,),
        chunk_tokens=128,
        rounds=1,
        new_tokens=(3,),
        dtype=torch.float32,
    )


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", default=",".join(PARTS), metavar="NAME,…", help=f"some of {', '.join(PARTS)}"
    )
    parser.add_argument("--device", default="cuda", help="(cuda)")
    parser.add_argument(
        "--host-layout",
        choices=[layout.value for layout in Layout],
        default=Layout.PAGE_FIRST_DIRECT.value,
        help="of the host in decode (page_first_direct)",
    )
    parser.add_argument(
        "--host-span",
        metavar="SIZE",
        help="in single, decode and sum: rows of a layer come from so much host memory (where the "
        "pages are); answers mean nothing",
    )
    parser.add_argument(
        "--prompt-tokens",
        metavar="N,…",
        help="of prompts in prefill (16384); longer ones are measured in fewer rounds",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes, which a CPU runs: no speeds to compare"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write a bar chart of decode throughput (SVG)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    wanted = args.only.split(",")
    if unknown := set(wanted) - {*PARTS}:
        raise CommandError(f"bench sparse: {sorted(unknown)} is not known; use {', '.join(PARTS)}")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CommandError("bench sparse needs a CUDA device; `--device cpu --tiny` only tests it")
    if device.type != "cuda" and not args.tiny:
        raise CommandError("bench sparse: real shapes need a GPU; add --tiny")
    report = _Report(args.json, plot_file=args.plot)
    sizes = _tiny() if args.tiny else _full()
    layout, span = Layout(args.host_layout), args.host_span and _bytes(args.host_span)
    sizes = replace(sizes, load=replace(sizes.load, host_layout=layout, host_span=span))
    if args.prompt_tokens:
        sizes = replace(sizes, prefill_tokens=_numbers(args.prompt_tokens))
    bench = _Bench(sizes, device, report)
    if "rows" in wanted:
        with report.guarded("rows"):
            bench.rows()
    for shape, suffix in ((sizes.v32, ""), (sizes.v4, "-v4")):
        kinds = [kind for kind in _OF_MODEL if kind + suffix in wanted]
        if kinds:
            with report.guarded(f"{', '.join(kinds)} of {shape.name}"):
                bench.model(shape, kinds)
            _free(device)
    if "ttft" in wanted:
        with report.guarded("ttft"):
            bench.first_token(sizes.first_token)
    return report.end(_HEADER)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as flaw:
        raise CommandError(f"bench sparse: --host-span: {flaw}") from None


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise CommandError(f"bench sparse: --prompt-tokens is '{text}'; use 65536,131072")
    return tuple(int(part) for part in parts)


# -- what is found ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Report(BenchReport):
    """With a chart of decode throughput."""

    plot_file: Path | None = None
    bars: dict[str, dict[str, float]] = field(default_factory=dict)

    def write(self) -> None:
        BenchReport.write(self)
        if self.plot_file and self.bars:
            title = "Decode throughput at the same device memory"
            self.plot_file.write_text(plot.draw(title, list(self.bars.items()), "tokens/s"))


def _hits(found: StepResult | HotReads) -> str:
    return "–" if found.hit_rate is None else f"{found.hit_rate:.1%}"


def _read(reads: HotReads) -> str:
    """What was read from the host."""
    return f"{(reads.missing_bytes + reads.gathered_bytes) / 1e6:,.0f} MB"


def _shown(overlap: OverlapFraction) -> str:
    return f"overlap {overlap:.0%}" if isinstance(overlap, float) else "own choices"


def _free(device: torch.device) -> None:
    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _Steps:
    """All-resident steps by batch, with driven choices and with the model's own."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, bool], StepResult] = {}

    def add(self, step: StepResult) -> None:
        self._found[step.batch, step.overlap == OWN] = step

    def like(self, step: StepResult, batch: int) -> StepResult | None:
        """With the same kind of choices; None if it failed."""
        return self._found.get((batch, step.overlap == OWN))


# -- what is measured ---------------------------------------------------------------------------


class _Bench:
    def __init__(self, sizes: SparseSizes, device: torch.device, report: _Report) -> None:
        self._sizes, self._device, self._report = sizes, device, report

    def rows(self) -> None:
        sizes = self._sizes
        with row_reads.host_block(sizes.host_block, self._device) as host:
            host.random_(0, 255)
            for row_bytes in sizes.row_bytes:
                for rows in sizes.rows:
                    with self._report.guarded(f"{rows:,} rows of {row_bytes:,} B"):
                        self._rows(row_bytes, rows, host, sizes.max_selected, sizes.row_context)
        contexts, each, wide = sizes.spread
        row_bytes = sizes.row_bytes[len(sizes.row_bytes) // 2]
        with (
            self._report.guarded(f"{each} rows of each of {contexts} contexts"),
            row_reads.host_block(wide, self._device) as host,
        ):
            self._rows(row_bytes, contexts * each, host, each, sizes.load.context)

    def _rows(
        self, row_bytes: int, rows: int, host: torch.Tensor, max_selected: int, context: int
    ) -> None:
        given = (row_bytes, rows, self._device, host)
        found = row_reads.measure(*given, max_selected=max_selected, context=context)
        goal = "–"
        if found.of_limit is not None:
            reached = against_goal(found.of_limit, row_reads.GOAL, "%")
            goal = f"of {found.limit_gb_s:g} GB/s {reached}"
        whole = row_bytes * rows / found.swap_s / 1e9
        beside = (
            f"memcpy {found.memcpy_bytes_s / 1e9:.1f} GB/s; swap-in with plan {whole:.1f} GB/s, "
            f"{found.swap_s * 1e6:.0f} µs; without misses {found.floor_s * 1e6:.0f} µs"
        )
        contexts = max(1, rows // max_selected)
        case = f"{rows:,} rows of {row_bytes:,} B, {contexts} contexts of {context:,}"
        measured = f"{found.copy_gb_s:.1f} GB/s, {found.copy_s * 1e6:.0f} µs"
        row = ("rows", "–", case, measured, beside, "0.0%", goal)
        self._report.row(row, found.as_json())

    def model(self, shape: SparseShape, kinds: Sequence[str]) -> None:
        note, device, dtype = self._report.note, self._device, self._sizes.dtype
        resident = shape.bed(device, dtype, hot=False)
        hot = shape.bed(device, dtype, hot=True)
        freeze_gc()  # As a server does.
        note(f"{shape.what}: built")
        if "prefill" in kinds:
            for tokens in self._sizes.prefill_tokens:
                with self._report.guarded(f"prefill of {tokens:,} tokens, {shape.name}"):
                    self._prefill(shape, hot, resident, tokens)
        if {*kinds} - {"prefill"}:
            self._decode(shape, hot, resident, kinds)

    def _prefill(self, shape: SparseShape, hot: Bed, resident: Bed, tokens: int) -> None:
        sizes = self._sizes
        rounds = max(1, min(sizes.rounds, sizes.rounds * _USUAL_PROMPT // tokens))
        given = hot, resident, tokens, rounds, PREFILL_OVERLAPS, sizes.chunk_tokens
        for found in sparse.prefill(*given):
            case = f"{found.tokens:,} tokens, staged to the host, {_shown(found.overlap)}"
            row = (
                *("prefill", shape.what, case),
                f"{ms(found.hot_s)}, {_read(found.reads)} gathered",
                *(f"all on the device {ms(found.all_s)}", _hits(found.reads)),
                against_goal(found.relative_speed, 0.98, "%"),
            )
            self._report.row(row, found.as_json() | {"model": shape.name})

    def _decode(self, shape: SparseShape, hot: Bed, resident: Bed, kinds: Sequence[str]) -> None:
        load, report = self._sizes.load, self._report
        memories = resident.model.memory, hot.model.memory
        contexts = load.contexts(*memories)
        report.note(
            f"{shape.what}: {load.resident} contexts of {load.context:,} tokens take "
            f"{load.device_bytes(memories[0], load.resident) / 1e9:.2f} GB of the device, and "
            f"{contexts} with hot:{shape.hot} {load.device_bytes(memories[1], contexts) / 1e9:.2f}"
        )
        if kinds == ["single"]:
            contexts = 1
        batches = {"single": 1, "decode": load.resident, "sum": contexts}
        steps = self._resident(resident, sorted({batches[k] for k in kinds if k in batches}))
        _free(self._device)
        found = self._hot(shape, hot, contexts, kinds, steps)
        _free(self._device)
        if "sum" in kinds:
            self._sums(shape, hot, found, steps)

    def _resident(self, bed: Bed, batches: Sequence[int]) -> _Steps:
        """Steps with all pages on the device."""
        report, steps = self._report, _Steps()
        with (
            report.guarded("all on the device"),
            sparse.decode_bed(bed, self._sizes.load, max(batches)) as decoding,
        ):
            report.note(f"{max(batches)} contexts are cached")
            for batch in batches:
                with report.guarded(f"all on the device, batch {batch}"):
                    for found in decoding.measure(batch, (_OVERLAP_GOAL, OWN)):
                        steps.add(found)
                        report.note(f"{_shown(found.overlap)}: {ms(found.seconds)}")
        return steps

    def _hot(
        self, shape: SparseShape, bed: Bed, contexts: int, kinds: Sequence[str], beside: _Steps
    ) -> list[StepResult]:
        """Rows of `single` and `decode`, and the steps of all contexts."""
        report, load, steps = self._report, self._sizes.load, list[StepResult]()
        with (
            report.guarded(f"hot:{shape.hot}"),
            sparse.decode_bed(bed, load, contexts) as decoding,
        ):
            report.note(f"{contexts} contexts are cached, on the host; {decoding.host}")
            if "single" in kinds:
                with report.guarded(f"hot:{shape.hot}, batch 1"):
                    for found in decoding.measure(1, OVERLAPS):
                        self._single(shape, found, beside.like(found, 1))
            if {"decode", "sum"} & {*kinds}:
                with report.guarded(f"hot:{shape.hot}, batch {contexts}"):
                    for found in decoding.measure(contexts, OVERLAPS):
                        steps.append(found)
                        if "decode" in kinds:
                            self._throughput(shape, found, beside.like(found, load.resident))
        return steps

    def _single(self, shape: SparseShape, found: StepResult, beside: StepResult | None) -> None:
        ratio = None if beside is None else beside.seconds / found.seconds
        case = f"1 request of {self._sizes.load.context:,} tokens, {_shown(found.overlap)}"
        row = (
            *("single", shape.what, case, ms(found.seconds)),
            "–" if beside is None else f"all on the device {ms(beside.seconds)}",
            *(_hits(found), "–" if ratio is None else against_goal(ratio, 0.9, "%")),
        )
        self._report.row(row, found.as_json() | {"model": shape.name, "relative_speed": ratio})

    def _throughput(self, shape: SparseShape, found: StepResult, beside: StepResult | None) -> None:
        report, context = self._report, self._sizes.load.context
        ratio = None if beside is None else found.tokens_s / beside.tokens_s
        bars = report.bars.setdefault(f"{shape.what}, contexts of {context:,} tokens", {})
        goal = "–" if ratio is None else f"{ratio:.2f} ×"
        if beside is not None:
            bars[f"all, {beside.batch} at once"] = beside.tokens_s
            if found.overlap == _OVERLAP_GOAL and ratio is not None:
                goal = against_goal(ratio, 3.0)
        bars[f"hot, {_shown(found.overlap)}"] = found.tokens_s
        case = f"{found.batch} requests of {context:,} tokens, {_shown(found.overlap)}"
        row = (
            *("decode", shape.what, case),
            f"{found.tokens_s:,.0f} tokens/s, {ms(found.seconds)}",
            "–"
            if beside is None
            else f"all, {beside.batch} requests: {beside.tokens_s:,.0f} tokens/s, "
            f"{ms(beside.seconds)}",
            *(_hits(found), goal),
        )
        report.row(row, found.as_json() | {"model": shape.name, "ratio": ratio})

    def _sums(
        self, shape: SparseShape, hot: Bed, steps: Sequence[StepResult], beside: _Steps
    ) -> None:
        """Each step beside that of resident pages, and beside reading what was missing."""
        (pool,) = hot.model.memory.hot_pools
        with row_reads.host_block(self._sizes.host_block, self._device) as host:
            for found in steps:
                with self._report.guarded(f"sum, {_shown(found.overlap)}"):
                    resident = beside.like(found, found.batch)
                    self._sum(shape, found, resident, pool.entry.bytes, host)

    def _sum(
        self,
        shape: SparseShape,
        found: StepResult,
        beside: StepResult | None,
        row_bytes: int,
        host: torch.Tensor,
    ) -> None:
        assert beside is not None, "the all-resident step of this batch was not measured"
        rows = max(1, round(found.layer_misses))
        bytes_s = row_reads.read_bytes_s(
            *(row_bytes, rows, self._device, host),
            max_selected=self._sizes.max_selected,
            context=self._sizes.row_context,
        )
        both = sparse.SumResult(found, beside.seconds, bytes_s)
        served = both.served_bytes_s
        row = (
            *("sum", shape.what, f"{found.batch} requests, {_shown(found.overlap)}"),
            ms(found.seconds) + ("" if served is None else f", rows at {served / 1e9:.1f} GB/s"),
            f"all on the device {ms(beside.seconds)}, {found.missing_bytes / 1e6:.1f} MB at "
            f"{bytes_s / 1e9:.1f} GB/s {ms(both.read_s)}",
            _hits(found),
            f"of the larger {against_goal(both.of_larger, 1.15, at_most=True)}; "
            f"of the sum {both.of_sum:.2f}",
        )
        self._report.row(row, both.as_json() | {"model": shape.name})

    def first_token(self, shape: SparseShape) -> None:
        resident: dict[tuple[int, OverlapFraction], sparse.FirstTokenResult] = {}
        for is_hot in (False, True):
            with self._report.guarded(f"first token, {'hot' if is_hot else 'all'}"):
                for one in self._first_tokens(shape, is_hot):
                    beside = resident.setdefault((one.new_tokens, one.overlap), one)
                    self._first_token(shape, one, beside)
            _free(self._device)

    def _first_tokens(self, shape: SparseShape, is_hot: bool) -> Iterator[sparse.FirstTokenResult]:
        sizes = self._sizes
        bed = shape.bed(self._device, sizes.dtype, hot=is_hot)
        freeze_gc()
        self._report.note(f"{shape.what}: built")
        for new_tokens in sizes.new_tokens:
            given = bed, sizes.load.context, new_tokens, sizes.rounds, PREFILL_OVERLAPS
            yield from sparse.first_token(*given)

    def _first_token(
        self,
        shape: SparseShape,
        found: sparse.FirstTokenResult,
        beside: sparse.FirstTokenResult,
    ) -> None:
        goal = "–"
        if beside.residency != found.residency:
            goal = against_goal(beside.seconds / found.seconds, 3.0)
        case = (
            f"{found.new_tokens} tokens after {found.context:,} on the host, {found.residency}, "
            f"{_shown(found.overlap)}"
        )
        loaded = (
            f"{found.loaded_bytes / 1e6:,.0f} MB loaded, {_read(found.reads)} swapped in; "
            f"without loads {ms(found.device_s)}"
        )
        row = ("ttft", shape.what, case, ms(found.seconds), loaded, _hits(found.reads), goal)
        self._report.row(row, found.as_json() | {"model": shape.name})
