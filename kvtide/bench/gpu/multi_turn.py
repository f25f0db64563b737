"""Multi-turn conversations over one system prompt, on a device with too little memory for them.

Every user sends the next turn as soon as the answer ends, so all conversations run concurrently.
The system prompt is cached before the clock starts. The same load runs with the host tier, without
it, and on a device that holds all conversations.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvtide.bench.gpu.engine_bed import IDLE_S, Bed, flush, ttft_s
from kvtide.engine import Engine, Request, RequestParams
from kvtide.spec import Tier


@dataclass(frozen=True, slots=True)
class MultiTurnLoad:
    """Users, turns and lengths of an agent-like load: long inputs, short answers."""

    users: int = 64
    turns: int = 8
    system_tokens: int = 8192
    question_tokens: int = 512
    answer_tokens: int = 16

    @property
    def tokens(self) -> int:
        """Tokens of all conversations at their end, the system prompt counted once."""
        each = self.turns * (self.question_tokens + self.answer_tokens)
        return self.system_tokens + self.users * each


@dataclass(frozen=True, slots=True)
class MultiTurnResult:
    """`cached_tokens`: by tier; `steps`: by kind, as the engine counts them; `idle_s`: how long the
    engine had nothing to compute."""

    where: str
    device_tokens: int
    host_tokens: int
    requests: int
    seconds: float
    prompt_tokens: int
    cached_tokens: dict[str, int]
    steps: dict[str, int]
    idle_s: float

    @property
    def requests_s(self) -> float:
        return self.requests / self.seconds

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "requests_s": self.requests_s}


def measure(bed: Bed, load: MultiTurnLoad, device_fraction: float = 0.25) -> list[MultiTurnResult]:
    """On a device for a fraction of all tokens: with a host tier, without; then on one for all."""
    page = bed.model.memory.page_tokens
    # The last page of a conversation is half empty on average.
    every = load.tokens + (load.users + 2) * page
    small = int(device_fraction * every)
    settings = [
        ("with host tier", small, every),
        ("no host tier", small, 0),
        ("unlimited device", every + 2 * load.users * page, 0),
    ]
    found: list[MultiTurnResult] = []
    few = replace(load, users=min(8, load.users), turns=min(2, load.turns))
    for name, device_tokens, host_tokens in settings:
        with bed.engine(device_tokens, host_tokens, max_running=load.users) as engine:
            engine.warm_up()
            if not found:  # Kernels are compiled once for all three engines.
                _run(name, bed, engine, few, device_tokens, host_tokens)
                flush(engine, Tier.DEVICE, *([Tier.HOST] if host_tokens else ()))
            found.append(_run(name, bed, engine, load, device_tokens, host_tokens))
    return found


def _run(
    name: str, bed: Bed, engine: Engine, load: MultiTurnLoad, device_tokens: int, host_tokens: int
) -> MultiTurnResult:
    system = bed.prompt(load.system_tokens, 1)
    questions = [bed.prompt(load.question_tokens, 2 + n) for n in range(load.users * load.turns)]
    histories = dict.fromkeys(range(load.users), system)
    turns: Counter[int] = Counter()
    running: dict[int, tuple[int, Request]] = {}
    found: Counter[Tier] = Counter()
    prompts, idle_s = 0, 0.0

    def submit(user: int) -> None:
        nonlocal prompts
        histories[user] += questions[user * load.turns + turns[user]]
        prompts += len(histories[user])
        request = engine.submit(RequestParams(histories[user], load.answer_tokens))
        running[request.number] = (user, request)
        turns[user] += 1

    ttft_s(engine, system)
    bed.synchronize()
    steps = engine.steps_by_kind.copy()
    start = time.perf_counter()
    for user in histories:
        submit(user)
    while running:
        begin = time.perf_counter()
        updates = engine.step()
        if not engine.computed:
            time.sleep(IDLE_S)  # Leaves the interpreter to the load threads.
            idle_s += time.perf_counter() - begin
        for update in updates:
            if update.finish is not None:
                user, request = running.pop(update.request.number)
                found.update(request.by_tier)
                histories[user] += tuple(sampled.token for sampled in request.output)
                if turns[user] < load.turns:
                    submit(user)
    bed.synchronize()
    seconds = time.perf_counter() - start
    by_tier = {tier.name.lower(): count for tier, count in found.items()}
    requests = load.users * load.turns
    kinds = dict(engine.steps_by_kind - steps)
    return MultiTurnResult(
        name, device_tokens, host_tokens, requests, seconds, prompts, by_tier, kinds, idle_s
    )
