"""Another CPU engine in process and kvtide behind HTTP over one model, turn by turn.

Beside vLLM, the model is a random one in fp32 of a family (`cpu_models.py`). Beside llama.cpp, it
is the default model's GGUF file. Both engines cache prefixes, decode greedily and get token ids. A
decode rate is that of 32 further tokens of prompts that are cached.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpu_models import FAMILIES, VOCABULARY, write_model

VLLM = "0.32.0"
LLAMA_CPP = "2026.10.11549"
"""Of `xllamacpp`, which brings llama.cpp as a wheel."""
ROWS = (
    "new prompt of 1,024 tokens, s",
    "64 new tokens after 1,024 cached, s",
    "decode, one sequence, tok/s",
    "decode, eight sequences, tok/s",
)
CONTEXT, ADDED, DECODED = 1024, 64, 32
Tokens = list[int]
Generate = Callable[[Sequence[Tokens], int], None]
"""Answers prompts together, each with so many tokens, whatever they are."""


def measure(generate: Generate, repetitions: int) -> list[float]:
    """One figure for each of ROWS: the median of so many."""
    seeds = iter(range(1 << 30))

    def prompt(tokens: int) -> Tokens:
        return random.Random(next(seeds)).choices(range(10, VOCABULARY), k=tokens)

    def seconds(prompts: Sequence[Tokens], tokens: int) -> float:
        began = time.perf_counter()
        generate(prompts, tokens)
        return time.perf_counter() - began

    generate([prompt(CONTEXT)], 4)
    contexts = [prompt(CONTEXT) for _ in range(max(8, repetitions))]
    new = [seconds([each], 1) for each in contexts]
    added = [seconds([each + prompt(ADDED)], 1) for each in contexts[:repetitions]]
    rates = []
    for count in (1, 8):
        some, found = contexts[:count], []
        for _ in range(repetitions):
            begin, whole = seconds(some, 1), seconds(some, 1 + DECODED)
            found.append(count * DECODED / (whole - begin))
        rates.append(statistics.median(found))
    return [statistics.median(new), statistics.median(added), *rates]


# -- the engines ---------------------------------------------------------------------------------


@contextmanager
def kvtide(model: Path) -> Iterator[Generate]:
    """`kvtide serve` in a process of its own, asked over HTTP."""
    # Without storage: pages of an earlier run would be found there. Peers have no drafts.
    given = ("--port", "0", "--storage", "none", "--speculate", "none")
    command = [sys.executable, "-m", "kvtide.cli.main", "serve", str(model), *given]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        lines = []
        for line in server.stderr:
            lines.append(line)
            if line.startswith("listening on "):
                break
        else:
            raise SystemExit("kvtide serve does not start:\n" + "".join(lines))
        url = lines[-1].split()[-1].rstrip("/") + "/v1/completions"

        def ask(prompt: Tokens, tokens: int) -> None:
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            sent = urllib.request.Request(
                url, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(sent) as answer:
                used = json.load(answer)["usage"]["completion_tokens"]
            assert used == tokens, f"{used} tokens of {tokens}"

        with ThreadPoolExecutor(8) as clients:

            def generate(prompts: Sequence[Tokens], tokens: int) -> None:
                list(clients.map(lambda prompt: ask(prompt, tokens), prompts))

            yield generate
    finally:
        server.terminate()
        server.wait()


def peer_figures(peer: str, model: Path, repetitions: int) -> list[float]:
    """Measured by this file in the peer's environment."""
    # The tests' folder of installed engines.
    from tests.integrations import engines

    python = engines.vllm(VLLM) if peer == "vllm" else engines.llama_cpp(LLAMA_CPP)
    command = [str(python), __file__, "--beside", peer, "--in-peer", str(model)]
    environment = {
        **os.environ,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    given = [*command, "--repetitions", str(repetitions)]
    done = subprocess.run(given, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{PEERS[peer][0]} does not run this model: {done.stderr[-2000:]}")
    figures: list[float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def vllm(folder: Path) -> Generate:
    from vllm import LLM, SamplingParams

    engine: Any = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enable_prefix_caching=True,
        enforce_eager=True,
        max_model_len=4096,
    )

    def generate(prompts: Sequence[Tokens], tokens: int) -> None:
        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = engine.generate(given, how, use_tqdm=False)
        assert all(len(each.outputs[0].token_ids) == tokens for each in answers)

    return generate


def llama_cpp(file: Path) -> Generate:
    from xllamacpp import CommonParams, Server

    how: Any = CommonParams()
    how.model.path, how.n_parallel = str(file), 8
    how.n_ctx = how.n_parallel * 2048
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    how.cpuparams.n_threads = how.cpuparams_batch.n_threads = threads
    server: Any = Server(how)

    def ask(prompt: Tokens, tokens: int) -> None:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        used = server.handle_completions(body)["usage"]["completion_tokens"]
        assert used == tokens, f"{used} tokens of {tokens}"

    clients = ThreadPoolExecutor(how.n_parallel)

    def generate(prompts: Sequence[Tokens], tokens: int) -> None:
        list(clients.map(lambda prompt: ask(prompt, tokens), prompts))

    return generate


PEERS: dict[str, tuple[str, Callable[[Path], Generate]]] = {
    "vllm": (f"vllm-cpu {VLLM}", vllm),
    "llama.cpp": (f"llama.cpp (xllamacpp {LLAMA_CPP})", llama_cpp),
}
"""By their names in arguments: what they are called in the table, and how one is started."""


# -- the table -----------------------------------------------------------------------------------


def model_for(peer: str, family: str, folder: Path) -> Path:
    if peer == "llama.cpp":
        from kvtide.models.default_model import default_model

        return default_model()
    write_model(family, folder)
    return folder


def shown(peer: str, figures: Sequence[Sequence[float]]) -> Iterator[str]:
    """Lines of a table: figures by engine and turn, and the ratio of medians."""
    yield f"| | {PEERS[peer][0]} | kvtide | kvtide ahead by |"
    yield "|---|---|---|---|"
    for row, name in enumerate(ROWS):
        theirs, ours = ([turn[row] for turn in figures[number::2]] for number in (0, 1))
        ratio = statistics.median(ours) / statistics.median(theirs)
        ahead = 1 / ratio if name.endswith(", s") else ratio
        cells = (" ".join(f"{each:.3g}" for each in some) for some in (theirs, ours))
        yield f"| {name} | {' | '.join(cells)} | {ahead:.2f}× |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2, help="runs of each engine (2)")
    parser.add_argument("--repetitions", type=int, default=3, help="in a run (3)")
    parser.add_argument("--beside", choices=PEERS, default="vllm", help="which engine (vllm)")
    parser.add_argument("--family", choices=FAMILIES, default="llama", help="beside vLLM (llama)")
    parser.add_argument("--in-peer", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.in_peer is not None:
        _, started = PEERS[given.beside]
        print(json.dumps(measure(started(given.in_peer), given.repetitions)), flush=True)
        os._exit(0)
    figures = []
    with tempfile.TemporaryDirectory() as temporary:
        model = model_for(given.beside, given.family, Path(temporary))
        for _ in range(given.turns):
            figures.append(peer_figures(given.beside, model, given.repetitions))
            with kvtide(model) as generate:
                figures.append(measure(generate, given.repetitions))
    print("\n".join(shown(given.beside, figures)))


if __name__ == "__main__":
    main()
