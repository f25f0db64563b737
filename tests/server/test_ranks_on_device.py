"""`kvtide serve --tp 2 --rank-backend gloo` on whatever device there is: its ranks share it.

No sizes are given, so the ranks divide what is free.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.server.serving import PAGE, Child
from tests.server.test_ranks import PROMPTS, ask, texts_of


def answered(folder: Path, device: torch.device, *flags: str) -> list[list[str]]:
    computed = ("--device", device.type, "--dtype", "float32", "--page-tokens", str(PAGE))
    arguments = (str(folder), "--port", "0", *computed, "--storage", "none", *flags)
    with Child(arguments, patience_s=300.0) as child:
        client = child.client()
        found = [texts_of(ask(client, prompt)) for prompt in PROMPTS * 2]
        child.terminate()
        assert child.exit_code() == 0, child.printed
        assert "Traceback" not in child.printed
    return found


@pytest.mark.full
def test_ranks_that_share_a_device_answer_as_one(model_folder: Path, device: torch.device) -> None:
    alone = answered(model_folder, device)
    for shape in ("--tp", "--pp"):
        assert answered(model_folder, device, shape, "2", "--rank-backend", "gloo") == alone
