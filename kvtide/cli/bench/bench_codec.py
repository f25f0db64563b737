"""`kvtide bench codec`: what codecs make of a real model's pages, and of its answers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvtide.bench.codecs import codec_speed
from kvtide.bench.codecs.model_pages import SCORED, ModelText, source_text
from kvtide.byte_sizes import format_bytes
from kvtide.cli.console import CommandError, parse_size, progress, table
from kvtide.models.checkpoint import open_checkpoint
from kvtide.models.default_model import default_model
from kvtide.spec.families import KVDType
from kvtide.storage.codec.opening import CODECS


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compute a text's pages with a model; then measure each codec on them, alone and in a "
        "store, and how far the model's distributions move after pages were restored with it."
    )
    parser.add_argument("--model", metavar="X", help="SmolLM2-135M-Instruct if none")
    parser.add_argument("--text", type=Path, metavar="FILE", help="(kvtide's own source)")
    parser.add_argument("--tokens", type=int, default=1024, help="of the stored prefix (1024)")
    parser.add_argument("--kv-dtype", default="bf16", help="bf16, fp16 or fp32 (bf16)")
    parser.add_argument(
        "--store", metavar="URL", help="also measure this store with each codec and without"
    )
    parser.add_argument("--bytes", default="256MB", help="of pages in the store a turn (256MB)")
    parser.add_argument("--turns", type=int, default=5, help="turns; medians are shown (5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    size = parse_size(args.bytes)
    if min(args.turns, args.tokens, size) < 1:
        raise CommandError("bench codec: use --turns, --tokens and --bytes above 0")
    checkpoint = open_checkpoint(default_model() if args.model is None else args.model)
    text = source_text() if args.text is None else args.text.read_text("utf-8")
    pages = ModelText(checkpoint, text, args.tokens, KVDType.parse(args.kv_dtype))
    objects = pages.stored()
    result: dict[str, Any] = {
        "model": checkpoint.path.name,
        "kv_dtype": args.kv_dtype,
        "prefix_tokens": pages.prefix_tokens,
        "objects": len(objects),
        "turns": args.turns,
        "alone": [one.as_json() for one in codec_speed.alone(objects, args.turns, progress)],
        "restored": _restored(pages),
    }
    if args.store is not None:
        gains = codec_speed.in_store(args.store, objects, size, args.turns, progress)
        result["store"] = [one.as_json() for one in gains]
    print(json.dumps(result, indent=2) if args.json else _report(result))
    return 0


def _restored(pages: ModelText) -> dict[str, Any]:
    """The distributions after pages from each lossy codec."""
    lossy = [name for name, codec in CODECS.items() if codec().lossy]
    computed = pages.computed()
    each = progress(lossy, len(lossy), "restored pages")
    return {name: pages.restored(name, computed).as_json() for name in each}


def _report(result: dict[str, Any]) -> str:
    header = (
        *("codec", "bytes", "ratio", "encode GB/s", "decode GB/s"),
        *("KL mean", "KL max", "same argmax"),
    )
    rows = [_row(one, result["restored"].get(one["codec"])) for one in result["alone"]]
    parts = [
        f"{result['model']}, KV in {result['kv_dtype']}: {result['objects']} objects of a prefix "
        f"of {result['prefix_tokens']:,} tokens. CPU time of one thread, medians of "
        f"{result['turns']} turns; KL in nats at {SCORED} tokens after the prefix\n",
        table(header, rows),
    ]
    if "store" in result:
        gains = [
            (
                *(one["codec"], f"{one['write_gb_s']:.2f}", f"{one['write_ratio']:.2f}×"),
                *(f"{one['read_gb_s']:.2f}", f"{one['read_ratio']:.2f}×"),
            )
            for one in result["store"]
        ]
        ways = ("codec", "write GB/s", "to none", "read GB/s", "to none")
        parts += ["\nPages through the store, in turns\n", table(ways, gains)]
    return "\n".join(parts)


def _row(one: dict[str, Any], restored: dict[str, Any] | None) -> tuple[str, ...]:
    sizes = (one["codec"], format_bytes(one["coded_bytes"]), f"{one['ratio']:.2f}")
    speeds = (f"{one['encode_gb_s']:.2f}", f"{one['decode_gb_s']:.2f}")
    if restored is None:
        return (*sizes, *speeds, "–", "–", "–")
    kl = (f"{restored['kl_mean']:.2g}", f"{restored['kl_max']:.2g}", f"{restored['same']:.0%}")
    return (*sizes, *speeds, *kl)
