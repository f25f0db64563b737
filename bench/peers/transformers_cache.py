"""A prefix of transformers that outlives a process: kvtide beside a cache that torch saves.

transformers has no files of its own for caches, so its part is `torch.save` and `torch.load` of a
`DynamicCache`. Both are timed as a caller sees them, by calls of one further token:

    first    the prompt is computed, and on the disk when the call ends
    again    by another `PrefixCache`, or from the file, with the page cache dropped

and beside both, `model.generate` without anything kept. They take turns with new prompts; rates are
medians over the turns, ratios medians of those within a turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from page_cache import drop_page_cache
from paired_seconds import Seconds, median, ratio

from kvtide.byte_sizes import format_bytes
from kvtide.cli.console import progress, table
from kvtide.integrations.transformers import PrefixCache
from kvtide.tiers import Tokens

WORDS = 1000
PAGE = 64
WAIT_S = 60.0


def model_of(layers: int, tokens: int) -> Any:
    """Random weights, with a cache that is large beside what computing it takes."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2 * tokens,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


class Bench:
    """One model, and a folder on the disk that is measured."""

    def __init__(self, layers: int, tokens: int, folder: Path) -> None:
        self.tokens = tokens
        self._model = model_of(layers, tokens)
        self._folder = folder

    def prompt(self, turn: int) -> torch.Tensor:
        """Unlike that of any other turn from its first page on; its last token is the new one."""
        generator = torch.Generator().manual_seed(turn)
        return torch.randint(1, WORDS, (1, self.tokens + 1), generator=generator)

    def without(self, prompt: torch.Tensor) -> float:
        return self._timed(lambda: self._model.generate(prompt, max_new_tokens=1))

    # -- kvtide -----------------------------------------------------------------------------

    def kept_by_kvtide(self, prompt: torch.Tensor) -> tuple[float, float]:
        found = []
        for wanted in (0, self.tokens):
            drop_page_cache(self._folder)
            with self._opened() as prefixes:
                took = self._timed(lambda: prefixes.generate(prompt, max_new_tokens=1))
                if prefixes.last.cached_tokens != wanted:
                    raise OSError(f"{prefixes.last.cached_tokens} tokens were found, not {wanted}")
                found.append(took)
        return found[0], found[1]

    def _opened(self) -> PrefixCache:
        url = f"file://{self._folder}/kvtide?cap=8GB&floor=0&sync=always"
        size = Tokens(self.tokens + 2 * PAGE)
        return PrefixCache(
            self._model, url, page_tokens=PAGE, device_size=size, fetch_s=WAIT_S, store_s=WAIT_S
        )

    # -- torch ------------------------------------------------------------------------------

    def kept_by_torch(self, prompt: torch.Tensor) -> tuple[float, float]:
        path = self._folder / "cache.pt"
        first = self._timed(lambda: self._save(prompt, path))
        self.saved_bytes = path.stat().st_size
        drop_page_cache(self._folder)
        again = self._timed(lambda: self._load(prompt, path))
        path.unlink()
        return first, again

    @torch.no_grad()
    def _save(self, prompt: torch.Tensor, path: Path) -> None:
        past = transformers.DynamicCache(config=self._model.config)
        self._model(input_ids=prompt[:, :-1], past_key_values=past, logits_to_keep=1)
        with path.open("wb") as file:
            torch.save(past, file)
            file.flush()
            os.fsync(file.fileno())
        self._model.generate(prompt, past_key_values=past, max_new_tokens=1)

    def _load(self, prompt: torch.Tensor, path: Path) -> None:
        past = torch.load(path, weights_only=False)
        self._model.generate(prompt, past_key_values=past, max_new_tokens=1)

    def _timed(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def measure(bench: Bench, turns: int) -> Seconds:
    """Seconds of every call, turn by turn."""
    seconds: Seconds = {name: [] for name in ("without", *COLUMNS)}
    for turn in progress(range(turns + 1), turns + 1, f"{bench.tokens:,} tokens"):
        prompt = bench.prompt(turn)
        ways = {"kvtide": bench.kept_by_kvtide, "torch": bench.kept_by_torch}
        order = list(ways) if turn % 2 else list(ways)[::-1]
        took = {name: ways[name](prompt) for name in order}
        without = bench.without(prompt)
        if turn:  # The first turn warms up threads and allocators.
            seconds["without"].append(without)
            for name in ("kvtide", "torch"):
                for column, value in zip(("first", "again"), took[name], strict=True):
                    seconds[f"{name} {column}"].append(value)
    return seconds


COLUMNS = ("kvtide first", "torch first", "kvtide again", "torch again")


def row(bench: Bench, seconds: Seconds) -> tuple[str, ...]:
    return (
        *(f"{bench.tokens:,}", format_bytes(bench.saved_bytes), median(seconds, "without")),
        *(
            median(seconds, "kvtide first"),
            median(seconds, "torch first"),
            ratio(seconds, "torch first", "kvtide first"),
        ),
        *(
            median(seconds, "kvtide again"),
            median(seconds, "torch again"),
            ratio(seconds, "torch again", "kvtide again"),
        ),
    )


HEADS = (
    "tokens",
    "bytes",
    "without s",
    "kvtide first",
    "torch",
    "ratio",
    "again",
    "torch",
    "ratio",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    parser.add_argument("--tokens", default="1024,4096", help="of prompts, by commas")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args(arguments)
    counts = [int(text) for text in args.tokens.split(",")]
    if args.turns < 1 or any(count < PAGE or count % PAGE for count in counts):
        parser.error(f"use at least one turn, and tokens that are multiples of {PAGE}")
    rows = []
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="caches-", dir=args.folder) as name:
            bench = Bench(args.layers, count, Path(name).resolve())
            rows.append(row(bench, measure(bench, args.turns)))
    print(f"\nseconds, medians of {args.turns} turns; ratio: torch's to kvtide's\n")
    print(table(HEADS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
