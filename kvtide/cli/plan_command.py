"""`kvtide plan`: replay traffic against tiers, and report hits, moves and time saved.

Arguments and the whole trace are checked before the first replay; files are written last. A
refusal writes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

from kvtide.byte_sizes import format_bytes
from kvtide.cli import handoff_report, model_argument, plan_report
from kvtide.cli.console import CommandError, parse_size, progress, table
from kvtide.cli.model_argument import active_params, model_memory, residency
from kvtide.cli.plan_report import PlanReport
from kvtide.index import DEFAULT_POLICY, POLICIES
from kvtide.models.model_errors import CheckpointError
from kvtide.planner import charts, study, traces, workloads
from kvtide.planner.charts import ChartError
from kvtide.planner.hit_curve import hit_curve
from kvtide.planner.html_page import HtmlTable
from kvtide.planner.replay import Rates
from kvtide.planner.storage_admission import WRITE_POLICIES, WRITE_THROUGH, WritePolicy
from kvtide.planner.study import (
    BRANCH,
    COST,
    LAST,
    Checkpoints,
    Study,
    has_checkpoints,
    sweep_sizes,
)
from kvtide.planner.traces import Trace, TraceError, TraceRequest
from kvtide.spec import ModelMemory, SpecError, Tier
from kvtide.spec.families import KVDType
from kvtide.spec.sizing import bytes_for

_MODEL = "deepseek-v4-flash"
_WORKLOAD = "chat:users=600,turns=8,question=400,answer=500,users_per_minute=30,think_s=60"
_SIZES = {Tier.DEVICE: "2GB", Tier.HOST: "8GB", Tier.STORAGE: "64GB"}
_OUT = "kvtide-plan"
_POINTS = 8
_EFFECTIVE_FLOPS = 400e12
_SMALL_TRACE_TOKENS = 50_000_000
"""Up to this length placements and write policies are compared by default: it takes seconds."""

_EPILOG = """\
sizes are written 80GB, 512GiB or 4096; a tier of 0 is left out.
workloads: chat, agent, rag, with options as in chat:users=64,turns=5
traces: one JSON object a line, either Mooncake's (timestamp, input_length, output_length,
hash_ids) or token ids (tokens or prompt_token_ids)"""


REFUSALS = (ChartError, CheckpointError, CommandError, SpecError, TraceError)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Replay traffic through the index the cache uses, and report what every tier finds, what "
        "moves, what it saves, and how the hit rate depends on capacity."
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_traffic(parser)
    _add_tiers(parser)
    _add_assumptions(parser)
    handoff_report.add(parser)
    parser.add_argument("--sweep", metavar="TIER", help="vary device, host or storage")
    parser.add_argument("--points", type=int, metavar="N", help=f"sizes to try ({_POINTS})")
    parser.add_argument(
        "--placements", action="store_true", help="compare checkpoint placements on long traces too"
    )
    parser.add_argument(
        "--write-policies", action="store_true", help="compare write policies on long traces too"
    )
    parser.add_argument("--out", metavar="DIR", help=f"folder for plots and pages (./{_OUT})")
    parser.add_argument(
        "--json", action="store_true", help="print JSON; files only if --out is given"
    )
    parser.set_defaults(run=run)


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help=f"{model_argument.HELP} ({_MODEL})")
    traffic = parser.add_mutually_exclusive_group()
    traffic.add_argument("--trace", metavar="FILE", help="a trace file")
    traffic.add_argument("--workload", metavar="W", help=f"a synthetic workload ({_WORKLOAD})")
    parser.add_argument("--page-tokens", type=int, metavar="N", help="tokens per page")
    parser.add_argument("--kv-dtype", help=f"one of {', '.join(kind.value for kind in KVDType)}")


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    for tier, size in _SIZES.items():
        parser.add_argument(
            f"--{tier.name.lower()}", metavar="SIZE", help=f"cache memory there ({size})"
        )
    parser.add_argument("--resident", metavar="R", help=f"{model_argument.RESIDENT_HELP} (all)")
    parser.add_argument(
        "--running", type=int, metavar="N", help="requests with hot buffers, with hot:B (1)"
    )
    parser.add_argument(
        "--eviction", metavar="NAME", help=f"{', '.join(POLICIES)} ({DEFAULT_POLICY})"
    )
    parser.add_argument(
        "--checkpoints", metavar="P", help=f"last, branch, cost or every:TOKENS ({COST.name})"
    )
    parser.add_argument(
        "--write-policy",
        metavar="NAME",
        help=f"{', '.join(WRITE_POLICIES)} ({WRITE_THROUGH.name})",
    )


def _add_assumptions(parser: argparse.ArgumentParser) -> None:
    rates = Rates(1.0)
    for option, default in (
        ("link", rates.link_bytes_s),
        ("storage-read", rates.storage_read_bytes_s),
        ("storage-write", rates.storage_write_bytes_s),
    ):
        parser.add_argument(
            f"--{option}-gbps", type=float, metavar="GB/S", help=f"({default / 1e9:g})"
        )
    parser.add_argument(
        "--prefill-rate",
        type=float,
        metavar="TOKENS/S",
        help=f"(2 FLOPs per active parameter at {_EFFECTIVE_FLOPS / 1e12:g} TFLOP/s)",
    )


def run(args: argparse.Namespace) -> int:
    out = None if args.json and args.out is None else _writable(Path(args.out or _OUT))
    plan = _compute(_Inputs(args), args)
    files = _rendered(plan, out) if out is not None else {}
    if args.json:
        described = plan_report.describe(plan) | {"files": [str(path) for path in files]}
        text = json.dumps(described, indent=2)
    else:
        text = _report(plan, list(files))
    if out is not None:
        _make(out)
        charts.write(files)
    print(text)
    return 0


# -- arguments ------------------------------------------------------------------------------


class _Inputs:
    """The arguments, checked, with every default filled in and named in `settings`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.settings: dict[str, str] = {}
        self._args = args
        model = self._value("model", _MODEL)
        declared = model_memory(model, args.page_tokens, args.kv_dtype)
        self.memory = residency(self._value("resident", "all")).of(declared)
        self.running = self._running()
        self._note("page tokens", f"{self.memory.page_tokens:,}", args.page_tokens)
        self._note("KV dtype", args.kv_dtype or "the model's own", args.kv_dtype)
        self.tier_bytes = {tier: self._size(tier) for tier in Tier}
        self._check_tiers()
        self.eviction = self._eviction()
        checkpoints = self._value("checkpoints", COST.name)
        self.checkpoints = parse_checkpoints(checkpoints, self.memory.page_tokens)
        self.write_policy = self._write_policy()
        self.rates = self._rates(model)
        self.handoff = handoff_report.read(args, self.rates.prefill_tokens_s, self._note)
        self.swept, self.points = self._sweep()
        self._check_placements()
        self.trace = self._trace()
        self._check_hot_buffers()

    def study(self) -> Study:
        return Study(
            self.memory,
            self.trace,
            self.tier_bytes,
            self.eviction,
            self.checkpoints,
            self.running,
            self.write_policy,
        )

    def _value(self, name: str, default: str) -> str:
        given: str | None = getattr(self._args, name)
        self._note(name.replace("_", " "), default if given is None else given, given)
        return default if given is None else given

    def _note(self, name: str, value: str, given: object) -> None:
        self.settings[name] = value if given is not None else f"{value} (default)"

    def _running(self) -> int:
        given = self._args.running
        if not self.memory.hot_pools:
            if given is not None:
                raise CommandError(
                    "--running says how many requests have hot buffers; use it with --resident "
                    "hot:4096"
                )
            return 1
        if given is not None and given < 1:
            raise CommandError(f"--running {given}: use at least 1")
        self._note("running requests", f"{given or 1:,}", given)
        return given or 1

    def _size(self, tier: Tier) -> int:
        name = tier.name.lower()
        size = parse_size(self._value(name, _SIZES[tier]))
        if size:
            _fits_a_page(self.memory.kept_in(tier), name, size)
        return size

    def _check_tiers(self) -> None:
        if not self.tier_bytes[Tier.DEVICE]:
            raise CommandError("--device 0: prompts are computed there; give it a size")
        if self.tier_bytes[Tier.STORAGE] and not self.tier_bytes[Tier.HOST]:
            raise CommandError(
                "--host 0: pages reach storage through the host; give it a size, or --storage 0"
            )
        if self.memory.hot_pools and not self.tier_bytes[Tier.HOST]:
            raise CommandError(
                f"--host 0: --resident {self._args.resident} keeps pages of running requests "
                "there; give it a size, or use --resident all"
            )

    def _check_hot_buffers(self) -> None:
        """Refuse a device that is full before it has a page; name what its hot buffers take."""
        if not self.memory.hot_pools:
            return
        study = self.study()
        taken, size = study.hot_bytes(Tier.DEVICE), self.tier_bytes[Tier.DEVICE]
        requests = "request" if self.running == 1 else "requests"
        self.settings["hot buffers"] = (
            f"{format_bytes(taken)} of the device, for {self.running:,} running {requests} and "
            f"prompts of up to {self.trace.longest_tokens:,} tokens"
        )
        min_bytes = study.min_bytes(Tier.DEVICE)
        if size < min_bytes:
            raise CommandError(
                f"--device {format_bytes(size)}: hot buffers take {self.settings['hot buffers']}; "
                f"use at least {format_bytes(min_bytes)}, or fewer hot entries"
            )

    def _eviction(self) -> str:
        name = self._value("eviction", DEFAULT_POLICY)
        if name not in POLICIES:
            raise CommandError(f"--eviction {name}: no such policy; use {', '.join(POLICIES)}")
        return name

    def _write_policy(self) -> WritePolicy:
        name = self._value("write_policy", WRITE_THROUGH.name)
        if name not in WRITE_POLICIES:
            raise CommandError(
                f"--write-policy {name}: no such policy; use {', '.join(WRITE_POLICIES)}"
            )
        policy = WRITE_POLICIES[name]
        if policy.requested_again and not self.tier_bytes[Tier.STORAGE]:
            raise CommandError(
                f"--write-policy {name}: it differs from {WRITE_THROUGH.name} in what storage "
                "gets; give --storage a size"
            )
        if policy is not WRITE_THROUGH and not self.tier_bytes[Tier.HOST]:
            raise CommandError(f"--write-policy {name}: it writes to the host; give --host a size")
        if self._args.write_policies and not self.tier_bytes[Tier.STORAGE]:
            raise CommandError(
                "--write-policies: compares what is written to storage; give --storage a size"
            )
        return policy

    def _rates(self, model: str) -> Rates:
        default = Rates(1.0)
        return Rates(
            self._prefill_tokens_s(model),
            1e9 * self._gbps("link_gbps", default.link_bytes_s),
            1e9 * self._gbps("storage_read_gbps", default.storage_read_bytes_s),
            1e9 * self._gbps("storage_write_gbps", default.storage_write_bytes_s),
        )

    def _prefill_tokens_s(self, model: str) -> float:
        given = self._args.prefill_rate
        if given is not None:
            rate = _positive("--prefill-rate", given)
            self._note("prefill rate", f"{rate:,.0f} tokens/s", given)
            return rate
        active = active_params(model)
        if active is None:
            raise CommandError(
                f"{model}: its active parameters are not known, so neither is how fast it "
                "prefills; give --prefill-rate in tokens per second"
            )
        rate = _EFFECTIVE_FLOPS / (2 * active)
        how = f"{active / 1e9:g}G active parameters at {_EFFECTIVE_FLOPS / 1e12:g} TFLOP/s"
        self._note("prefill rate", f"{rate:,.0f} tokens/s: {how}", None)
        return rate

    def _gbps(self, name: str, default_bytes_s: float) -> float:
        given = getattr(self._args, name)
        option = name.replace("_", "-")
        value = default_bytes_s / 1e9 if given is None else _positive(f"--{option}", given)
        self._note(option.removesuffix("-gbps").replace("-", " "), f"{value:g} GB/s", given)
        return value

    def _sweep(self) -> tuple[Tier | None, int]:
        name, points = self._args.sweep, self._args.points
        if name is None:
            if points is not None:
                raise CommandError("--points says how many sizes a --sweep tries; name its tier")
            return None, 0
        tiers = {tier.name.lower(): tier for tier in Tier}
        if name not in tiers:
            raise CommandError(f"--sweep {name}: no such tier; use {', '.join(tiers)}")
        if points is not None and not 2 <= points <= 64:
            raise CommandError(f"--points {points}: use 2 to 64")
        if tiers[name] is Tier.STORAGE and not self.tier_bytes[Tier.HOST]:
            raise CommandError("--sweep storage: pages reach it through the host; give --host")
        self.settings["sweep"] = name
        self._note("points", f"{points or _POINTS}", points)
        return tiers[name], points or _POINTS

    def _check_placements(self) -> None:
        if self._args.placements and not has_checkpoints(self.memory):
            raise CommandError(
                f"--placements: every pool of {self.memory.model} keeps the whole history, so it "
                "resumes anywhere; leave the option out"
            )

    def _trace(self) -> Trace:
        if self._args.trace is not None:
            self.settings["trace"] = self._args.trace
            return traces.load(self._args.trace)
        return workloads.parse(self._value("workload", _WORKLOAD))


def parse_checkpoints(text: str, page_tokens: int) -> Checkpoints:
    """'last', 'branch', 'cost' or 'every:8192'."""
    for way in (LAST, BRANCH, COST):
        if text == way.name:
            return way
    word, _, tokens = text.partition(":")
    if word != "every" or not tokens.isdecimal():
        raise CommandError(f"--checkpoints {text}: use last, branch, cost or every:TOKENS")
    pages, rest = divmod(int(tokens), page_tokens)
    if rest or not pages:
        raise CommandError(
            f"--checkpoints {text}: checkpoints stand at page ends; "
            f"use a multiple of {page_tokens} tokens"
        )
    return study.every(pages, page_tokens)


def _fits_a_page(memory: ModelMemory, name: str, size: int) -> None:
    page_bytes = bytes_for(memory, 1)
    if size < page_bytes:
        raise CommandError(
            f"--{name} {format_bytes(size)}: does not hold a page of every pool of "
            f"{memory.model}; use at least {format_bytes(page_bytes)}, or 0 to leave the tier out"
        )


def _positive(option: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise CommandError(f"{option} {value:g}: use a number above 0")
    return value


def _writable(out: Path) -> Path:
    """Refuse an output folder before the replay takes minutes."""
    charts.check_png()
    nearest = next((p for p in (out, *out.absolute().parents) if p.exists()), Path("/"))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise CommandError(f"--out {out}: cannot write to {nearest}; name a folder you can write")
    return out


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise CommandError(
            f"--out {out}: {failure.strerror}; name a folder you can write"
        ) from None


# -- computation ----------------------------------------------------------------------------


def _walk(trace: Trace, label: str) -> Iterable[TraceRequest]:
    return progress(trace, len(trace), label)


def _compute(inputs: _Inputs, args: argparse.Namespace) -> PlanReport:
    base = inputs.study()
    curve = hit_curve(_walk(base.trace, "stack distances"), base.memory.page_tokens)
    report = study.run(base, _walk)
    small = base.trace.prompt_tokens <= _SMALL_TRACE_TOKENS
    placements = []
    if has_checkpoints(base.memory) and (args.placements or small):
        placements = study.placements(base, report, _walk)
    writing = []
    if base.tier_bytes[Tier.STORAGE] and (args.write_policies or small):
        writing = study.writing(base, report, _walk)
    points = []
    if inputs.swept is not None:
        given = getattr(args, inputs.swept.name.lower()) is not None
        size = base.tier_bytes[inputs.swept] if given else 0
        around = size or bytes_for(base.memory, max(1, curve.footprint_pages))
        sizes = sweep_sizes(base.min_bytes(inputs.swept), around, inputs.points)
        points = study.sweep(base, inputs.swept, sizes, _walk)
    return PlanReport(
        base,
        base.setup(),
        inputs.rates,
        inputs.settings,
        report,
        curve,
        placements,
        writing,
        inputs.swept,
        points,
        handoff_report.compute(base, report, inputs.handoff),
    )


# -- output ---------------------------------------------------------------------------------


def _report(plan: PlanReport, files: list[Path]) -> str:
    trace = plan.study.trace
    served = f", resident {plan.settings['resident']}" if plan.memory.hot_pools else ""
    parts = [
        f"{plan.memory.model}{served}: {trace.requests:,} requests with {trace.prompt_tokens:,} "
        f"prompt tokens from {trace.name}",
        table(("setting", "value"), list(plan.settings.items())),
        *(_section(found) for found in plan_report.tables(plan)),
        "\n".join(plan_report.sentences(plan)),
    ]
    if files:
        parts.append("Written: " + ", ".join(map(str, files)))
    return "\n\n".join(parts)


def _section(found: HtmlTable) -> str:
    return f"{found.title}\n\n{table(found.header, found.rows)}"


def _rendered(plan: PlanReport, out: Path) -> dict[Path, bytes]:
    """The bytes of every file: all are rendered before the first is written."""
    charts_by_name = {"plan": plan_report.capacity_chart(plan)}
    if plan.swept is not None:
        charts_by_name[f"sweep-{plan.swept.name.lower()}"] = plan_report.sweep_chart(plan)
    files: dict[Path, bytes] = {}
    for name, curve in charts_by_name.items():
        tables = plan_report.tables(plan) if name == "plan" else []
        files[out / f"{name}.png"] = charts.png(curve)
        files[out / f"{name}.html"] = charts.html(curve, plan.settings, tables)
    return files
