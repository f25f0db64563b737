"""The first token of a prompt in a CPU vLLM: computed, or from what a KV connector stored.

Three engines, each in a process of its own, take turns with new prompts:

    none      without a connector
    kvtide    KvtideConnector over a file store
    example   vLLM's ExampleConnector, which writes a safetensors file for each prompt and layer

A connector's engine gets each prompt twice: it computes and stores it; then, with vLLM's prefix
cache and the page cache dropped, it loads it. Times are vLLM's own, from a request's arrival to its
first token. Medians are over the turns, ratios the medians of those within a turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from page_cache import drop_page_cache
from paired_seconds import Seconds, median, ratio

from kvtide.cli.console import progress, table

WORDS, BLOCK = 1000, 32
MAX_S = 300.0
ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Engine:
    """A vLLM in a process of its own, which answers one request at a time."""

    def __init__(self, kind: str, folder: Path, tokens: int) -> None:
        self.kind = kind
        command = [sys.executable, __file__, "--engine", kind, "--folder", str(folder)]
        self._process = subprocess.Popen(
            [*command, "--tokens", str(tokens)],
            env={**os.environ, **ENGINE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def first_token(self, prompt: int) -> tuple[float, int]:
        """Seconds, and how many tokens were cached."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{prompt}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                return answer["seconds"], answer["cached"]
        assert self._process.stderr is not None
        raise SystemExit(f"vLLM ({self.kind}) ended:\n{self._process.stderr.read()[-3000:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


# -- in the engine's process --------------------------------------------------------------------


def serve(kind: str, folder: Path, tokens: int) -> None:
    """Answer prompts, each by its number, until the input ends."""
    import torch
    from vllm import LLM, SamplingParams

    connector = {
        "none": None,
        "kvtide": {
            "kv_connector": "KvtideConnector",
            "kv_connector_module_path": "kvtide.integrations.vllm_connector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "url": f"file://{folder}/kvtide?cap=8GB&floor=0",
                "fingerprint": "bench",
            },
        },
        "example": {
            "kv_connector": "ExampleConnector",
            "kv_connector_extra_config": {"shared_storage_path": f"{folder}/example"},
        },
    }[kind]
    engine: Any = LLM(
        model=str(folder / "model"),
        skip_tokenizer_init=True,
        dtype="float32",
        enable_prefix_caching=True,
        enforce_eager=True,
        max_model_len=2 * tokens,
        max_num_batched_tokens=2 * tokens,  # The example stores what one step computes.
        block_size=BLOCK,
        kv_transfer_config=connector and {**connector, "kv_role": "kv_both"},
        disable_log_stats=False,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    sampling.detokenize = False
    for line in sys.stdin:
        rng = torch.Generator().manual_seed(int(line))
        # The example does not find a prompt whose last token is the first of a block.
        prompt = torch.randint(1, WORDS, (tokens + 2,), generator=rng).tolist()
        given = [{"prompt_token_ids": prompt}]
        (output,) = engine.generate(given, sampling_params=sampling, use_tqdm=False)
        seconds = output.metrics.first_token_latency
        _forget(engine, sampling)
        print(json.dumps({"seconds": seconds, "cached": output.num_cached_tokens}), flush=True)


def _forget(engine: Any, sampling: Any) -> None:
    """Empty vLLM's prefix cache, once steps have freed the blocks that were being saved."""
    deadline = time.monotonic() + MAX_S
    while not engine.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise SystemExit(f"blocks are still being saved after {MAX_S:.0f} s")
        engine.generate([{"prompt_token_ids": [1]}], sampling_params=sampling, use_tqdm=False)


def make(folder: Path, layers: int, tokens: int) -> None:
    """Random weights, with a cache that is large beside what computing it takes."""
    import torch
    import transformers

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
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


# -- the comparison -----------------------------------------------------------------------------


def measure(engines: Sequence[Engine], folder: Path, tokens: int, turns: int) -> Seconds:
    """Seconds of every call, turn by turn."""
    seconds: Seconds = {}
    for turn in progress(range(turns + 1), turns + 1, f"{tokens:,} tokens"):
        for engine in engines if turn % 2 else engines[::-1]:
            for column, cached in (("first", 0), ("again", tokens)):
                if engine.kind == "none" and column == "again":
                    continue
                drop_page_cache(folder)
                took, found = engine.first_token(turn)
                if found != cached:
                    raise SystemExit(f"{engine.kind}: {found} tokens were found, not {cached}")
                if turn:  # The first turn warms up.
                    seconds.setdefault(f"{engine.kind} {column}", []).append(took)
    return seconds


def row(tokens: int, seconds: Seconds) -> tuple[str, ...]:
    return (
        *(f"{tokens:,}", median(seconds, "none first")),
        *(median(seconds, "kvtide first"), median(seconds, "example first")),
        *(median(seconds, "kvtide again"), ratio(seconds, "none first", "kvtide again")),
        *(median(seconds, "example again"), ratio(seconds, "example again", "kvtide again")),
    )


HEADS = (
    *("tokens", "computed", "and stored: kvtide", "example"),
    *("loaded: kvtide", "computed / it", "example", "example / kvtide"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    parser.add_argument("--tokens", default="1024,4096", help="of prompts, by commas")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    counts = [int(text) for text in args.tokens.split(",")]
    if args.turns < 1 or any(count < BLOCK or count % BLOCK for count in counts):
        parser.error(f"use at least one turn, and tokens that are multiples of {BLOCK}")
    if args.engine:
        serve(args.engine, Path(args.folder), counts[0])
        return 0
    rows = []
    for count in counts:
        with ExitStack() as opened:
            place = tempfile.TemporaryDirectory(prefix="caches-", dir=args.folder)
            folder = Path(opened.enter_context(place)).resolve()
            make(folder / "model", args.layers, count)
            engines = [Engine(kind, folder, count) for kind in ("none", "kvtide", "example")]
            for engine in engines:
                opened.callback(engine.close)
            rows.append(row(count, measure(engines, folder, count, args.turns)))
    print(f"\nseconds to the first token, medians of {args.turns} turns\n")
    print(table(HEADS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
