"""Threads that share the work of a call, and end before the call does.

Stores that wait for servers split a batch over a few threads. The memory of a call is its caller's
again when it returns, so no piece of work may outlive the call: pieces end by the deadline, and
those that have not begun by then never do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


class RedisThreads:
    """The calling thread works too: a call of one piece costs no change of thread."""

    def __init__(self, threads: int, name: str) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix=name)

    def run(self, pieces: Sequence[Callable[[], T]], deadline: float) -> list[T]:
        """The results of all pieces, in order. Raises what the first of them raised.

        Pieces must end by the deadline themselves (`time.monotonic`). TimeoutError: not all had
        begun by then.
        """
        if not pieces:
            return []
        others = [self._pool.submit(piece) for piece in pieces[1:]]
        try:
            own = pieces[0]()
        finally:
            _settle(others, deadline)
        if any(other.cancelled() for other in others):
            raise TimeoutError("not all threads were free in time")
        return [own, *(other.result() for other in others)]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _settle(futures: Sequence[Future[T]], deadline: float) -> None:
    _, late = wait(futures, max(0.0, deadline - time.monotonic()))
    begun = [future for future in late if not future.cancel()]
    wait(begun)


def shares(weights: Sequence[int], most: int, min_weight: int) -> list[slice]:
    """Cut a batch into at most so many runs of about the same weight, none much below the least."""
    total = sum(weights)
    count = max(1, min(most, total // min_weight, len(weights)))
    cuts, run, sum_so_far = [0], 1, 0
    for n, weight in enumerate(weights):
        if run < count and sum_so_far >= total * run / count and n > cuts[-1]:
            cuts.append(n)
            run += 1
        sum_so_far += weight
    return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], len(weights)], strict=True)]
