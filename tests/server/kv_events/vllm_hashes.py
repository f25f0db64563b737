"""The hashes that vLLM's own code gives, as JSON: its interpreter runs this as a program.

    python -m tests.server.kv_events.vllm_hashes BLOCK_TOKENS < prompts

Prompts are a list of `[tokens, salt]` in JSON; of each it prints the blocks' hashes: whole in hex,
and as events have them.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    # Only vLLM's environment has these.
    from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
    from vllm.utils.hashing import get_hash_fn_by_name  # type: ignore[import-not-found]
    from vllm.v1.core import kv_cache_utils  # type: ignore[import-not-found]
    from vllm.v1.request import Request  # type: ignore[import-not-found]

    sha256 = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(int(sys.argv[1]), sha256)
    found = []
    for number, (tokens, salt) in enumerate(json.load(sys.stdin)):
        request = Request(
            request_id=str(number),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=salt or None,
            block_hasher=hasher,
        )
        shown = [kv_cache_utils.maybe_convert_block_hash(one) for one in request.block_hashes]
        found.append([(one.hex(), n) for one, n in zip(request.block_hashes, shown, strict=True)])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
