"""`kvtide serve` on whatever device there is, as a user starts it: no sizes are given."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import pytest
import torch

from tests.server.serving import PAGE, Child
from tests.server.talking import Client, Json

PAGES = 6
PROMPTS = [[5 + (n * at + at) % 90 for at in range(PAGES * PAGE + 1)] for n in range(1, 9)]


def asked(client: Client, prompt: list[int]) -> Json:
    return client.complete(prompt, max_tokens=12, temperature=0, return_cached_tokens_details=True)


@pytest.mark.full
def test_a_server_answers_many_and_finds_their_prompts_again(
    model_folder: Path, tmp_path: Path, device: torch.device
) -> None:
    flags = ("--port", "0", "--page-tokens", str(PAGE), "--prefetch-policy", "wait_complete")
    storage = ("--storage", f"file://{tmp_path}")
    arguments = (str(model_folder), "--device", device.type, *flags, *storage)
    for found_on in ("device", "storage"):
        with Child(arguments, patience_s=300.0) as child:
            client = child.client()
            assert f" on {device.type}: " in child.printed
            first = asked(client, PROMPTS[0])
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                answers = [first, *pool.map(asked, repeat(client), PROMPTS[1:])]
            assert [answer["usage"]["completion_tokens"] for answer in answers] == [12] * 8
            # What computing takes is not known before the first: then storage is always asked.
            again = [first] if found_on == "storage" else [asked(client, p) for p in PROMPTS]
            for answer in again:
                assert answer["usage"]["cached_tokens_details"][found_on] == PAGES * PAGE
            child.terminate()
            assert child.exit_code() == 0
            assert "Traceback" not in child.printed
