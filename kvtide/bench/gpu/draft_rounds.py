"""A round of speculation beside a decode step: one verify step, and the drafts for the next.

Two engines have one model's weights: one drafts, one does not. Both hold a batch of equal prompts
with a random KV history, and take turns in blocks of steps. Random weights draft tokens that are
never accepted, so that the number of drafts is held fixed; in a second measurement every draft
counts as accepted. Other measurements leave the number of drafts to the engine: of drafts that are
never accepted, which it has to find, and of drafts that are accepted with a chance, which must not
be slower than decode.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from statistics import mean
from typing import Any

import torch

from kvtide.bench.gpu import history
from kvtide.bench.gpu.drafted_shapes import DraftedModel
from kvtide.bench.gpu.engine_bed import (
    TOKENS_PER_CHECKPOINT,
    Bed,
    Drafts,
    start,
    step_s,
    stop,
)
from kvtide.cache import TieredCache
from kvtide.engine import Engine, RequestParams
from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.runner import StepOutput
from kvtide.engine.speculation.draft_length import TRIAL_TOKENS
from kvtide.engine.speculation.drafter import DraftWish, UnreadDrafts, UnreadStep
from kvtide.engine.speculation.model_drafter import ModelDrafter

TAIL_TOKENS = 8
"""Tokens of a prompt behind the pages that it finds in the cache."""
CHECKPOINTS = 16
"""Windows and states of a request have slots for so many, at least: more than it holds at once."""
NEVER_GOAL, CHOSEN_GOAL = 0.9, 0.95
"""Of the tokens a second without drafts: where none is accepted, and where some are."""

Note = Callable[[str], None]
"""Reports what begins."""


# -- drafters ---------------------------------------------------------------------------------


class _AgreedToken(int):
    """A draft that equals whatever is sampled."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


HOLD_CYCLES = 20_000_000
"""Of a device that is kept busy while the host works: some 10 ms."""


class DeviceGaps:
    """Times the device from the end of drafts to the end of the verify step behind them.

    It is longer than that step where the device waits for the host to launch it. The same with a
    device that is held busy meanwhile has no wait: the difference is the wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._held = device, False
        self._open: Any = None
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def timed(self, *, held: bool) -> Iterator[list[float]]:
        """Seconds of all gaps that begin and end inside; there when it ends."""
        found: list[float] = []
        self._held, self._open, self._spans = held, None, []
        yield found
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found += [self._seconds(*span) for span in self._spans]
        self._held = False

    def begin(self) -> None:
        """All drafts are queued."""
        if self._held and self._device.type == "cuda":
            torch.cuda._sleep(HOLD_CYCLES)
        self._open = self._mark()

    def end(self) -> None:
        """The verify step is queued, and nothing behind it."""
        if self._open is not None:
            self._spans.append((self._open, self._mark()))
        self._open = None

    def forget(self) -> None:
        """Another step comes first."""
        self._open = None

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        elapsed: float = end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3
        return elapsed


class RoundDrafter(ModelDrafter):
    """A draft model's passes, timed.

    chance   of a draft behind accepted ones to count as accepted; 0 where tokens decide
    seconds  in `extend` and in `propose`, each waited for; None where it is not timed
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.chance = 0.0
        self.seconds: dict[str, float] | None = None
        self.gaps = DeviceGaps(self._cache.config.torch_device)
        self._random = random.Random(7)

    def extend(
        self, chunks: Sequence[ScheduledChunk], output: StepOutput, wishes: Sequence[DraftWish]
    ) -> None:
        if wishes:
            self.gaps.forget()
        with self._timed("extend"):
            super().extend(chunks, output, wishes)

    def draft_ahead(self, step: UnreadStep, wishes: Sequence[DraftWish]) -> UnreadDrafts | None:
        self.gaps.end()
        if self.chance:
            agreed = [len(_agreed(chunk.drafts)) for chunk in step.chunks]
            counts = torch.tensor(agreed, dtype=torch.int32)
            step.sampled.accepted.copy_(counts, non_blocking=True)
        if self.seconds is not None:
            return None  # Only `extend` and `propose` are timed.
        drafts = super().draft_ahead(step, wishes)
        self.gaps.begin()
        return drafts

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        with self._timed("propose"):
            proposed = super().propose(wishes)
        return [self._chosen(drafts) for drafts in proposed] if self.chance else proposed

    def _chosen(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """With drafts that count as accepted, up to the first that does not."""
        agreed = [*takewhile(lambda draft: self._random.random() < self.chance, drafts)]
        return (*map(_AgreedToken, agreed), *drafts[len(agreed) :])

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        if self.seconds is None:
            yield
            return
        self._wait()
        begun = time.perf_counter()
        yield
        self._wait()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begun

    def _wait(self) -> None:
        device = self._cache.config.torch_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _agreed(drafts: Sequence[int]) -> list[int]:
    return [*takewhile(lambda draft: isinstance(draft, _AgreedToken), drafts)]


# -- what is measured -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundLoad:
    """`goal`: a round in decode steps, at the most. `blocks` of so many `steps` each are timed."""

    batch: int
    context: int
    goal: float
    draft_tokens: int = 3
    steps: int = 20
    blocks: int = 6

    @property
    def answer_tokens(self) -> int:
        """Enough for rounds whose drafts are all accepted."""
        rejected, accepted = self.blocks + 5, self.blocks // 2 + 4
        return self.steps * (rejected + accepted * (self.draft_tokens + 1)) + 2 * TAIL_TOKENS


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Seconds of a decode step and of a round, medians over blocks; `ratio` is of paired blocks.

    accepted  "no" drafts or "all"
    drafts    verified per request and round: fewer where rejected tokens are computed again
    phases_s  of a round, each part waited for: `verify` is all besides the draft
    wait_s    of a round, in which the device waits for the host before the verify step; None where
              no step was drafted for ahead
    """

    model: str
    drafter: str
    batch: int
    context: int
    accepted: str
    decode_s: float
    round_s: float
    ratio: float
    goal: float | None
    drafts: float
    accept_length: float
    steps_by_kind: dict[str, int]
    phases_s: dict[str, float] = field(default_factory=dict)
    wait_s: float | None = None

    @property
    def reached(self) -> bool | None:
        return None if self.goal is None else self.ratio <= self.goal

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"reached": self.reached}


@dataclass(frozen=True, slots=True)
class ChosenResult:
    """Tokens a second where the engine chooses the number of drafts, and without drafts.

    chance    of a draft to be accepted
    drafts    verified per request and step
    accepted  of these
    """

    model: str
    drafter: str
    batch: int
    context: int
    chance: float
    on_tokens_s: float
    off_tokens_s: float
    ratio: float
    drafts: float
    accepted: float = 0.0

    @property
    def goal(self) -> float:
        return CHOSEN_GOAL if self.chance else NEVER_GOAL

    @property
    def reached(self) -> bool:
        return self.ratio >= self.goal

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"goal": self.goal, "reached": self.reached}


class Pair:
    """An engine that drafts and one that does not, which decode the same batch."""

    def __init__(self, bed: Bed, on: Engine, off: Engine, drafter: RoundDrafter) -> None:
        self.bed, self.on, self.off, self.drafter = bed, on, off, drafter

    def warm_up(self, steps: int) -> None:
        """Graphs are captured when a step first needs them."""
        for engine in (self.off, self.on):
            step_s(self.bed, engine, steps)

    def blocks(self, blocks: int, steps: int) -> list[tuple[float, float]]:
        """Seconds of a step with drafts and without, in blocks that alternate."""
        found = []
        for number in range(blocks):
            order = (self.on, self.off) if number % 2 == 0 else (self.off, self.on)
            by_engine = {engine: step_s(self.bed, engine, steps) for engine in order}
            found.append((by_engine[self.on], by_engine[self.off]))
        return found

    def counts(self) -> tuple[int, int, int]:
        """Drafts accepted and rejected, and verified chunks, so far."""
        lengths = self.on.accept_length_stats
        assert lengths is not None, "an engine with a drafter counts"
        verified = sum(counts.total() for counts in lengths.steps.values())
        return lengths.accepted, lengths.rejected, verified

    def phases_s(self, steps: int) -> dict[str, float]:
        """Where each part is waited for, drafts have other graphs: these are captured before."""
        self.drafter.seconds = {}
        step_s(self.bed, self.on, 2)
        self.drafter.seconds = {}
        whole = step_s(self.bed, self.on, steps)
        parts = {part: each / steps for part, each in self.drafter.seconds.items()}
        self.drafter.seconds = None
        return {"verify": whole - sum(parts.values()), **parts}

    def wait_s(self, steps: int) -> float | None:
        """What the device waits in a round for the host to launch the verify step."""
        seconds = []
        for held in (False, True):
            with self.drafter.gaps.timed(held=held) as found:
                step_s(self.bed, self.on, steps)
            seconds.append(found)
        waiting, busy = seconds
        return max(mean(waiting) - mean(busy), 0.0) if waiting and busy else None


@contextmanager
def pair(
    model: DraftedModel, device: torch.device, load: RoundLoad, note: Note, *, fixed: bool
) -> Iterator[Pair]:
    """Both engines, in whose batches all requests decode."""
    page = model.target.memory.page_tokens
    bed, plain = Bed(model.target, device), Bed(model.plain, device)
    answer = load.answer_tokens
    capacity = load.batch * ((load.context + TAIL_TOKENS + answer) // page + 3) * page
    drafters: list[RoundDrafter] = []

    def drafter(cache: TieredCache) -> RoundDrafter:
        draft = model.draft
        drafters.append(RoundDrafter(draft, draft.captures, cache, model.target.vocabulary))
        return drafters[0]

    prompts = [bed.prompt(load.context + TAIL_TOKENS, 9000 + n) for n in range(load.batch)]
    sizes: dict[str, Any] = {
        "max_running": max(load.batch, 2),
        "tokens_per_checkpoint": min(TOKENS_PER_CHECKPOINT, load.context // CHECKPOINTS),
    }
    drafts = Drafts(drafter, load.draft_tokens, fixed)
    with (
        plain.engine(capacity, **sizes) as off,
        bed.engine(capacity, **sizes, drafts=drafts) as on,
    ):
        note(f"batch {load.batch}: engines opened")
        for engine in (off, on):
            history.commit(engine.cache, prompts)
            requests = start(engine, [RequestParams(tokens, answer) for tokens in prompts])
            found = {sum(request.by_tier.values()) for request in requests}
            assert found == {load.context}, f"{found} tokens of {load.context} were cached"
        note(f"batch {load.batch}: all requests decode after {load.context:,} tokens")
        yield Pair(bed, on, off, drafters[0])
        for engine in (off, on):
            stop(engine)


# -- measuring --------------------------------------------------------------------------------


def rounds(
    model: DraftedModel, names: tuple[str, str], device: torch.device, load: RoundLoad, note: Note
) -> Iterator[RoundResult]:
    """Rounds of which no draft is accepted, then rounds of which all are.

    names  of the model and of its drafter
    """
    with pair(model, device, load, note, fixed=True) as both:
        both.warm_up(load.steps)
        note(f"batch {load.batch}: warm")
        yield _rounds(both, names, load, "no", load.blocks)
        both.drafter.chance = 1.0
        step_s(both.bed, both.on, load.steps // 2)
        note(f"batch {load.batch}: drafts are accepted now")
        yield _rounds(both, names, load, "all", load.blocks // 2)


def _rounds(
    both: Pair, names: tuple[str, str], load: RoundLoad, accepted: str, blocks: int
) -> RoundResult:
    before, kinds = both.counts(), both.on.steps_by_kind.copy()
    seconds = both.blocks(blocks, load.steps)
    taken, refused, verified = (b - a for a, b in zip(before, both.counts(), strict=True))
    ran = {kind: count - kinds[kind] for kind, count in both.on.steps_by_kind.items()}
    return RoundResult(
        *names,
        batch=load.batch,
        context=load.context,
        accepted=accepted,
        decode_s=statistics.median(off_s for _, off_s in seconds),
        round_s=statistics.median(on_s for on_s, _ in seconds),
        ratio=statistics.median(on_s / off_s for on_s, off_s in seconds),
        goal=load.goal if accepted == "no" else None,
        drafts=(taken + refused) / (blocks * load.steps * load.batch),
        accept_length=1 + taken / verified if verified else 1.0,
        steps_by_kind={kind: count for kind, count in ran.items() if count},
        phases_s=both.phases_s(load.steps),
        wait_s=both.wait_s(load.steps),
    )


def chosen(
    model: DraftedModel,
    names: tuple[str, str],
    device: torch.device,
    load: RoundLoad,
    chance: float,
    note: Note,
) -> ChosenResult:
    """Blocks of the engine's own number of drafts, of which each is accepted with this chance.

    Trials of drafts that do not pay are in few blocks, so speeds are means over all blocks.
    """
    with pair(model, device, load, note, fixed=False) as both:
        both.drafter.chance = chance
        both.warm_up(8 * TRIAL_TOKENS)  # Steps are timed, and estimates settle.
        note(f"batch {load.batch}: warm, {chance:.0%} of drafts are accepted")
        before = both.counts()
        seconds = both.blocks(load.blocks, load.steps)
        taken, refused, _ = (b - a for a, b in zip(before, both.counts(), strict=True))
    steps = load.blocks * load.steps * load.batch
    accepted = taken / steps
    on_s, off_s = (statistics.fmean(each) for each in zip(*seconds, strict=True))
    return ChosenResult(
        *names,
        batch=load.batch,
        context=load.context,
        chance=chance,
        on_tokens_s=(1 + accepted) * load.batch / on_s,
        off_tokens_s=load.batch / off_s,
        ratio=(1 + accepted) * off_s / on_s,
        drafts=(taken + refused) / steps,
        accepted=accepted,
    )
