"""A CPU vLLM with kvtide's connector: run by tests in vLLM's own environment.

    python -m tests.integrations.vllm_serving make MODEL SEED [FAMILY]
    python -m tests.integrations.vllm_serving serve MODEL URL FINGERPRINT RANKS ORDER ANSWER [kill]

`serve` generates for the given prompts one after the other, waits until their blocks are stored,
prints a line of JSON, and ends, or is killed with SIGKILL. Prompts are `first`, `second`, and
`turn`: the first one, its answer, and more.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kvtide.integrations.page_objects import PageObjects

WORDS, PROMPT_TOKENS, ANSWER_TOKENS, BLOCK = 97, 200, 40, 32
MAX_S = 120.0


SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 48,
}


def make(folder: str, seed: int, family: str = "llama") -> None:
    """A random model with weights so large that tokens depend on the whole prompt."""
    torch.manual_seed(seed)
    configs = {
        "llama": lambda: transformers.LlamaConfig(**SIZES),
        "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **WINDOWS),
    }
    model = transformers.AutoModelForCausalLM.from_config(configs[family]())
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4.0)
    model.save_pretrained(folder)
    words = {str(number): number for number in range(WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def engine(model: str, connector: dict[str, Any], ranks: int) -> LLM:
    return LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enable_prefix_caching=True,
        enforce_eager=True,
        max_model_len=512,
        block_size=BLOCK,
        tensor_parallel_size=ranks,
        kv_transfer_config=connector,
        disable_log_stats=False,
    )


def connector(url: str, fingerprint: str) -> dict[str, Any]:
    return {
        "kv_connector": "KvtideConnector",
        "kv_connector_module_path": "kvtide.integrations.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url, "fingerprint": fingerprint},
    }


def prompts(answer: Sequence[int]) -> dict[str, list[int]]:
    rngs = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    first, second = (
        torch.randint(2, WORDS, (PROMPT_TOKENS,), generator=rng).tolist() for rng in rngs
    )
    return {"first": first, "second": second, "turn": [*first, *answer, *second[:20]]}


def generate(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    sampling.detokenize = False
    given = [{"prompt_token_ids": prompt}]
    (output,) = llm.generate(given, sampling_params=sampling, use_tqdm=False)
    return {"cached": output.num_cached_tokens, "tokens": list(output.outputs[0].token_ids)}


def wait_until_stored(objects: PageObjects, ranks: int, histories: Sequence[list[int]]) -> None:
    """All whole blocks, but for that of the last token, which nothing was computed from."""
    blocks = {
        tuple(tokens[:end]) for tokens in histories for end in range(BLOCK, len(tokens), BLOCK)
    }
    deadline = time.monotonic() + MAX_S
    while (objects.store.status().objects or 0) < ranks * len(blocks):
        assert time.monotonic() < deadline, (objects.store.status(), len(blocks), objects.counts)
        time.sleep(0.01)


def serve(
    model: str, url: str, fingerprint: str, ranks: str, order: str, answer: str, *how: str
) -> None:
    """`answer` to the first prompt: a list in JSON, empty for its own."""
    llm = engine(model, connector(url, fingerprint), int(ranks))
    objects = llm.llm_engine.engine_core.engine_core.scheduler.connector.objects
    known, answers, histories = json.loads(answer), {}, []
    for name in order.split(","):
        prompt = prompts(known)[name]
        answers[name] = generate(llm, prompt)
        known = known or answers[name]["tokens"]
        histories.append([*prompt, *answers[name]["tokens"]])
        wait_until_stored(objects, int(ranks), histories)
    metrics = {
        f"{one.name} {one.labels.get('event', one.labels.get('direction'))}": one.value
        for one in llm.get_metrics()
        if "kvtide" in one.name
    }
    moved = get_kv_transfer_group().objects.counts if has_kv_transfer_group() else {}
    counts = {name: count for name, count in moved.items() if count}
    print(json.dumps({"answers": answers, "counts": counts, "metrics": metrics}), flush=True)
    if how == ("kill",):
        os.kill(os.getpid(), signal.SIGKILL)


def main(command: str, *arguments: str) -> None:
    match command:
        case "make":
            make(arguments[0], int(arguments[1]), *arguments[2:])
        case "serve":
            serve(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
