"""Checkpoints where they pay: placement learned from where prompts parted before.

The model is one table. A page boundary has an alignment (the power of two that divides its number)
and a distance to the end of the request that computes it. For each pair of both the policy counts
how many boundaries it has seen and how many times a prompt parted there: a rate. Chat templates,
block-wise traces and shared documents all show up in it, as rates that are high at certain
distances, alignments or both.

A checkpoint at c saves a prompt that parts at m ≥ c the pages from the checkpoint before up to c.
Checkpoints are taken greedily, most expected pages saved first, as long as one is worth its price.
The price follows the budget: it rises while more than `per_request` checkpoints are kept per
request, and falls while fewer are, but never so far that a checkpoint is bought that hardly helps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtide.index.placement import Placement

ALIGNMENTS = 8
DISTANCES = 16

_HOPE = 4.0
"""Prompts that are taken to have gone on from the end of a request before any did."""

_DOUBT = 100.0
"""Boundaries elsewhere that are taken to have been seen without a prompt parting there."""

_LEAST_PRICE = 0.25
_PRICE_STEP = 0.02
_FORGET_AFTER = 4096
_LOOK_EVERY = 8
_FIT_EVERY = 64
_NEARLY_ALL = 0.99

Atom = tuple[int, float]
"""A boundary, and how many prompts are expected to part at it and its likes."""


class CostBased(Placement):
    """See the module. `per_request`: how many checkpoints to spend on a request, on average."""

    def __init__(self, per_request: float = 2.0) -> None:
        self._per_request = per_request
        self._price = 1.0
        self._requests = 0
        self._parted = [[0.0] * ALIGNMENTS for _ in range(DISTANCES)]
        self._seen = [[_DOUBT] * ALIGNMENTS for _ in range(DISTANCES)]
        self._parted[0] = [_HOPE] * ALIGNMENTS
        self._seen[0] = [2 * _HOPE] * ALIGNMENTS
        self._rates: list[tuple[int, list[tuple[int, float]]]] = []
        self._fit()

    def parted(self, at: int, stop: int) -> None:
        if at:
            self._parted[_distance(max(0, stop - at))][_alignment(at)] += 1.0

    def checkpoints(self, start: int, end: int, branches: Sequence[int]) -> Iterable[int]:
        chosen = [stop for stop in branches if start < stop <= end]
        return chosen + self._choose(start, self._atoms(start, end), chosen)

    def placed(self, start: int, end: int, count: int) -> None:
        self._requests += 1
        if self._requests % _LOOK_EVERY == 0:
            self._look(start, end)
        if self._requests % _FIT_EVERY == 0:
            self._fit()
        change = _PRICE_STEP * (count - self._per_request)
        self._price = max(_LEAST_PRICE, self._price * (1 + change))

    # -- learning ---------------------------------------------------------------------------

    def _look(self, start: int, end: int) -> None:
        """Count this request's boundaries, for all the requests that are not looked at."""
        for distance, seen in enumerate(self._seen):
            nearest, farthest = _bucket(distance, start, end)
            for alignment in range(ALIGNMENTS) if nearest > farthest else ():
                count = _count(nearest, alignment) - _count(farthest, alignment)
                seen[alignment] += count * _LOOK_EVERY

    def _fit(self) -> None:
        """Turn counts into rates, for the kinds of boundary at which nearly all prompts parted."""
        if self._requests % _FORGET_AFTER == 0:
            for row in (*self._parted, *self._seen):
                row[:] = [value / 2 for value in row]
        kinds = [(d, a) for d in range(DISTANCES) for a in range(ALIGNMENTS)]
        kinds.sort(key=lambda kind: -self._parted[kind[0]][kind[1]])
        left = _NEARLY_ALL * sum(map(sum, self._parted))
        rates: dict[int, list[tuple[int, float]]] = {}
        for distance, alignment in kinds:
            if left <= 0:
                break
            parted = self._parted[distance][alignment]
            left -= parted
            rate = parted / self._seen[distance][alignment]
            rates.setdefault(distance, []).append((alignment, rate))
        self._rates = sorted(rates.items())

    # -- choosing ---------------------------------------------------------------------------

    def _atoms(self, start: int, end: int) -> list[Atom]:
        """The boundaries in (start, end], one for all that look alike, deepest first."""
        atoms: list[Atom] = []
        for distance, of_distance in self._rates:
            nearest, farthest = _bucket(distance, start, end)
            if nearest <= farthest:
                break
            for alignment, rate in of_distance:
                last = _deepest(nearest, alignment)
                if last > farthest:
                    count = _count(nearest, alignment) - _count(farthest, alignment)
                    atoms.append((last, rate * count))
        atoms.sort(reverse=True)
        return atoms

    def _choose(self, start: int, atoms: list[Atom], taken: Sequence[int]) -> list[int]:
        """Greedily the boundaries that save most, each worth its price."""
        chosen: list[int] = []
        while True:
            stops = sorted([*taken, *chosen], reverse=True)
            best, best_gain = 0, self._price
            mass, number = 0.0, 0
            below = stops[0] if stops else start
            for boundary, weight in atoms:
                while boundary < below:
                    mass, number = 0.0, number + 1
                    below = stops[number] if number < len(stops) else start
                mass += weight
                gain = mass * (boundary - below)
                if gain > best_gain:
                    best, best_gain = boundary, gain
            if not best:
                return chosen
            chosen.append(best)


def _bucket(distance: int, start: int, end: int) -> tuple[int, int]:
    """The boundaries in (start, end] at this distance: up to the first result, past the second."""
    farthest = end - (1 << distance) if distance < DISTANCES - 1 else start
    return end - (1 << distance >> 1), max(start, farthest)


def _distance(pages: int) -> int:
    """0, 1, 2–3, 4–7, … pages before the end."""
    return min(pages.bit_length(), DISTANCES - 1)


def _alignment(boundary: int) -> int:
    return min((boundary & -boundary).bit_length() - 1, ALIGNMENTS - 1)


def _deepest(upto: int, alignment: int) -> int:
    """The last boundary ≤ `upto` with exactly this alignment; 0 or less if there is none."""
    step = 1 << alignment
    last = upto // step * step
    return last if alignment == ALIGNMENTS - 1 or last // step % 2 else last - step


def _count(upto: int, alignment: int) -> int:
    """How many boundaries in [1, upto] have exactly this alignment."""
    multiples = upto >> alignment
    return multiples if alignment == ALIGNMENTS - 1 else (multiples + 1) // 2
