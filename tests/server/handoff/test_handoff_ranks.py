"""Handoffs between servers of several ranks: pages are paired by pool, layer and field.

Llama has a history alone. The other families have states, windows, or compressed streams and open
entries, which tensor ranks divide or all have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.restoring import FORMS, family_of
from tests.models.tiny import oracle
from tests.server.handoff.server_pairs import assert_close
from tests.server.handoff.test_prefill_and_decode import COMMON, PROMPT, answer, ask
from tests.server.serving import PAGE, ForkedChild

BEGINNING = PROMPT[: 13 * PAGE + 5]
PROMPTS = (BEGINNING, PROMPT[: 9 * PAGE][::-1], [3, *BEGINNING])
STAGES, TENSORS = ("--pp", "2"), ("--tp", "2")
PATIENCE_S = 300.0


class Served(NamedTuple):
    """What every server of a family is started with, and the answers of one."""

    words: tuple[str, ...]
    expected: list[dict[str, Any]]


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    named: str = request.param
    model: Path = tmp_path_factory.mktemp(named)
    oracle(named).save_pretrained(model)
    apart = "--tokens-per-checkpoint", str(family_of(named).tokens_per_checkpoint)
    words = (str(model), *COMMON, *apart)
    with ForkedChild(words) as alone:
        return Served(words, [ask(alone.client(), prompt) for prompt in PROMPTS])


@pytest.mark.full
@pytest.mark.parametrize("served", [family.name for family in FORMS], indirect=True)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        *((STAGES, ()), ((), STAGES), (TENSORS, ()), ((), TENSORS)),
        *((STAGES, TENSORS), (TENSORS, STAGES), (STAGES, STAGES), (TENSORS, TENSORS)),
    ],
    ids=lambda flags: "".join(flags) or "one",
)
def test_either_side_may_have_ranks_of_any_shape(
    served: Served, prefill: tuple[str, ...], decode: tuple[str, ...]
) -> None:
    """Stages give equal bits; tensor ranks add in another order."""
    common, expected = served
    with ForkedChild((*common, "--role", "prefill", *prefill), patience_s=PATIENCE_S) as there:
        url = f"http://127.0.0.1:{there.client().port}"
        few = ("--handoff-min-tokens", "16")
        with ForkedChild(
            (*common, "--role", "decode", "--prefill-from", url, *few, *decode),
            patience_s=PATIENCE_S,
        ) as here:
            clients = there.client(), here.client()
            for prompt, wanted in zip(PROMPTS, expected, strict=True):
                found = ask(clients[1], prompt)
                assert [each["state"] for each in found["usage"]["handoffs"]] == ["decoding"]
                if TENSORS in (prefill, decode):
                    assert_close(found, wanted)
                else:
                    assert answer(found) == answer(wanted)
            for client in clients:
                assert client.get("/admin/cache").json()["violations"] == []
