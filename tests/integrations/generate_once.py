"""Generate once with a store, print what was found and generated, and die in the given way.

python -m tests.integrations.generate_once FAMILY URL [--kill]
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from kvtide.cache import Tokens
from kvtide.integrations.transformers import PrefixCache
from tests.integrations.tiny_models import tiny_model, tokens


def main(family: str, url: str, *how: str) -> None:
    cache = PrefixCache(
        tiny_model(family), url, page_tokens=16, device_size=Tokens(640), fetch_s=60.0, store_s=60.0
    )
    output = cache.generate(torch.tensor([tokens(100, 1)]), max_new_tokens=24, do_sample=False)
    print(cache.last.cached_tokens, output[0].tolist(), sep="\n", flush=True)
    if how == ("--kill",):
        os.kill(os.getpid(), signal.SIGKILL)
    cache.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
