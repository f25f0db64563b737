"""`kvtide doctor`: what this machine can do, what is wrong with it, and how to serve a model."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvtide.byte_sizes import format_bytes
from kvtide.cli.console import CommandError, table
from kvtide.doctor.advice import advise
from kvtide.doctor.findings import Examined, Finding, Severity, findings
from kvtide.doctor.judged_store import JudgedStore, existing
from kvtide.doctor.machine_facts import MachineFacts, machine_facts
from kvtide.doctor.model_facts import model_facts
from kvtide.doctor.probes import measure_machine, shown
from kvtide.models.model_errors import CheckpointError
from kvtide.server.settings import flag
from kvtide.server.setup.store_setup import default_folder
from kvtide.spec import SpecError
from kvtide.storage import StoreError
from kvtide.storage.url import StoreURL
from kvtide.tiers import TierError

REFUSALS = (CheckpointError, CommandError, SpecError, StoreError, TierError)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure this machine, say which settings fit the model and what is misconfigured, and "
        "print the command to serve with. Exits with 1 if a finding is a problem."
    )
    parser.add_argument(
        "model", nargs="?", help="a folder with a config.json, a .gguf file, or a built-in name"
    )
    parser.add_argument(
        "--folder", metavar="DIR", help="where pages would be stored (your cache directory)"
    )
    parser.add_argument(
        "--storage", metavar="URL", help="a store to measure instead, as kvtide serve is given it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    examined = examine(args.model, _store(args.folder, args.storage))
    found = findings(examined)
    print(json.dumps(describe(examined, found), indent=2) if args.json else report(examined, found))
    return 1 if any(one.severity is Severity.PROBLEM for one in found) else 0


def examine(model: str | None, store: JudgedStore) -> Examined:
    """Facts first, so that a model that is not there is refused before anything is measured."""
    facts = machine_facts()
    needs = None if model is None else model_facts(model, on_gpu=bool(facts.gpus))
    device = torch.device("cuda", 0) if facts.gpus else torch.device("cpu")
    measured = measure_machine(device, store, None if needs is None else needs.memory)
    advice = advise(facts, measured, needs, store, _free_bytes(store))
    return Examined(facts, measured, advice, store, needs)


def _store(folder: str | None, url: str | None) -> JudgedStore:
    if folder is not None and url is not None:
        raise CommandError("doctor: --folder and --storage name two stores; use one of them")
    if url is not None:
        StoreURL.parse(url)  # Refuses what is none.
        return JudgedStore(url)
    return JudgedStore.of_folder(default_folder(os.environ) if folder is None else Path(folder))


def _free_bytes(store: JudgedStore) -> int:
    """Of the disk that a folder is on; its cap is chosen by that."""
    if store.named or store.folder is None:
        return 0
    try:
        return shutil.disk_usage(existing(store.folder)).free
    except OSError as error:
        raise CommandError(str(error)) from None


# -- output -------------------------------------------------------------------------------------


def describe(examined: Examined, found: list[Finding]) -> dict[str, Any]:
    advice, measured = examined.advice, examined.measured
    return {
        "machine": asdict(examined.facts),
        "model": None if examined.model is None else examined.model.name,
        "measured": {name: round(rate) for name, rate in measured.rates.items()},
        "unmeasured": dict(measured.unmeasured),
        "codec": None if measured.codec is None else measured.codec.as_json(),
        "layouts": [cell.as_json() for cell in measured.cells],
        "probe_seconds": {name: round(took, 3) for name, took in measured.seconds.items()},
        "settings": {one.setting: {"value": one.value, "why": one.why} for one in advice.choices},
        "findings": [asdict(one) | {"severity": one.severity.value} for one in found],
        "command": advice.words,
    }


def report(examined: Examined, found: list[Finding]) -> str:
    measured = examined.measured
    rows = [[name.replace("_", " "), shown(name, rate)] for name, rate in measured.rates.items()]
    rows += [[name.replace("_", " "), f"not: {why}"] for name, why in measured.unmeasured.items()]
    chosen = [[flag(one.setting), one.value or "–", one.why] for one in examined.advice.choices]
    return "\n\n".join(
        [
            _machine(examined.facts),
            table(("measured", "rate"), rows),
            table(("setting", "value", "why"), chosen),
            "\n".join(_sentence(one) for one in found) or "Nothing is misconfigured.",
            examined.advice.command,
        ]
    )


def _machine(facts: MachineFacts) -> str:
    gpus = ", ".join(f"{one.name} ({format_bytes(one.memory.total_bytes)})" for one in facts.gpus)
    return (
        f"{facts.cores} cores, {format_bytes(facts.memory.total_bytes)} of memory "
        f"({format_bytes(facts.memory.available_bytes)} free), {gpus or 'no GPU'}; "
        f"torch {facts.torch_version}"
    )


def _sentence(one: Finding) -> str:
    return f"{one.severity.value}: {one.what}.\n  Remedy: {one.remedy}."
