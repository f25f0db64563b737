"""When each turn of a load was asked and answered, and the figures of many turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from kvtide.bench.conversations import Spread


class TurnTimes(NamedTuple):
    """Times are seconds of `time.monotonic`, which all processes of a machine share."""

    user: int
    turn: int
    prompt_tokens: int
    generated_tokens: int
    asked_s: float
    first_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a load, one way.

    server_cpu_s  CPU time of the process with the engine
    client_cpu_s  of each client process; none on the engine alone
    steps         of the engine
    """

    turns: tuple[TurnTimes, ...]
    server_cpu_s: float
    client_cpu_s: tuple[float, ...]
    steps: int

    @property
    def seconds(self) -> float:
        """From the first question to the last answer."""
        return max(t.ended_s for t in self.turns) - min(t.asked_s for t in self.turns)

    @property
    def requests_s(self) -> float:
        return len(self.turns) / self.seconds


@dataclass(frozen=True, slots=True)
class WayFigures:
    """All rounds of one way together.

    fairness     Jain's index of the users' tokens per second: 1 where all are served alike
    slowest      the slowest user's tokens per second, beside the mean
    client_busy  the busiest client process's CPU time, as a fraction of the time
    """

    requests: int
    seconds: float
    requests_s: float
    generated_tokens_s: float
    ttft_ms: Spread
    ttft_max_ms: float
    tpot_ms: Spread | None
    fairness: float
    slowest: float
    step_ms: float
    server_cpu_ms: float
    client_busy: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def way_figures(rounds: Sequence[Round]) -> WayFigures:
    turns = [turn for each in rounds for turn in each.turns]
    seconds = sum(each.seconds for each in rounds)
    ttft = [1e3 * (turn.first_s - turn.asked_s) for turn in turns]
    tpot = [
        1e3 * (turn.ended_s - turn.first_s) / (turn.generated_tokens - 1)
        for turn in turns
        if turn.generated_tokens > 1
    ]
    rates = [rate for each in rounds for rate in _user_rates(each.turns)]
    spread = Spread.of(ttft)
    assert spread is not None, "every turn was answered"
    return WayFigures(
        requests=len(turns),
        seconds=seconds,
        requests_s=len(turns) / seconds,
        generated_tokens_s=sum(turn.generated_tokens for turn in turns) / seconds,
        ttft_ms=spread,
        ttft_max_ms=max(ttft),
        tpot_ms=Spread.of(tpot),
        fairness=jain(rates),
        slowest=min(rates) * len(rates) / sum(rates),
        step_ms=1e3 * seconds / sum(each.steps for each in rounds),
        server_cpu_ms=1e3 * sum(each.server_cpu_s for each in rounds) / len(turns),
        client_busy=max(
            (cpu / each.seconds for each in rounds for cpu in each.client_cpu_s), default=0.0
        ),
    )


def jain(rates: Sequence[float]) -> float:
    """(Σx)² / (n · Σx²): 1 where all are equal, 1/n where one has everything."""
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))


def _user_rates(turns: Iterable[TurnTimes]) -> list[float]:
    """Tokens per second of each user, from its first question to its last answer."""
    of_users: dict[int, list[TurnTimes]] = defaultdict(list)
    for turn in turns:
        of_users[turn.user].append(turn)
    return [
        sum(turn.generated_tokens for turn in own)
        / (max(turn.ended_s for turn in own) - min(turn.asked_s for turn in own))
        for own in of_users.values()
    ]
