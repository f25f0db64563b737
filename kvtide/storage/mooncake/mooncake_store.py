"""The pool of memory that many machines share, as a store.

Objects lie in the memory of the processes that gave some to the pool (`segment=`), and are lost
with them. The master knows what lies where; when it is started anew, all is forgotten. Bytes go
straight from and into memory that was lent to the store; other memory is copied through a buffer.

What must always hold: no caller waits longer than the time-out, even if a machine freezes; the
library is not called again once it was closed; memory is the caller's again unless a
`LingeringError` is raised.

Objects are removed although another process may be reading them: the library's own protection, a
lease of ten seconds after every look-up of an object, would delay removals as long. Such a reader
may find other bytes, which the object's checksum reveals. An object that another process is writing
at the same moment counts as written, and is lost if that write fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from kvtide.storage.mooncake.library import (
    MASTER_AWAY,
    PROBE_EVERY_S,
    Code,
    Master,
    close,
    load,
    set_up,
)
from kvtide.storage.mooncake.library_threads import CallRefusedError, GivenUpError, LibraryThreads
from kvtide.storage.mooncake.mooncake_settings import MooncakeSettings
from kvtide.storage.mooncake.registered_memory import Loan, MemoryRange, RegisteredBuffers, where
from kvtide.storage.store import MISSING, LingeringError, Removed, StoreError, StoreStatus
from kvtide.storage.url import StoreURL

T = TypeVar("T")
MooncakeCall = Callable[[Sequence[str], Sequence[int], Sequence[int]], list[int]]

THREADS = 8
REGISTERED_PER_S = 10**9


class StuckError(StoreError):
    """The library is at the call still."""


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """Where the library reads or writes an object of a batch."""

    number: int
    address: int
    bytes: int


Loans = Generator[tuple[Loan, list[StagedPiece]], None, None]


class MooncakeStore:
    """`forgets`: what lies in this process's own memory is gone when the store is closed."""

    def __init__(self, url: StoreURL, space: bytes) -> None:
        self._settings = MooncakeSettings.of(url)
        self.name = self._settings.name
        self.forgets = self._settings.segment_bytes > 0
        self._prefix = f"kvtide:{space.hex()}:"
        new_client = load(self._settings)
        self._master = Master(self._settings)
        self._master.check()
        self._client = new_client()
        self._threads = LibraryThreads("mooncake", THREADS)
        self._staging = RegisteredBuffers(self._settings.buffer_bytes)
        self._registered: list[MemoryRange] = []
        self._too_large = 0
        self._refused = 0
        self._unregistered = 0
        self._is_set_up = False
        self._closed = False
        self._set_up()

    def _set_up(self) -> None:
        try:
            # Memory given to the pool is registered meanwhile, which takes its time with RDMA.
            patience = self._settings.segment_bytes / REGISTERED_PER_S
            if not self._run(self._begin, self._deadline() + patience):
                raise self._master.error(
                    f"the library could not be set up with {self._settings.local} as its address "
                    f"and a segment of {self._settings.segment_bytes:,} B, see its log above"
                )
        except StoreError:
            self._closed = True
            self._threads.finish(self._let_go, 0)
            raise

    def _begin(self) -> bool:
        self._is_set_up = set_up(self._client, self._settings) == Code.OK
        return self._is_set_up and self._register(self._staging.all)

    def lend(self, block: memoryview) -> None:
        """Register it. If that takes longer than the time-out it goes on by itself."""
        memory = where(block)
        if any(known.holds(memory) for known in self._registered):
            return
        try:
            known = self._run(lambda: self._register(memory), self._deadline())
        except StuckError:
            return
        self._unregistered += not known

    def _register(self, memory: MemoryRange) -> bool:
        if self._client.register_buffer(memory.start, memory.bytes) != Code.OK:
            return False
        self._registered.append(memory)
        return True

    # -- objects ------------------------------------------------------------------------------

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        names = self._names(keys)
        codes = self._ask(lambda: self._client.batch_is_exist(names)) if names else []
        return [code == 1 for code in codes]

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        assert len(keys) == len(targets)
        deadline, names, get = self._deadline(), self._names(keys), self._client.batch_get_into
        lengths = [MISSING] * len(names)
        pieces, elsewhere = self._sort(targets)
        for piece, code in self._move(get, names, pieces, deadline):
            lengths[piece.number] = code if code > 0 else MISSING
        with closing(self._loans(elsewhere, deadline)) as loans:
            for loan, pieces in loans:
                answers = self._move(get, names, pieces, deadline, loan)
                for place, (piece, code) in enumerate(answers):
                    if code > 0:
                        targets[piece.number][:code] = loan.memory(place)[:code]
                        lengths[piece.number] = code
        return lengths

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[bool]:
        assert len(keys) == len(sources)
        deadline, names, put = self._deadline(), self._names(keys), self._client.batch_put_from
        there = [False] * len(names)
        pieces, elsewhere = self._sort(sources)
        for piece, code in self._move(put, names, pieces, deadline):
            there[piece.number] = self._is_put(code)
        with closing(self._loans(elsewhere, deadline)) as loans:
            for loan, pieces in loans:
                for place, piece in enumerate(pieces):
                    loan.memory(place)[: piece.bytes] = sources[piece.number]
                for piece, code in self._move(put, names, pieces, deadline, loan):
                    there[piece.number] = self._is_put(code)
        return there

    def _is_put(self, code: int) -> bool:
        self._refused += code == Code.POOL_FULL
        return code == Code.OK

    def remove(self, keys: Sequence[bytes]) -> int:
        names = self._names(keys)
        codes = self._ask(lambda: self._client.batch_remove(names, True)) if names else []
        return sum(code == Code.OK for code in codes)

    def clear(self) -> Removed:
        pattern = f"^{self._prefix}"
        (count,) = self._ask(lambda: [self._client.remove_by_regex(pattern, True)])
        if count < 0:
            raise self._error(f"the objects could not be removed ({count})")
        return Removed(count)

    def status(self) -> StoreStatus:
        self._ask(lambda: [self._code_of_master()])
        notes = {
            "calls are stuck in the Mooncake library": self._threads.stuck,
            "objects were refused: the pool is full, or no process gives it memory (segment=)": (
                self._refused
            ),
            f"objects did not lie in lent memory, and a buffer of {self._staging.all.bytes:,} B "
            "was too small for them": self._too_large,
            "blocks of memory could not be registered; what lies in them is copied": (
                self._unregistered
            ),
        }
        return StoreStatus(notes=tuple(f"{count} {text}" for text, count in notes.items() if count))

    def close(self) -> None:
        """Waits for calls in flight, but no longer than the time-out."""
        if not self._closed:
            self._closed = True
            self._threads.finish(self._let_go, self._settings.timeout_s)

    def _let_go(self) -> None:
        """Close the library once its master answers, even long after the store was closed.

        The library's close holds the interpreter lock. Without a master it would hold it for
        seconds, and stop every thread of the process.
        """
        while self._is_set_up and self._code_of_master() in MASTER_AWAY:
            time.sleep(PROBE_EVERY_S)
        for memory in self._registered:
            self._client.unregister_buffer(memory.start)
        close(self._client)

    def _code_of_master(self) -> int:
        return self._client.batch_is_exist([f"{self._prefix}status"])[0]

    # -- where objects lie --------------------------------------------------------------------

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _sort(self, memories: Sequence[memoryview]) -> tuple[list[StagedPiece], list[StagedPiece]]:
        """What lies in registered memory, and what lies elsewhere."""
        pieces: list[StagedPiece] = []
        elsewhere: list[StagedPiece] = []
        for number, memory in enumerate(memories):
            place = where(memory)
            known = any(block.holds(place) for block in self._registered)
            chosen = pieces if known and place.bytes else elsewhere
            chosen.append(StagedPiece(number, place.start, place.bytes))
        return pieces, elsewhere

    def _loans(self, pieces: list[StagedPiece], deadline: float) -> Loans:
        """Staging memory for these objects, as many at a time as it holds."""
        capacity = self._staging.all.bytes
        rest = [piece for piece in pieces if 0 < piece.bytes <= capacity]
        self._too_large += sum(piece.bytes > capacity for piece in pieces)
        while rest:
            loan = self._staging.borrow([piece.bytes for piece in rest], deadline)
            if loan is None:
                raise self._error(f"no free staging memory within {self._settings.timeout_s:g} s")
            now, rest = rest[: len(loan.pieces)], rest[len(loan.pieces) :]
            addresses = map(loan.address, range(len(now)))
            try:
                yield (
                    loan,
                    [
                        StagedPiece(p.number, a, p.bytes)
                        for p, a in zip(now, addresses, strict=True)
                    ],
                )
            finally:
                loan.drop()

    # -- calls of the library -----------------------------------------------------------------

    def _move(
        self,
        call: MooncakeCall,
        names: Sequence[str],
        pieces: Sequence[StagedPiece],
        deadline: float,
        loan: Loan | None = None,
    ) -> list[tuple[StagedPiece, int]]:
        """The library's answers. Without a loan the pieces are the caller's own memory."""
        if not pieces:
            return []
        chosen = [names[piece.number] for piece in pieces]
        addresses, sizes = [p.address for p in pieces], [p.bytes for p in pieces]
        self._master.check()
        try:
            codes = self._run(lambda: call(chosen, addresses, sizes), deadline, loan)
        except StuckError as error:
            if loan is None:
                raise self._lingering(str(error), len(pieces)) from error
            raise
        self._check_master(codes)
        if self._settings.protocol == "rdma" and Code.TRANSFER_FAILED in codes:
            self._let_linger(loan, len(pieces))
        return list(zip(pieces, codes, strict=True))

    def _let_linger(self, loan: Loan | None, objects: int) -> None:
        """A TCP connection is closed before a transfer counts as failed; a card may go on."""
        failed = self._lingering(f"storage {self.name}: a transfer failed", objects)
        if loan is None:
            raise failed
        loan.hold()
        timer = threading.Timer(failed.lingers_s, loan.drop)
        timer.daemon = True
        timer.start()

    def _lingering(self, what: str, objects: int) -> LingeringError:
        seconds = self._settings.lingers_s(objects)
        text = f"{what}; the library may use its memory for {seconds:.0f} s more"
        return LingeringError(text, seconds)

    def _ask(self, call: Callable[[], list[int]]) -> list[int]:
        """A call that touches no memory."""
        self._master.check()
        codes = self._run(call, self._deadline())
        self._check_master(codes)
        return codes

    def _run(self, call: Callable[[], T], deadline: float, loan: Loan | None = None) -> T:
        if loan is not None:
            loan.hold()
        try:
            return self._threads.run(call, deadline, loan.drop if loan is not None else _nothing)
        except CallRefusedError as error:
            raise self._error(str(error)) from error
        except GivenUpError as error:
            self._master.doubt()
            late = self._error(f"no answer within {self._settings.timeout_s:g} s")
            raise StuckError(str(late)) if error.began else late from error
        except RuntimeError as error:
            raise self._error(f"the library failed ({error})") from error

    def _check_master(self, codes: Sequence[int]) -> None:
        """Raise if the codes say that the master is away."""
        if not MASTER_AWAY.isdisjoint(codes):
            self._master.doubt()
            gone = "is gone" if Code.MASTER_GONE in codes else "does not answer"
            raise self._master.error(f"the Mooncake master {gone}")
        self._master.trust()

    def _deadline(self) -> float:
        return time.monotonic() + self._settings.timeout_s

    def _error(self, what: str) -> StoreError:
        return StoreError(f"storage {self.name}: {what}")


def _nothing() -> None:
    pass
