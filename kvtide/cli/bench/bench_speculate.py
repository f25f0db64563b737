"""`kvtide bench speculate`: decoding with drafts beside decoding without, in one run.

Cases of texts serve prompts by a model on disk. Cases of shapes time single steps of models with
random weights on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from kvtide.bench.drafts import restored_drafts, speculate
from kvtide.bench.drafts.restored_drafts import RestoredLength
from kvtide.bench.gpu.draft_rounds import (
    ChosenResult,
    Note,
    RoundLoad,
    RoundResult,
    chosen,
    rounds,
)
from kvtide.bench.gpu.drafted_shapes import (
    DraftedModel,
    DraftedShape,
    deepseek_v4_flash_mtp,
    qwen3_8b_eagle3,
)
from kvtide.cli.console import CommandError, progress, table
from kvtide.engine.engine import DRAFT_TOKENS
from kvtide.engine.speculation.draft_length import TRIAL_TOKENS
from kvtide.engine.speculation.ngram import NGRAM_DRAFTS
from kvtide.engine.speculation.speculation import MAX_DRAFTS
from kvtide.models.checkpoint import open_checkpoint
from kvtide.models.default_model import default_model, shipped_draft
from kvtide.server.ranks.rank_processes import freeze_gc


class ShapeCase(NamedTuple):
    """`shape` is one of `SHAPES`; `chance`: that a draft is accepted, while the engine chooses how
    many there are; None for rounds of a fixed number."""

    name: str
    shape: str
    loads: tuple[RoundLoad, ...]
    chance: float | None = None


def _chosen_loads(context: int, *batches: int) -> tuple[RoundLoad, ...]:
    return tuple(RoundLoad(batch, context, 0.0, steps=TRIAL_TOKENS, blocks=6) for batch in batches)


V4_CONTEXT = 64_512
"""With the answers it stays below 65,536 tokens, for which there are CUDA graphs."""
SHAPES = {shape.name: shape for shape in (qwen3_8b_eagle3(), deepseek_v4_flash_mtp())}
SHAPE_CASES = {
    case.name: case
    for case in (
        ShapeCase("rounds", "qwen3-8b", (RoundLoad(1, 2048, 1.25), RoundLoad(64, 2048, 1.5))),
        ShapeCase("never-8b", "qwen3-8b", _chosen_loads(2048, 64), chance=0.0),
        ShapeCase("half-8b", "qwen3-8b", _chosen_loads(2048, 1, 64), chance=0.5),
        ShapeCase(
            "rounds-v4",
            "deepseek-v4-flash",
            (RoundLoad(1, V4_CONTEXT, 1.4), RoundLoad(64, V4_CONTEXT, 1.6)),
        ),
        ShapeCase("never-v4", "deepseek-v4-flash", _chosen_loads(V4_CONTEXT, 64), chance=0.0),
        ShapeCase("half-v4", "deepseek-v4-flash", _chosen_loads(V4_CONTEXT, 1, 64), chance=0.5),
    )
}
ROWS = "rows"
"""What drafts cost a step, without the drafter's own time; not in the default selection."""
RESTORED = "restored"
"""What a draft accepts behind restored prefixes; not in the default selection."""
CASES = (*speculate.CASES, ROWS, RESTORED, *SHAPE_CASES)
SpeculationResult = (
    speculate.SpeculationGain | speculate.RowCost | RestoredLength | RoundResult | ChosenResult
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="X", help="SmolLM2-135M-Instruct if none")
    parser.add_argument(
        "--draft",
        metavar="DIR",
        help="an EAGLE3 draft, for chat and questions (the default model's)",
    )
    parser.add_argument(
        "--only",
        metavar="NAME,…",
        help=f"some of {', '.join((*speculate.CASES, ROWS, RESTORED))} (texts, by a model on "
        f"disk) or of {', '.join(SHAPE_CASES)} (random weights, on a GPU). The first that can run; "
        "with `--device cuda` and no model the others",
    )
    parser.add_argument(
        "--draft-tokens",
        type=int,
        metavar="K",
        help=f"(with n-gram {NGRAM_DRAFTS}, else {DRAFT_TOKENS})",
    )
    parser.add_argument("--answer-tokens", type=int, default=128, help="of texts (128)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of texts, each with drafts and without (3)"
    )
    parser.add_argument("--device", default="cpu", help="(cpu)")
    parser.add_argument(
        "--json",
        nargs="?",
        const="",
        metavar="FILE",
        help="print JSON instead of tables; with a file, write it there and print tables",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    names = _names(args)
    texts = [speculate.CASES[name] for name in names if name in speculate.CASES]
    shapes = [SHAPE_CASES[name] for name in names if name in SHAPE_CASES]
    found: list[tuple[str, SpeculationResult]] = []
    failed: list[str] = []
    own = [name for name in (ROWS, RESTORED) if name in names]
    for one in chain(_texts(args, texts, own), _shapes(args, shapes, failed)):
        found.append(one)
        _write(args, found)
    if args.json == "":
        print(json.dumps(_as_json(found), indent=2))
    else:
        print("\n\n".join(_tables([result for _, result in found])))
    if failed:
        print(f"failed (tracebacks above): {', '.join(failed)}")
    return 1 if failed else 0


def _names(args: argparse.Namespace) -> list[str]:
    if args.draft_tokens is not None and not 1 <= args.draft_tokens <= MAX_DRAFTS:
        raise CommandError(f"bench speculate: --draft-tokens takes 1 to {MAX_DRAFTS}")
    if min(args.answer_tokens, args.rounds) < 1:
        raise CommandError("bench speculate: --answer-tokens and --rounds must be at least 1")
    on_gpu = torch.device(args.device).type == "cuda"
    if args.only is not None:
        names = str(args.only).split(",")
    elif on_gpu and args.model is None and args.draft is None:
        names = list(SHAPE_CASES)
    else:
        names = [
            case.name
            for case in speculate.CASES.values()
            if not case.needs_draft or _draft(args) is not None
        ]
    if unknown := [name for name in names if name not in CASES]:
        raise CommandError(
            f"bench speculate: {', '.join(unknown)} is not known; use {', '.join(CASES)}"
        )
    drafted = [name for name, case in speculate.CASES.items() if case.needs_draft]
    drafted.append(RESTORED)
    if {*drafted} & {*names} and _draft(args) is None:
        raise CommandError(
            f"bench speculate: {', '.join(drafted)} are drafted by a draft; name its folder: "
            "--draft"
        )
    shapes = [name for name in names if name in SHAPE_CASES]
    if shapes and not (on_gpu and torch.cuda.is_available()):
        raise CommandError(
            f"bench speculate: {', '.join(shapes)} needs a GPU; use --device cuda where torch has "
            "one"
        )
    return names


def _draft(args: argparse.Namespace) -> str | None:
    """The folder of the draft for texts: what is named, else what comes with the model."""
    found = args.draft or shipped_draft(args.model)
    return None if found is None else str(found)


def _write(args: argparse.Namespace, found: list[tuple[str, SpeculationResult]]) -> None:
    """Write the results so far, so that an interrupted run keeps them."""
    if args.json:
        Path(args.json).write_text(json.dumps(_as_json(found), indent=2))


def _as_json(found: list[tuple[str, SpeculationResult]]) -> list[dict[str, Any]]:
    return [{"case": name, **result.as_json()} for name, result in found]


# -- measuring --------------------------------------------------------------------------------


def _texts(
    args: argparse.Namespace, cases: list[speculate.SpeculationCase], own: list[str]
) -> Iterator[tuple[str, SpeculationResult]]:
    """These cases, and those of `own` that are none of `speculate.CASES`."""
    if not cases and not own:
        return
    model = open_checkpoint(default_model() if args.model is None else args.model)
    bed = speculate.ModelBed(model, _draft(args), torch.device(args.device))
    for case in cases:
        drafts = args.draft_tokens or case.draft_tokens
        gain = speculate.measure(bed, case, args.answer_tokens, drafts, args.rounds, progress)
        yield case.name, gain
    for batch in speculate.ROW_BATCHES if ROWS in own else ():
        for cost in speculate.row_costs(bed, batch, speculate.ROW_STEPS, progress):
            yield ROWS, cost
    if RESTORED in own:
        drafts = args.draft_tokens or DRAFT_TOKENS
        with TemporaryDirectory(prefix="kvtide-") as folder:
            given = bed, speculate.CHAT, args.answer_tokens, drafts, Path(folder)
            for found in restored_drafts.measure(*given):
                yield RESTORED, found


def _shapes(
    args: argparse.Namespace, cases: list[ShapeCase], failed: list[str]
) -> Iterator[tuple[str, SpeculationResult]]:
    """The cases of one shape share its weights. Where one fails, the others still run."""
    device, begun = torch.device(args.device), time.monotonic()
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)

    def note(text: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    for shape in SHAPES.values():
        own = [case for case in cases if case.shape == shape.name]
        if not own:
            continue
        note(f"{shape.name}: building")
        model = shape.build(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        freeze_gc()  # As a server does.
        for case, load in [(each, load) for each in own for load in each.loads]:
            if args.draft_tokens is not None:
                load = replace(load, draft_tokens=args.draft_tokens)
            note(f"{shape.name}: {case.name}, batch {load.batch}, context {load.context:,}")
            try:
                for result in _measured(case, shape, model, device, load, note):
                    note(" | ".join(_row(result)))
                    yield case.name, result
            except Exception:
                failed.append(f"{case.name}, batch {load.batch}")
                traceback.print_exc()
            _release(device)
        del model
        gc.unfreeze()
        _release(device)
    if cases:
        note("done")


def _measured(
    case: ShapeCase,
    shape: DraftedShape,
    model: DraftedModel,
    device: torch.device,
    load: RoundLoad,
    note: Note,
) -> Iterator[RoundResult | ChosenResult]:
    names = (shape.name, shape.drafter)
    if case.chance is not None:
        yield chosen(model, names, device, load, case.chance, note)
    else:
        yield from rounds(model, names, device, load, note)


def _release(device: torch.device) -> None:
    """CUDA graphs hold device memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- tables -----------------------------------------------------------------------------------

_HEADERS: dict[type[SpeculationResult], tuple[str, ...]] = {
    speculate.SpeculationGain: (
        *("case", "at once", "drafts", "tokens/s on", "tokens/s off", "on/off", "accept length"),
        *("accepted", "rejected", "goal", "reached"),
    ),
    speculate.RowCost: ("batch", "drafts", "step ms", "of a decode step", "assumed"),
    RestoredLength: (
        *("prefix", "prompt tokens", "restored", "verify steps", "accept length", "of computed"),
    ),
    RoundResult: (
        *("model", "drafter", "batch", "context", "accepted", "drafts", "decode ms", "round ms"),
        *("round/decode", "goal", "reached", "verify ms", "extend ms", "propose ms"),
        "host wait ms",
    ),
    ChosenResult: (
        *("model", "drafter", "batch", "context", "chance", "drafts a step", "tokens/s on"),
        *("tokens/s off", "on/off", "goal", "reached"),
    ),
}
"""Of a round's table, `verify`, `extend` and `propose` are parts of a round, each waited for;
`host wait` is what the device waits for the host where a round is not."""


def _tables(found: list[SpeculationResult]) -> Iterator[str]:
    for kind, header in _HEADERS.items():
        if rows := [_row(result) for result in found if isinstance(result, kind)]:
            yield table(header, rows)


def _row(found: SpeculationResult) -> tuple[str, ...]:
    if isinstance(found, speculate.RowCost):
        costs = (f"{found.ratio:.2f}×", f"{found.assumed:.2f}×")
        return (str(found.batch), str(found.drafts), _ms(found.step_s), *costs)
    if isinstance(found, RestoredLength):
        tokens = f"{found.prompt_tokens:,}", f"{found.restored_tokens:,}", f"{found.verify_steps:,}"
        return (found.prefix, *tokens, f"{found.accept_length:.2f}", f"{found.of_computed:.1%}")
    if isinstance(found, RoundResult):
        goal = "–" if found.goal is None else f"≤ {found.goal:g}×"
        parts = (found.phases_s.get(part, 0.0) for part in ("verify", "extend", "propose"))
        return (
            *(found.model, found.drafter, str(found.batch), f"{found.context:,}", found.accepted),
            *(f"{found.drafts:.2f}", _ms(found.decode_s), _ms(found.round_s)),
            *(f"{found.ratio:.2f}×", goal, _yes(found.reached), *map(_ms, parts)),
            "–" if found.wait_s is None else _ms(found.wait_s),
        )
    speed = (f"{found.on_tokens_s:,.1f}", f"{found.off_tokens_s:,.1f}", f"{found.ratio:.2f}×")
    goals = (f"≥ {found.goal:g}×", _yes(found.reached))
    if isinstance(found, ChosenResult):
        whose = (found.model, found.drafter, str(found.batch), f"{found.context:,}")
        return (*whose, f"{found.chance:g}", f"{found.drafts:.3f}", *speed, *goals)
    return (
        *(found.case, str(found.at_once), str(found.draft_tokens), *speed),
        *(f"{found.accept_length:.2f}", f"{found.accepted:,}", f"{found.rejected:,}", *goals),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _yes(reached: bool | None) -> str:
    return "–" if reached is None else ("no", "yes")[reached]
