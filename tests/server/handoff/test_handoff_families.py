"""Every family over HTTP: a prefill and a decode server, as processes, answer as one engine does.

Every log-probability is compared, to the last bit, with an engine that keeps nothing. The
conversations begin cold, and go on with pages that the decode server has, several at a time. Then
the decode server is started anew, and the prefill server behind it: each finds its pages in a store
that both share.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtide.engine import Engine
from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import open_engine
from tests.engine.restoring import ALL_NAMES, HOT_NAMES, family_of
from tests.models.tiny import VOCABULARY, oracle
from tests.server.conversing import acknowledged, computed, scored
from tests.server.handoff.server_pairs import (
    Json,
    ServerPair,
    ServerProcess,
    ask,
    handoff_of,
    read,
)
from tests.server.serving import PAGE

FLAGS = (
    f"--deterministic --page-tokens {PAGE} --chunk-tokens 64 "
    "--prefetch-policy wait_complete --prefetch-min-tokens 1"
).split()
LENGTHS = (5 * PAGE + 3, 6 * PAGE, 6 * PAGE + 1, 9 * PAGE - 1)
"""Of prompts: a tail of a few tokens, of a whole page, of one token, and of all but one."""
ANSWER = 6


def usable(prompt: Sequence[int]) -> int:
    """Tokens of a prompt in whole pages before its last token."""
    return (len(prompt) - 1) // PAGE * PAGE


def alone(model: Path) -> Engine:
    """An engine that keeps nothing."""
    settings = Settings(model=str(model), page_tokens=PAGE, deterministic=True, host_ratio=0.0)
    return open_engine(settings).engine


class Conversations:
    """Prompts that share a beginning, each longer with every turn.

    states   of all handoffs
    brought  tokens of prompts that the decode server's tiers had
    fetches  from storage, by what came of them
    there    tokens of prompts that the prefill server's tiers had
    """

    def __init__(self, model: Path) -> None:
        self._rng = random.Random(5)
        root = self.text(70)
        self._prompts = [root[: n // 2] + self.text(n - n // 2) for n in LENGTHS]
        self._alone: Engine = alone(model)
        self.states: Counter[str] = Counter()
        self.brought: Counter[str] = Counter()
        self.fetches: Counter[str] = Counter()
        self.there: Counter[str] = Counter()

    def text(self, count: int) -> list[int]:
        return [self._rng.randrange(1, VOCABULARY) for _ in range(count)]

    def turn(self, pair: ServerPair, clients: ThreadPoolExecutor) -> None:
        """The first prompt alone, the others at once."""
        client = pair.decode.client
        answers = [ask(client, self._prompts[0], max_tokens=ANSWER)]
        answers += clients.map(lambda p: ask(client, p, max_tokens=ANSWER), self._prompts[1:])
        self._prompts = [
            self._heard(prompt, found) for prompt, found in zip(self._prompts, answers, strict=True)
        ]

    def _heard(self, prompt: Sequence[int], found: Json) -> list[int]:
        """The prompt of the next turn."""
        replied = scored(found)
        assert replied == computed(self._alone, prompt)
        handoff = handoff_of(found)
        assert handoff["state"] in ("decoding", "declined"), handoff
        self.states[handoff["state"]] += 1
        self.there.update(handoff["prefill_cached_tokens"])
        usage = found["usage"]
        self.brought.update(usage["cached_tokens_details"])
        self.fetches.update(fetch["outcome"] for fetch in usage["storage_fetches"])
        assert handoff["tokens"] + sum(usage["cached_tokens_details"].values()) == usable(prompt)
        return [*prompt, *(token for token, *_ in replied), *self.text(3 * PAGE)]

    def close(self) -> None:
        self._alone.cache.close()


CELLS = [
    *((family, "all") for family in (*ALL_NAMES, *HOT_NAMES)),
    *((family, family.partition(" ")[2]) for family in HOT_NAMES),
]
"""Families with the decode server's residency, and the prefill server's."""


@pytest.mark.full
@pytest.mark.parametrize(("family", "prefills"), CELLS)
def test_answers_are_those_of_one_engine(family: str, prefills: str, tmp_path: Path) -> None:
    named, model = family_of(family), tmp_path / "model"
    oracle(named.model).save_pretrained(model)
    apart = ("--tokens-per-checkpoint", str(named.tokens_per_checkpoint))
    decodes = family.partition(" ")[2] or "all"
    with (
        ThreadPoolExecutor(4) as clients,
        ServerPair(
            model,
            prefill_flags=("--resident", prefills),
            decode_flags=("--resident", decodes),
            common=(*FLAGS, *apart, "--storage", f"file://{tmp_path}/pages"),
        ) as pair,
    ):
        talks = Conversations(model)
        talks.turn(pair, clients)
        assert talks.states["decoding"] == len(LENGTHS)
        assert talks.brought.total() < len(LENGTHS) * LENGTHS[0], "the prompts' beginnings alone"
        talks.turn(pair, clients)
        assert talks.states["decoding"] == 2 * len(LENGTHS)
        assert talks.brought["device"] + talks.brought["host"] > 0
        for server in (pair.prefill, pair.decode):
            server.settled()
            acknowledged(server.url)
        pair.restart_decode()
        talks.fetches.clear()
        talks.turn(pair, clients)
        assert talks.states["decoding"] > 2 * len(LENGTHS)
        # Pages of one residency are not found with another.
        assert talks.fetches["fetched"] > 0 or prefills != decodes
        for server in (pair.prefill, pair.decode):
            server.settled()
            acknowledged(server.url)
        pair.restart_prefill()
        pair.until_handed_over(lambda: talks.text(LENGTHS[0]))
        talks.states.clear()
        talks.there.clear()
        talks.turn(pair, clients)
        assert talks.states["decoding"] > 0
        assert talks.there["storage"] > 0 or prefills != decodes
        pair.settled()
        talks.close()


# -- retraction -----------------------------------------------------------------------------------

LONG, URGENT = (5 * PAGE + 3, 150), (9 * PAGE - 1, ANSWER)
"""Tokens of a prompt and of its answer."""
DEVICE_TOKENS = 20 * PAGE
"""Either fits, and not both."""


def retracted(server: ServerProcess) -> int:
    metrics = server.client.get("/metrics").body.decode()
    (count,) = re.findall(r"kvtide_requests_retracted_total (\d+)", metrics)
    return int(count)


@pytest.mark.full
@pytest.mark.parametrize("family", [*ALL_NAMES, *HOT_NAMES])
def test_a_request_that_is_retracted_goes_on_as_one_engine_does(
    family: str, tmp_path: Path
) -> None:
    """An urgent request takes the slots of one that decodes behind a handoff, and whose pages are
    those that the peer wrote and its own."""
    named, model, rng = family_of(family), tmp_path / "model", random.Random(7)
    oracle(named.model).save_pretrained(model)
    few = ("--device-tokens", str(DEVICE_TOKENS), "--host-ratio", "8")
    if family == "mistral-windows":  # Windows give slots back: here the batch has no place.
        few = ("--device-tokens", str(DEVICE_TOKENS), "--host-ratio", "8", "--max-running", "1")
    few += ("--resident", family.partition(" ")[2] or "all")
    one = alone(model)
    long, urgent = ([rng.randrange(1, VOCABULARY) for _ in range(n)] for n, _ in (LONG, URGENT))
    with ServerPair(model, decode_flags=few, common=(*FLAGS, "--storage", "none")) as pair:
        waiting = pair.asking(long, max_tokens=LONG[1])
        pair.decode.until(lambda report: report["requests"]["running"])
        answers = {URGENT: (urgent, ask(pair.decode.client, urgent, max_tokens=ANSWER, priority=1))}
        assert retracted(pair.decode) == 1
        answers[LONG] = long, read(waiting)
        for (_, count), (prompt, found) in answers.items():
            assert handoff_of(found)["state"] == "decoding"
            assert scored(found) == computed(one, prompt, count)
        pair.settled()
    one.cache.close()
