"""Users who submit to an engine alone: no service, no HTTP, one thread."""

from __future__ import annotations

import time

from kvtide.bench.conversations import Load
from kvtide.bench.http.turn_times import TurnTimes
from kvtide.engine import Engine, Request, RequestParams

IDLE_S = 0.0005
"""As long as the service's thread sleeps where nothing can run."""


class _User:
    """One conversation: its history, and the times of its present turn."""

    def __init__(self, load: Load, round_: int, number: int) -> None:
        self.number, self.turn = number, 0
        self.asked_s = self.first_s = 0.0
        self._history = load.system(round_)
        # Drawn before the clock starts: a client's process makes them over HTTP.
        self._questions = [load.question(round_, number, turn) for turn in range(load.turns)]
        self._answer_tokens = load.answer_tokens

    def ask(self, engine: Engine) -> Request:
        self._history += self._questions[self.turn]
        self.asked_s, self.first_s = time.monotonic(), 0.0
        return engine.submit(RequestParams(tuple(self._history), self._answer_tokens))

    def answered(self, request: Request, now: float) -> TurnTimes:
        self._history += [sampled.token for sampled in request.output]
        self.turn += 1
        return TurnTimes(
            self.number,
            self.turn - 1,
            len(request.params.tokens),
            len(request.output),
            self.asked_s,
            self.first_s,
            now,
        )


def ask_all(engine: Engine, load: Load, round_: int) -> list[TurnTimes]:
    """All conversations of a round; each user asks again as soon as the answer is there."""
    users = [_User(load, round_, number) for number in range(load.users)]
    asking = {user.ask(engine): user for user in users}
    turns: list[TurnTimes] = []
    while asking:
        updates = engine.step()
        now = time.monotonic()
        if not engine.computed:
            time.sleep(IDLE_S)
        for update in updates:
            user = asking[update.request]
            user.first_s = user.first_s or now
            if update.finish is not None:
                del asking[update.request]
                turns.append(user.answered(update.request, now))
                if user.turn < load.turns:
                    asking[user.ask(engine)] = user
    return turns
