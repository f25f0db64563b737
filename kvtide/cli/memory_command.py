"""`kvtide memory MODEL`: a model's pools, their sizes, and what a resume needs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from kvtide.byte_sizes import format_bytes
from kvtide.cli import model_argument, residency_report
from kvtide.cli.console import CommandError, table
from kvtide.cli.model_argument import model_memory, residency
from kvtide.models.model_errors import CheckpointError
from kvtide.spec import ALL, ModelMemory, PoolSpec, SpecError, catalog, with_draft
from kvtide.spec.families import KVDType, draft_for
from kvtide.spec.residency import Residency

_CONTEXTS = (1024, 128 * 1024)
_POOL_COLUMNS = (
    "pool",
    "slots",
    "layers",
    "per page and layer",
    "B/page",
    "B/token",
    "to resume",
)


REFUSALS = (CheckpointError, CommandError, SpecError)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what a model keeps between tokens: its pools, whose slots they use, their bytes, "
        "and what must be resident to resume."
    )
    parser.add_argument(
        "model",
        nargs="?",
        help=f"{model_argument.HELP}; without one, the names are listed",
    )
    parser.add_argument("--page-tokens", type=int, metavar="N", help="tokens per page")
    parser.add_argument("--kv-dtype", help=f"one of {', '.join(kind.value for kind in KVDType)}")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor ranks")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline ranks")
    parser.add_argument(
        "--draft-layers",
        type=int,
        metavar="N",
        help="add the KV of a draft of N layers, with the model's own KV heads where it has any",
    )
    parser.add_argument("--resident", metavar="R", help=model_argument.RESIDENT_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.model is None:
        print(json.dumps(catalog.names()) if args.json else _built_in())
        return 0
    chosen = residency(args.resident or "all")
    memory = model_memory(args.model, args.page_tokens, args.kv_dtype)
    resident, served = (_drafted(m, args.draft_layers) for m in (memory, chosen.of(memory)))
    ranks = _ranks(served, args.tp, args.pp)
    beside = _ranks(resident, args.tp, args.pp)
    if args.json:
        parts = [_describe_served(*pair, chosen) for pair in zip(beside, ranks, strict=True)]
        print(json.dumps(_describe_served(resident, served, chosen) | {"ranks": parts}, indent=2))
    else:
        shown = zip(beside or [resident], ranks or [served], strict=True)
        print("\n\n".join(_report(*pair, chosen) for pair in shown))
    return 0


def _drafted(memory: ModelMemory, draft_layers: int | None) -> ModelMemory:
    if draft_layers is None:
        return memory
    return with_draft(memory, draft_for(memory, draft_layers))


def describe(memory: ModelMemory) -> dict[str, Any]:
    """The facts of the tables as JSON."""
    part = memory.part
    return {
        "model": memory.model,
        "page_tokens": memory.page_tokens,
        "model_layers": memory.layers,
        "holdback": memory.holdback,
        "part": part
        and {
            "first_layer": part.first_layer,
            "end_layer": part.end_layer,
            "tensor_rank": part.tensor_rank,
            "tensor_ranks": part.tensor_ranks,
        },
        "pools": [_describe_pool(pool, memory.page_tokens) for pool in memory.pools],
        "slot_bytes": {a.name: memory.at_rest.slot_bytes(a.name) for a in memory.anchors},
        "history_bytes_per_token": memory.history_bytes_per_token(),
        "resume_bytes": memory.resume_bytes(),
        "context_bytes": {str(tokens): context_bytes(memory, tokens) for tokens in _CONTEXTS},
        "schema_digest": memory.schema_digest().hex(),
    }


def context_bytes(memory: ModelMemory, tokens: int) -> int:
    """Bytes to hold a context of so many tokens such that it can be resumed at its end."""
    page = memory.page_tokens
    pages = -(-tokens // page)
    needed = ((pool, pool.reuse.reach_pages(page)) for pool in memory.pools)
    return sum(
        pool.page_bytes(page) * (pages if reach is None else min(reach, pages))
        for pool, reach in needed
    )


def layer_ranges(layers: Sequence[int]) -> str:
    """(0, 1, 2, 5) → '0–2, 5'; an even spacing is written '2–42 by 2'; many runs are cut short."""
    if not layers:
        return "–"
    if len(layers) > 2 and (step := _even_step(layers)) > 1:
        return f"{layers[0]}–{layers[-1]} by {step}"
    starts = [i for i in range(len(layers)) if i == 0 or layers[i] != layers[i - 1] + 1]
    runs = [layers[a:b] for a, b in zip(starts, [*starts[1:], len(layers)], strict=True)]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    if len(words) > 6:
        return f"{words[0]}, {words[1]}, … {words[-1]} ({len(layers)})"
    return ", ".join(words)


def resume_rule(pool: PoolSpec, page_tokens: int) -> str:
    """What must be resident of this pool to resume, as text."""
    reuse = pool.reuse
    if reuse.reach is ALL:
        rule = "all pages"
    elif reuse.reach == 0:
        rule = "nothing: within a page only"
    elif reuse.stride is not None:
        rule = f"checkpoint (every {reuse.stride:,} tokens)"
    else:
        pages = _counted(reuse.reach_pages(page_tokens) or 0, "page")
        rule = f"last {_counted(reuse.reach, 'token')} ({pages})"
    return rule if reuse.required else f"optional ({rule})"


# -- the report -----------------------------------------------------------------------------


def _describe_served(
    resident: ModelMemory, served: ModelMemory, chosen: Residency
) -> dict[str, Any]:
    facts = describe(served)
    if not served.hot_pools:
        return facts
    homes = {pool.name: pool.home.name.lower() for pool in served.pools}
    return facts | {"home": homes} | residency_report.describe(resident, served, chosen)


def _ranks(memory: ModelMemory, tensor_ranks: int, pipeline_ranks: int) -> list[ModelMemory]:
    """One tensor rank of every pipeline stage; a stage's other ranks are of the same size."""
    if tensor_ranks < 1 or pipeline_ranks < 1:
        raise CommandError(f"--tp {tensor_ranks} --pp {pipeline_ranks}: use at least 1 for each")
    if tensor_ranks == pipeline_ranks == 1:
        return []
    return list(memory.stages(pipeline_ranks, tensor_ranks=tensor_ranks))


def _report(resident: ModelMemory, served: ModelMemory, chosen: Residency) -> str:
    rows = [_pool_row(pool, served.page_tokens) for pool in served.pools]
    columns: tuple[str, ...] = _POOL_COLUMNS
    lines = _summary(served)
    if served.hot_pools:
        columns = (*columns, "lives on")
        rows = [
            [*row, residency_report.lives_on(pool)]
            for row, pool in zip(rows, served.pools, strict=True)
        ]
        lines += residency_report.summary(resident, served, chosen)
    return "\n".join([_title(served), "", table(columns, rows), "", *lines])


def _title(memory: ModelMemory) -> str:
    title = f"{memory.model}: {memory.layers} layers, pages of {memory.page_tokens} tokens"
    if (part := memory.part) is None:
        return title
    ranks = f", each of {part.tensor_ranks} tensor ranks" if part.tensor_ranks > 1 else ""
    return f"{title}; layers {part.first_layer}–{part.end_layer - 1}{ranks}"


def _pool_row(pool: PoolSpec, page_tokens: int) -> list[str]:
    page_bytes = pool.page_bytes(page_tokens)
    entries = _counted(pool.entries_per_page(page_tokens), "entry", "entries")
    return [
        pool.name,
        "own" if pool.is_anchor else f"follows {pool.follows}",
        layer_ranges(pool.layers),
        f"{entries} × {pool.entry.bytes:,} B" if pool.layers else "–",
        f"{page_bytes:,}",
        f"{page_bytes / page_tokens:,.1f}" if pool.tail_entries is None else "–",
        resume_rule(pool, page_tokens),
    ]


def _summary(memory: ModelMemory) -> list[str]:
    lines = []
    for anchor in memory.anchors:
        kept = memory.at_rest
        sidecars = [pool.name for pool in kept.group(anchor.name)[1:]]
        beside = f" with {', '.join(sidecars)}" if sidecars else ""
        size = kept.slot_bytes(anchor.name)
        lines.append(f"One page of {anchor.name}{beside}: {size:,} B ({format_bytes(size)})")
    lines.append(f"History grows by {memory.history_bytes_per_token():,.1f} B per token")
    lines.append(_resume_sentence(memory))
    for tokens in _CONTEXTS:
        size = context_bytes(memory, tokens)
        lines.append(f"A context of {tokens // 1024}k tokens: {format_bytes(size)}")
    return lines


def _resume_sentence(memory: ModelMemory) -> str:
    """What a resume needs, anchor by anchor."""
    needs = []
    for anchor in memory.anchors:
        pages = anchor.reuse.reach_pages(memory.page_tokens)
        if pages is None:
            needs.append(f"every page of {anchor.name}")
        elif anchor.reuse.stride is not None:
            needs.append(f"a checkpoint of {anchor.name} there")
        else:
            needs.append(f"the last {'page' if pages == 1 else f'{pages} pages'} of {anchor.name}")
    besides = memory.resume_bytes()
    size = f"; {format_bytes(besides)} beside the history" if besides else ""
    return f"To resume at a page's end: {', '.join(needs)}{size}"


def _describe_pool(pool: PoolSpec, page_tokens: int) -> dict[str, Any]:
    return {
        "name": pool.name,
        "follows": pool.follows,
        "layers": list(pool.layers),
        "entries_per_page": pool.entries_per_page(page_tokens),
        "entry_bytes": pool.entry.bytes,
        "fields": [
            {"name": field.name, "shape": list(field.shape), "dtype": field.dtype.label}
            for field in pool.entry.fields
        ],
        "tokens_per_entry": pool.tokens_per_entry,
        "layer_page_bytes": pool.row_bytes(page_tokens),
        "page_bytes": pool.page_bytes(page_tokens),
        "bytes_per_token": pool.page_bytes(page_tokens) / page_tokens,
        "reach": "all" if pool.reuse.reach is ALL else pool.reuse.reach,
        "stride": pool.reuse.stride,
        "required": pool.reuse.required,
        "resume": resume_rule(pool, page_tokens),
    }


def _built_in() -> str:
    rows = []
    for name in catalog.names():
        memory = catalog.resolve(name)
        anchors = ", ".join(anchor.name for anchor in memory.anchors)
        history = f"{memory.history_bytes_per_token():,.0f}"
        rows.append([name, memory.layers, anchors, history, format_bytes(memory.resume_bytes())])
    header = ("model", "layers", "anchors", "history B/token", "to resume, beside it")
    return "\n".join(
        [table(header, rows), "", "Or give a folder with a config.json, or a .gguf file."]
    )


def _even_step(layers: Sequence[int]) -> int:
    """The distance between neighbours where it is the same throughout, else 0."""
    steps = {after - before for before, after in pairwise(layers)}
    return steps.pop() if len(steps) == 1 else 0


def _counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
