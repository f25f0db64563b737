"""`kvtide plan --handoff`: its options, its tables and its JSON."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from kvtide.byte_sizes import format_bytes
from kvtide.cli.console import CommandError
from kvtide.planner.handoff_plan import (
    MIN_TOKENS,
    WINDOW_S,
    Demand,
    HandoffPlan,
    HandoffRates,
    Machines,
    TokenWait,
    plan_handoff,
)
from kvtide.planner.html_page import HtmlTable
from kvtide.planner.replay import Report
from kvtide.planner.study import Study
from kvtide.spec import ALL, Tier
from kvtide.spec.sizing import pages_for


class _Option(NamedTuple):
    """A number above 0, its default and where that comes from."""

    name: str
    metavar: str
    default: float
    help: str


OPTIONS = (
    _Option("decode-step-ms", "MS", 10.0, "a decode step of a machine: Qwen3-8B on an H200"),
    _Option("decode-batch", "N", 64, "requests in that step"),
    _Option("peer-gbps", "GB/S", 51.2, "pages landing from another machine: Qwen3-8B on an H200"),
    _Option("chunk-tokens", "N", 8192, "tokens of a prefill step"),
    _Option("min-tokens", "N", MIN_TOKENS, "prompts that lack fewer are not handed over"),
    _Option("busy", "FRACTION", 0.7, "of the time, the most that a machine works"),
)
"""Defaults that were measured are in docs/benchmarks.md: models on an H200, handoffs."""
_RATE = "requests-per-second"


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machines that prefill and machines that decode")
    group.add_argument("--handoff", action="store_true", help="how many of each the load needs")
    for option in OPTIONS:
        text = f"{option.help} ({option.default:g})"
        group.add_argument(f"--{option.name}", type=float, metavar=option.metavar, help=text)
    group.add_argument(f"--{_RATE}", type=float, metavar="R", help="(as in the trace)")


def read(
    args: argparse.Namespace, prefill_tokens_s: float, note: Callable[[str, str, object], None]
) -> HandoffRates | None:
    """The rates, checked; None without `--handoff`. `note` takes every setting."""
    names = [*(option.name for option in OPTIONS), _RATE]
    given = {name: getattr(args, name.replace("-", "_")) for name in names}
    if not args.handoff:
        if unused := [name for name, value in given.items() if value is not None]:
            raise CommandError(f"--{unused[0]} plans machines of two roles; add --handoff")
        return None
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise CommandError(f"--{name} {value:g}: use a number above 0")
    if given["busy"] is not None and given["busy"] > 1:
        raise CommandError(f"--busy {given['busy']:g}: use a fraction up to 1")
    chosen = {o.name: o.default if given[o.name] is None else given[o.name] for o in OPTIONS}
    for name, value in chosen.items():
        note(name.replace("-", " "), f"{value:g}", given[name])
    rate = given[_RATE]
    note("requests per second", "as in the trace" if rate is None else f"{rate:g}", rate)
    return HandoffRates(
        prefill_tokens_s,
        chosen["decode-step-ms"] / 1e3,
        max(1, int(chosen["decode-batch"])),
        chosen["peer-gbps"] * 1e9,
        max(1, int(chosen["chunk-tokens"])),
        int(chosen["min-tokens"]),
        chosen["busy"],
        rate,
    )


def compute(study: Study, report: Report, rates: HandoffRates | None) -> HandoffPlan | None:
    if rates is None:
        return None
    found = report.found_tokens
    return plan_handoff(study.memory, study.trace, found, rates, _device_tokens(study))


def _device_tokens(study: Study) -> int | None:
    """What a decode machine's device holds of running sequences; None if they live on the host."""
    memory = study.memory
    size = study.tier_bytes[Tier.DEVICE] - study.hot_bytes(Tier.DEVICE)
    pages = pages_for(memory.kept_in(Tier.DEVICE), size)
    histories = [a for a in memory.anchors if a.reuse.reach is ALL and a.home is Tier.DEVICE]
    if not histories:
        return None
    return min(pages[anchor.name] for anchor in histories) * memory.page_tokens


# -- output ---------------------------------------------------------------------------------


def tables(plan: HandoffPlan) -> list[HtmlTable]:
    return [_demand(plan), _machines(plan)]


def _demand(plan: HandoffPlan) -> HtmlTable:
    mean, peak = plan.mean, plan.peak
    shown: Mapping[str, Callable[[Demand], str]] = {
        "requests": lambda d: f"{d.requests:,.2f}",
        "prompt tokens prefilled and handed over": lambda d: f"{d.handed_tokens:,.0f}",
        "bytes handed over": lambda d: format_bytes(int(d.handed_bytes)),
        "output tokens": lambda d: f"{d.output_tokens:,.0f}",
        "seconds of prefill, prefill machines": lambda d: f"{d.prefill_s:,.2f}",
        "seconds of prefill, decode machines": lambda d: f"{d.local_s:,.2f}",
        "seconds of decode steps": lambda d: f"{d.decode_s:,.2f}",
    }
    rows = [[name, text(mean), text(peak)] for name, text in shown.items()]
    return HtmlTable("What the load asks for, each second", ("what", "mean", _busiest()), rows)


def _machines(plan: HandoffPlan) -> HtmlTable:
    mean, peak = plan.mean_machines, plan.peak_machines
    shown: Mapping[str, Callable[[Machines], int]] = {
        "prefill machines": lambda m: m.prefill,
        "decode machines": lambda m: m.decode,
        "of either, for the bytes between them alone": lambda m: m.by_link,
        "instead, machines that do both": lambda m: m.both_roles,
    }
    rows = [[name, f"{count(mean):,}", f"{count(peak):,}"] for name, count in shown.items()]
    return HtmlTable("Machines", ("what", "mean", _busiest()), rows)


def _busiest() -> str:
    return f"busiest {WINDOW_S:g} s"


def sentences(plan: HandoffPlan) -> list[str]:
    limited = ""
    if plan.batch < plan.rates.decode_batch:
        limited = f"; its device holds no more, and {plan.rates.decode_batch} were asked for"
    return [
        f"{plan.handed_requests:,} of {plan.requests:,} requests are handed over. A decode machine "
        f"runs {plan.batch:,} at once{limited}. On idle machines the first token comes after "
        f"{_wait(plan.first_token)}, the second after {_wait(plan.second_token)}."
    ]


def _wait(wait: TokenWait) -> str:
    return f"{wait.p50_s * 1e3:,.0f} ms (p50) and {wait.p99_s * 1e3:,.0f} ms (p99)"


def describe(plan: HandoffPlan) -> dict[str, Any]:
    return asdict(plan)
