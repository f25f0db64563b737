"""The output of `kvtide plan`: tables for terminal and page, curves for the charts, JSON.

All functions read a finished `PlanReport`, which `plan_command` computes and writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtide.byte_sizes import format_bytes
from kvtide.cli import handoff_report
from kvtide.planner.chart_data import Curve, Mark, Series
from kvtide.planner.handoff_plan import HandoffPlan
from kvtide.planner.hit_curve import HitCurve
from kvtide.planner.html_page import HtmlTable
from kvtide.planner.replay import LINKS, Rates, Report, Setup
from kvtide.planner.study import (
    PlacementCost,
    Study,
    SweepPoint,
    WriteCost,
    has_checkpoints,
    thriftiest,
)
from kvtide.spec import ModelMemory, Tier
from kvtide.spec.sizing import bytes_for

_CURVE_POINTS = 25
_SHOWN_MISSES = 6


@dataclass(frozen=True, slots=True, eq=False)
class PlanReport:
    """Inputs and results of a plan. `settings` holds every input as text, defaults marked."""

    study: Study
    setup: Setup
    rates: Rates
    settings: Mapping[str, str]
    report: Report
    curve: HitCurve
    placements: Sequence[PlacementCost] = ()
    writing: Sequence[WriteCost] = ()
    swept: Tier | None = None
    sweep: Sequence[SweepPoint] = ()
    handoff: HandoffPlan | None = None

    @property
    def memory(self) -> ModelMemory:
        return self.study.memory

    def curve_bytes(self, pages: int) -> int:
        """Bytes of a tier whose history is so many pages long, its checkpoints included."""
        return bytes_for(self.memory, pages) if pages else 0


# -- tables ---------------------------------------------------------------------------------


def tables(plan: PlanReport) -> list[HtmlTable]:
    found = [_sources(plan), _time(plan), _links(plan), _pages(plan), _capacity(plan)]
    if plan.report.misses:
        found.append(_misses(plan))
    if plan.placements:
        found.append(_placements(plan))
    if plan.writing:
        found.append(_writing(plan))
    if plan.swept is not None:
        found.append(_sweep(plan, plan.swept))
    if plan.handoff is not None:
        found += handoff_report.tables(plan.handoff)
    return found


def _sources(plan: PlanReport) -> HtmlTable:
    report = plan.report
    rows = [
        [
            _name(tier),
            format_bytes(plan.study.tier_bytes[tier]),
            f"{tokens:,}",
            _percent(report.tier_hit_rate(tier)),
        ]
        for tier, tokens in report.hit_tokens.items()
    ]
    computed = report.prompt_tokens - report.saved_tokens
    rows += [
        ["found in all", "–", f"{report.saved_tokens:,}", _percent(report.hit_rate)],
        ["computed", "–", f"{computed:,}", _percent(1 - report.hit_rate)],
    ]
    return HtmlTable(
        "Where prompt tokens come from",
        ("from", "capacity", "tokens", "of all prompt tokens"),
        rows,
    )


def _time(plan: PlanReport) -> HtmlTable:
    report, rates = plan.report, plan.rates
    rows = [
        [
            "prefill not computed again",
            f"{report.saved_tokens:,}",
            _s(report.prefill_saved_s(rates)),
        ],
        ["waiting for loads and fetches", "–", _s(-report.waited_s(rates))],
        ["saved", "–", _s(report.saved_s(rates))],
    ]
    return HtmlTable("Time saved", ("what", "tokens", "seconds"), rows)


def _links(plan: PlanReport) -> HtmlTable:
    report, rates = plan.report, plan.rates
    rows = [
        [
            link,
            f"{_name(LINKS[link][0])} → {_name(LINKS[link][1])}",
            format_bytes(moved),
            f"{format_bytes(rates.bytes_s(link))}/s",
            _s(report.link_s(link, rates)),
            f"{report.skipped_copies.get(link, 0):,}",
        ]
        for link, moved in report.moved_bytes.items()
    ]
    header = ("link", "direction", "moved", "at", "seconds busy", "copies skipped")
    return HtmlTable("What moves", header, rows)


def _pages(plan: PlanReport) -> HtmlTable:
    report = plan.report
    rows = [
        [
            _name(tier),
            anchor,
            f"{plan.setup.capacity_pages[tier].get(anchor, 0):,}",
            f"{pages:,}",
            f"{report.evicted_pages[tier, anchor]:,}",
        ]
        for (tier, anchor), pages in report.resident_pages.items()
    ]
    return HtmlTable("Pages", ("tier", "pool", "slots", "resident at the end", "evicted"), rows)


def _capacity(plan: PlanReport) -> HtmlTable:
    rows = [
        [text, format_bytes(plan.curve_bytes(pages)), _percent(plan.curve.hit_rate(pages))]
        for text, pages in _landmarks(plan.curve)
    ]
    return HtmlTable("One LRU tier of any size", ("landmark", "capacity", "hit rate"), rows)


def _landmarks(curve: HitCurve) -> list[tuple[str, int]]:
    return [
        ("the longest prompt", curve.longest_pages),
        ("half of what is possible", curve.pages_for_fraction(0.5)),
        ("90% of what is possible", curve.pages_for_fraction(0.9)),
        ("knee", curve.knee_pages()),
        ("all that is possible", curve.pages_for_fraction(1.0)),
        ("everything ever seen", curve.footprint_pages),
    ]


def _misses(plan: PlanReport) -> HtmlTable:
    rows = [
        [miss.pool, miss.reason, f"{miss.requests:,}", f"{miss.tokens:,}"]
        for miss in plan.report.misses[:_SHOWN_MISSES]
    ]
    return HtmlTable("Why no more was found", ("pool", "reason", "requests", "tokens"), rows)


def _placements(plan: PlanReport) -> HtmlTable:
    rows = [
        [
            cost.name,
            _percent(cost.report.hit_rate),
            _kept(cost),
            format_bytes(cost.report.moved_bytes.get("backup", 0)),
        ]
        for cost in plan.placements
    ]
    header = ("checkpoints at", "hit rate", "kept per request", "backed up")
    return HtmlTable("What checkpoint placement costs", header, rows)


def _kept(cost: PlacementCost) -> str:
    kept = cost.checkpoints_per_request
    return "–" if kept is None else f"{kept:.2f}"


def _writing(plan: PlanReport) -> HtmlTable:
    rows = [
        [
            cost.policy.name,
            "yes" if cost.policy.served else "no",
            _percent(cost.report.hit_rate),
            _percent(cost.report.tier_hit_rate(Tier.STORAGE)),
            format_bytes(cost.stored_bytes),
            _percent(cost.saved),
        ]
        for cost in plan.writing
    ]
    header = ("write policy", "served", "hit rate", "from storage", "written to storage", "saved")
    return HtmlTable("What write policies write to storage", header, rows)


def _sweep(plan: PlanReport, swept: Tier) -> HtmlTable:
    tiers = list(plan.sweep[0].report.hit_tokens)
    rows = [
        [
            format_bytes(point.size_bytes),
            *(_percent(point.report.tier_hit_rate(tier)) for tier in tiers),
            _percent(point.report.hit_rate),
            _s(point.report.saved_s(plan.rates)),
            f"{point.report.unfit_requests:,}",
        ]
        for point in plan.sweep
    ]
    found = (f"from {_name(tier)}" for tier in tiers)
    header = (_name(swept), *found, "in all", "seconds saved", "requests not fitting")
    return HtmlTable(f"Sweep of the {_name(swept)} tier", header, rows)


def sentences(plan: PlanReport) -> list[str]:
    """What a reader should take away."""
    report, curve = plan.report, plan.curve
    ninety, knee = curve.pages_for_fraction(0.9), curve.knee_pages()
    resumable = " and a checkpoint at every page" if has_checkpoints(plan.memory) else ""
    found = [
        f"{_percent(report.hit_rate)} of all prompt tokens are found again; with room for "
        f"everything{resumable} it would be {_percent(curve.best_hit_rate)}.",
        f"90% of what is possible at {format_bytes(plan.curve_bytes(ninety))}; "
        f"knee at {format_bytes(plan.curve_bytes(knee))} "
        f"({_percent(curve.hit_rate(knee))}).",
    ]
    if plan.memory.hot_pools:
        found.append(
            f"Hot buffers take {plan.settings['hot buffers']}. Entries that steps swap in from "
            "the host or write there are not counted."
        )
    if report.unfit_requests:
        where = "on the device and the host" if plan.memory.hot_pools else "on the device"
        found.append(
            f"{report.unfit_requests:,} of {report.requests:,} requests do not fit {where}; "
            f"the longest prompt needs {format_bytes(plan.curve_bytes(curve.longest_pages))}."
        )
    if plan.writing:
        found.append(_advised(thriftiest(plan.writing)))
    if plan.handoff is not None:
        found += handoff_report.sentences(plan.handoff)
    return found


def _advised(cost: WriteCost) -> str:
    if not cost.saved > 0:
        return "No write policy writes less to storage than write_through at an equal hit rate."
    found = (
        f"{cost.policy.name} writes {_percent(cost.saved)} less to storage than write_through at "
        f"an equal hit rate ({_percent(cost.report.hit_rate)})"
    )
    return found + ("." if cost.policy.served else "; kvtide serve does not offer it.")


# -- charts ---------------------------------------------------------------------------------


def capacity_chart(plan: PlanReport) -> Curve:
    """The hit rate over the capacity of one LRU tier, and what the replayed tiers found."""
    curve = plan.curve
    pages = _sampled(max(1, curve.longest_pages), max(1, curve.footprint_pages))
    lru = {plan.curve_bytes(at) / 1e9: 100 * curve.hit_rate(at) for at in pages}
    series = [Series("LRU, one tier", tuple(lru), tuple(lru.values()))]
    if replayed := _cumulative(plan):
        series.append(Series("replayed tiers", tuple(replayed), tuple(replayed.values())))
    return Curve(
        f"Token hit rate by capacity: {plan.memory.model}, {_traffic(plan)}",
        "capacity (GB)",
        "prompt tokens found (%)",
        tuple(series),
        x_log=True,
        marks=_knee_mark(plan),
    )


def sweep_chart(plan: PlanReport) -> Curve:
    """The hit rate of every tier, and of all together, over the size of the swept one."""
    assert plan.swept is not None
    sizes = tuple(point.size_bytes / 1e9 for point in plan.sweep)
    reports = [point.report for point in plan.sweep]
    series = [
        Series(_name(tier), sizes, tuple(100 * r.tier_hit_rate(tier) for r in reports))
        for tier in reports[0].hit_tokens
    ]
    series.append(Series("all tiers", sizes, tuple(100 * r.hit_rate for r in reports)))
    marks = tuple(mark for mark in _knee_mark(plan) if sizes[0] <= mark.x <= sizes[-1])
    return Curve(
        f"Token hit rate by {_name(plan.swept)} size: {plan.memory.model}, {_traffic(plan)}",
        f"{_name(plan.swept)} (GB)",
        "prompt tokens found (%)",
        tuple(series),
        x_log=True,
        marks=marks,
    )


def _cumulative(plan: PlanReport) -> dict[float, float]:
    """By the size of each tier, the hits of it and of all faster ones; growing sizes only."""
    found: dict[float, float] = {}
    hit_rate = 0.0
    for tier in plan.report.hit_tokens:
        hit_rate += plan.report.tier_hit_rate(tier)
        size = plan.study.tier_bytes[tier] / 1e9
        if not found or size > max(found):
            found[size] = 100 * hit_rate
    return found


def _knee_mark(plan: PlanReport) -> tuple[Mark, ...]:
    size = plan.curve_bytes(plan.curve.knee_pages())
    return (Mark(size / 1e9, f"knee: {format_bytes(size)}"),) if size else ()


def _sampled(low: int, high: int) -> list[int]:
    """Page counts from low to high, evenly spaced by ratio."""
    return sorted({round(at) for at in np.geomspace(low, max(low, high), _CURVE_POINTS)})


# -- JSON -----------------------------------------------------------------------------------


def describe(plan: PlanReport) -> dict[str, Any]:
    """The report as JSON: sizes in bytes, fractions from 0 to 1, times in seconds."""
    study = plan.study
    return {
        "model": plan.memory.model,
        "page_tokens": plan.memory.page_tokens,
        "trace": {
            "name": study.trace.name,
            "requests": study.trace.requests,
            "prompt_tokens": study.trace.prompt_tokens,
        },
        "settings": dict(plan.settings),
        "assumptions": {
            "link_bytes_per_s": plan.rates.link_bytes_s,
            "storage_read_bytes_per_s": plan.rates.storage_read_bytes_s,
            "storage_write_bytes_per_s": plan.rates.storage_write_bytes_s,
            "prefill_tokens_per_s": plan.rates.prefill_tokens_s,
        },
        "tiers": {_name(tier): _describe_tier(plan, tier) for tier in plan.report.hit_tokens},
        **_describe_report(plan.report, plan.rates),
        "misses": [
            {"pool": m.pool, "reason": m.reason, "requests": m.requests, "tokens": m.tokens}
            for m in plan.report.misses
        ],
        "capacity": _describe_curve(plan),
        "placements": [
            {
                "checkpoints": cost.name,
                "checkpoints_per_request": cost.checkpoints_per_request,
                **_describe_report(cost.report, plan.rates),
            }
            for cost in plan.placements
        ],
        "write_policies": [
            {
                "write_policy": cost.policy.name,
                "served": cost.policy.served,
                "stored_bytes": cost.stored_bytes,
                "saved": cost.saved,
                **_describe_report(cost.report, plan.rates),
            }
            for cost in plan.writing
        ],
        "sweep": plan.swept
        and {
            "tier": _name(plan.swept),
            "points": [
                {"bytes": point.size_bytes, **_describe_report(point.report, plan.rates)}
                for point in plan.sweep
            ],
        },
        "handoff": plan.handoff and handoff_report.describe(plan.handoff),
    }


def _describe_tier(plan: PlanReport, tier: Tier) -> dict[str, Any]:
    report = plan.report
    anchors = [anchor.name for anchor in plan.memory.kept_in(tier).anchors]
    return {
        "bytes": plan.study.tier_bytes[tier],
        "hot_bytes": plan.study.hot_bytes(tier),
        "slots": dict(plan.setup.capacity_pages[tier]),
        "resident_pages": {name: report.resident_pages[tier, name] for name in anchors},
        "evicted_pages": {name: report.evicted_pages[tier, name] for name in anchors},
    }


def _describe_report(report: Report, rates: Rates) -> dict[str, Any]:
    return {
        "hit_rate": report.hit_rate,
        "hit_rate_by_tier": {_name(t): report.tier_hit_rate(t) for t in report.hit_tokens},
        "hit_tokens_by_tier": {_name(t): n for t, n in report.hit_tokens.items()},
        "prefill_tokens_saved": report.saved_tokens,
        "seconds": {
            "prefill_saved": report.prefill_saved_s(rates),
            "waited": report.waited_s(rates),
            "saved": report.saved_s(rates),
        },
        "moved_bytes": dict(report.moved_bytes),
        "skipped_copies": dict(report.skipped_copies),
        "unfit_requests": report.unfit_requests,
    }


def _describe_curve(plan: PlanReport) -> dict[str, Any]:
    curve = plan.curve
    pages = _sampled(max(1, curve.longest_pages), max(1, curve.footprint_pages))
    return {
        "footprint_tokens": curve.footprint_pages * curve.page_tokens,
        "footprint_bytes": plan.curve_bytes(curve.footprint_pages),
        "best_hit_rate": curve.best_hit_rate,
        "ninety_percent": _point(plan, curve.pages_for_fraction(0.9)),
        "knee": _point(plan, curve.knee_pages()),
        "curve": [_point(plan, at) for at in pages],
    }


def _point(plan: PlanReport, pages: int) -> dict[str, Any]:
    return {"bytes": plan.curve_bytes(pages), "hit_rate": plan.curve.hit_rate(pages)}


# -- text -----------------------------------------------------------------------------------


def _name(tier: Tier) -> str:
    return tier.name.lower()


def _traffic(plan: PlanReport) -> str:
    """The trace's name without a workload's options, which the settings repeat."""
    return plan.study.trace.name.partition(":")[0]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"


def _s(seconds: float) -> str:
    return f"{seconds:,.1f}"
