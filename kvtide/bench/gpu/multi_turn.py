"""Many conversations over one system prompt, on a device with too little memory for them.

Every user asks again as soon as the answer is there, so all conversations are under way at once,
and each waits for the others between its turns. The system prompt was asked for before. The same is
served with the host tier, without it, and on a device that has room for all.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvtide.bench.gpu.engine_bed import IDLE_S, Bed, first_token_s, forget
from kvtide.engine import Engine, Request, RequestParams
from kvtide.spec import Tier


@dataclass(frozen=True, slots=True)
class Talk:
    """How many talk, how often, and how long what they say is: as agents do, who are told much and
    say little."""

    users: int = 64
    turns: int = 8
    system_tokens: int = 8192
    question_tokens: int = 512
    answer_tokens: int = 16

    @property
    def tokens(self) -> int:
        """All that is ever said."""
        each = self.turns * (self.question_tokens + self.answer_tokens)
        return self.system_tokens + self.users * each


@dataclass(frozen=True, slots=True)
class Talked:
    """`found`: tokens by tier; `passes`: by kind, as an engine counts them; `idle_s`: how long
    nobody had anything to compute."""

    where: str
    device_tokens: int
    host_tokens: int
    requests: int
    seconds: float
    prompt_tokens: int
    found: dict[str, int]
    passes: dict[str, int]
    idle_s: float

    @property
    def requests_s(self) -> float:
        return self.requests / self.seconds

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "requests_s": self.requests_s}


def measure(bed: Bed, talk: Talk, share: float = 0.25) -> list[Talked]:
    """On a device for a share of all that is said: with a host, without; and on one for all."""
    page = bed.model.memory.page_tokens
    # Pages are filled to their end by nobody: half of one is empty at the end of each conversation.
    every = talk.tokens + (talk.users + 2) * page
    small = int(share * every)
    places = [
        ("device and host", small, every),
        ("device alone", small, 0),
        ("unlimited device", every + 2 * talk.users * page, 0),
    ]
    found: list[Talked] = []
    few = replace(talk, users=min(8, talk.users), turns=min(2, talk.turns))
    for name, device_tokens, host_tokens in places:
        with bed.engine(device_tokens, host_tokens, max_running=talk.users) as engine:
            engine.warm_up()
            if not found:  # What programs are compiled for is the same everywhere.
                _talked(name, bed, engine, few, device_tokens, host_tokens)
                forget(engine, Tier.DEVICE, *([Tier.HOST] if host_tokens else ()))
            found.append(_talked(name, bed, engine, talk, device_tokens, host_tokens))
    return found


def _talked(
    name: str, bed: Bed, engine: Engine, talk: Talk, device_tokens: int, host_tokens: int
) -> Talked:
    system = bed.prompt(talk.system_tokens, 1)
    questions = [bed.prompt(talk.question_tokens, 2 + n) for n in range(talk.users * talk.turns)]
    histories = dict.fromkeys(range(talk.users), system)
    turns: Counter[int] = Counter()
    asked: dict[int, tuple[int, Request]] = {}
    found: Counter[Tier] = Counter()
    prompts, idle_s = 0, 0.0

    def ask(user: int) -> None:
        nonlocal prompts
        histories[user] += questions[user * talk.turns + turns[user]]
        prompts += len(histories[user])
        request = engine.submit(RequestParams(histories[user], talk.answer_tokens))
        asked[request.number] = (user, request)
        turns[user] += 1

    first_token_s(engine, system)
    bed.finish()
    passes = engine.steps_by_kind.copy()
    start = time.perf_counter()
    for user in histories:
        ask(user)
    while asked:
        begin = time.perf_counter()
        updates = engine.step()
        if not engine.computed:
            time.sleep(IDLE_S)  # Threads that bring prefixes want the interpreter.
            idle_s += time.perf_counter() - begin
        for update in updates:
            if update.finish is not None:
                user, request = asked.pop(update.request.number)
                found.update(request.by_tier)
                histories[user] += tuple(chosen.token for chosen in request.output)
                if turns[user] < talk.turns:
                    ask(user)
    bed.finish()
    seconds = time.perf_counter() - start
    by_tier = {tier.name.lower(): count for tier, count in found.items()}
    requests = talk.users * talk.turns
    kinds = dict(engine.steps_by_kind - passes)
    return Talked(
        name, device_tokens, host_tokens, requests, seconds, prompts, by_tier, kinds, idle_s
    )
