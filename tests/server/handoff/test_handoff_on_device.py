"""A prefill and a decode server on whatever device there is answer as one server does.

On a GPU pages are written by its copy engine and by the row kernel, the tail by the page kernel,
and steps run as CUDA graphs.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import oracle
from tests.processes import free_port
from tests.server.handoff.server_pairs import ask, handoff_of
from tests.server.serving import PAGE, Child

LENGTHS = (6 * PAGE + 3, 9 * PAGE - 1, 3 * PAGE + 1)
FEW = (
    *("--page-tokens", str(PAGE), "--device-tokens", "2048", "--host-ratio", "2"),
    *("--max-running", "2", "--storage", "none"),
)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_a_pair_of_servers_answers_as_one(
    family: str, tmp_path: Path, device: torch.device
) -> None:
    oracle(family).save_pretrained(tmp_path)
    common = (str(tmp_path), "--device", device.type, "--dtype", "float32", *FEW)
    port = free_port()
    sides = (
        ("--port", "0"),
        ("--port", str(port), "--role", "prefill"),
        ("--port", "0", "--role", "decode", "--prefill-from", f"http://127.0.0.1:{port}",
         "--handoff-min-tokens", str(PAGE)),
    )  # fmt: skip
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child((*common, *words), patience_s=300.0)) for words in sides
        ]
        alone, prefill, decode = (child.client() for child in children)
        for length in LENGTHS:
            prompt = [7 + number * length % 90 for number in range(length)]
            for brought in (length // PAGE * PAGE, 0):  # The second time the pages are there.
                wanted, found = (ask(client, prompt, max_tokens=24) for client in (alone, decode))
                assert handoff_of(found).get("tokens", 0) == brought, handoff_of(found)
                assert _tokens(found) == _tokens(wanted)
                assert _logprobs(found) == pytest.approx(_logprobs(wanted), abs=1e-4)
        for client in (prefill, decode):
            assert client.get("/admin/cache").json()["violations"] == []
        written = prefill.get("/admin/cache").json()["handoff"]["sender"]
        assert written["written_bytes"] > 0 and not written["jobs_failed"]
        assert not any("Traceback" in child.printed for child in children)


def _tokens(found: Any) -> list[int]:
    (choice,) = found["choices"]
    return list(choice["token_ids"])


def _logprobs(found: Any) -> list[float]:
    (choice,) = found["choices"]
    return list(choice["logprobs"]["token_logprobs"])
