"""The processes of a check: receivers and senders that follow commands.

They are forked from a process that has imported everything, so that one starts in milliseconds. A
receiver's memory is shared, whatever the transport: the check maps it and sees every byte land,
also while the receiver is frozen.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.tiers.arena import Arena, SharedFile, host_arena
from kvtide.transfer.peer.page_sender import PageSender, SendJob
from kvtide.transfer.peer.process_watch import ProcessIdentity
from kvtide.transfer.peer.shm import MappedFile
from kvtide.transfer.peer.transport import (
    Column,
    Descriptor,
    PeerLink,
    Region,
    TransportError,
    TransportSettings,
    WriteBatch,
    write,
)
from kvtide.transfer.peer.transport_registry import open_transport

GUARD_BYTES = 64 << 10
"""Before, between and behind the regions of a receiver: memory that nothing may write to."""
ANSWER_S = 60.0
"""In this time a process answers, however busy the machine."""

Memory = npt.NDArray[np.uint8]


class PeerDiedError(RuntimeError):
    """A process of a check ended without a command."""


@dataclass(frozen=True, slots=True)
class TrialRows:
    """Rows of a batch: offsets in the sender's memory and in a region of the receiver."""

    source: Column
    target: Column
    bytes: Column
    region: Column

    @classmethod
    def of(cls, source: Any, target: Any, sizes: Any, region: Any = 0) -> TrialRows:
        batch = WriteBatch.of(source, target, sizes, region)
        return cls(batch.source, batch.target, batch.bytes, batch.region)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a write ended. `error` is empty if all landed."""

    error: str = ""
    silent: bool = True
    seconds: float = 0.0


# -- in the process -------------------------------------------------------------------------


class _Actor:
    """Follows commands, one after another. A write may run beside the next commands."""

    def __init__(self, transport: str, settings: TransportSettings) -> None:
        self._transport = open_transport(transport, settings)
        self._arena: Arena | None = None
        self._links: list[PeerLink] = []
        self._sender: PageSender | None = None
        self._running: list[tuple[threading.Thread, list[Outcome]]] = []

    def identity(self) -> ProcessIdentity:
        return ProcessIdentity.own()

    # As a receiver.

    def expose(self, region_bytes: list[int]) -> tuple[Descriptor, SharedFile, list[int]]:
        """Regions with guards around them; where they lie in the arena."""
        starts, end = [], GUARD_BYTES
        for size in region_bytes:
            starts.append(end)
            end += -(-size // GUARD_BYTES) * GUARD_BYTES + GUARD_BYTES
        arena = self._arena = host_arena(end, pinned=False, shared=True)
        assert arena.shared is not None
        base, file = arena.data.data_ptr(), arena.shared
        regions = [
            Region(base + start, size, "host", SharedFile(file.fd, file.offset + start))
            for start, size in zip(starts, region_bytes, strict=True)
        ]
        return self._transport.expose(regions), file, starts

    def revoke(self) -> Descriptor | None:
        return self._transport.revoke()

    # As a sender.

    def sources(self, seed: int, count: int) -> None:
        """Random bytes to send, the same for every process."""
        if self._arena is None or self._arena.bytes != count:
            self._arena = host_arena(count, pinned=False)
            self._transport.register([Region.of(self._arena)])
        self._arena.data.numpy()[:] = random_bytes(seed, count)

    def connect(self, descriptor: Descriptor) -> int:
        self._links.append(self._transport.connect(descriptor))
        return len(self._links) - 1

    def alive(self, link: int) -> bool:
        return self._links[link].alive()

    def write(self, link: int, rows: TrialRows, timeout_s: float) -> Outcome:
        start = time.monotonic()
        try:
            write(self._links[link], self._batch(rows), timeout_s)
        except TransportError as error:
            return Outcome(str(error), error.silent, time.monotonic() - start)
        return Outcome(seconds=time.monotonic() - start)

    def write_for_ever(self, link: int, rows: TrialRows, timeout_s: float) -> int:
        """Write again and again until a write fails, beside other commands.

        Every write has other bytes than the one before, so that each late byte is seen.
        """
        assert self._arena is not None
        sources = self._arena.data

        def run() -> None:
            while not outcomes or not outcomes[-1].error:
                outcomes.append(self.write(link, rows, timeout_s))
                if not outcomes[-1].error:
                    sources.add_(1)

        outcomes: list[Outcome] = []
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._running.append((thread, outcomes))
        return len(self._running) - 1

    def written(self, number: int) -> int:
        """How many of these writes have ended."""
        return len(self._running[number][1])

    def ended(self, number: int, timeout_s: float) -> Outcome | None:
        """How the last one ended; None: they go on."""
        thread, outcomes = self._running[number]
        thread.join(timeout_s)
        return None if thread.is_alive() else outcomes[-1]

    def send(
        self, links: list[int], rows: list[TrialRows], timeout_s: float, bytes_per_s: float | None
    ) -> list[Outcome]:
        """One job per link and rows, each in a room of its own, by the page sender."""
        outcomes: dict[int, Outcome] = {}
        start, over = time.monotonic(), threading.Event()

        def done(number: int, error: str | None, silent: bool) -> None:
            outcomes[number] = Outcome(error or "", silent, time.monotonic() - start)
            if len(outcomes) == len(links):
                over.set()

        sender = self._sender = PageSender(bytes_per_s=bytes_per_s)
        for number, (link, some) in enumerate(zip(links, rows, strict=True)):
            batches = [(self._links[link], self._batch(some))]
            sender.submit(SendJob(number, 1, batches, partial(done, number), timeout_s=timeout_s))
        over.wait(ANSWER_S)
        sender.close(timeout_s)
        return [outcomes.get(number, Outcome("no answer", False)) for number in range(len(links))]

    def close_link(self, link: int) -> None:
        self._links[link].close()

    def close(self) -> None:
        for link in self._links:
            link.close()
            link.close()
        self._transport.close()
        self._transport.close()

    def _batch(self, rows: TrialRows) -> WriteBatch:
        assert self._arena is not None
        base = self._arena.data.data_ptr()
        return WriteBatch(base + rows.source, rows.region, rows.target, rows.bytes)


def _act(pipe: Connection, transport: str, settings: TransportSettings) -> None:
    """The process: answers every command with its result, or with the error that it raised."""
    with suppress(EOFError, BrokenPipeError):
        try:
            actor = _Actor(transport, settings)
            pipe.send((True, None))
        except Exception as error:  # A stranger's transport: whatever it raises is the finding.
            pipe.send((False, error))
            os._exit(1)
        while True:
            verb, arguments = pipe.recv()
            try:
                pipe.send((True, getattr(actor, verb)(*arguments)))
            except Exception as error:  # As above.
                pipe.send((False, RuntimeError(f"{verb} raised {type(error).__name__}: {error}")))
            if verb == "close":
                break
    # The library's own ends are not under test, and some wait for peers that are gone.
    os._exit(0)


def random_bytes(seed: int, count: int) -> Memory:
    return np.random.default_rng(seed).integers(1, 256, count, np.uint8)


# -- in the check ---------------------------------------------------------------------------


class PeerProcess:
    """One process, from the outside. Signals go to its file descriptor, never to another process
    that was given its number."""

    def __init__(self, transport: str, settings: TransportSettings) -> None:
        self._pipe, theirs = mp.Pipe()
        self.pid = fork_template().fork(theirs, transport, settings)
        theirs.close()
        self._fd = os.pidfd_open(self.pid)
        try:
            self.answer()
        except Exception:
            self.kill()
            raise

    def ask(self, verb: str, *arguments: Any) -> Any:
        self.tell(verb, *arguments)
        return self.answer()

    def tell(self, verb: str, *arguments: Any) -> None:
        """Send a command without waiting: a frozen process finds it when it continues."""
        self._pipe.send((verb, arguments))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        if not self._pipe.poll(timeout_s):
            raise PeerDiedError(f"process {self.pid} gives no answer in {timeout_s:g} s")
        try:
            well, answer = self._pipe.recv()
        except EOFError:
            raise PeerDiedError(f"process {self.pid} ended by itself") from None
        if not well:
            raise answer
        return answer

    def freeze(self) -> None:
        """Returns when the last thread has stopped."""
        signal.pidfd_send_signal(self._fd, signal.SIGSTOP)
        until(lambda: self._states() <= {"T", "Z"}, "its threads stop")

    def resume(self) -> None:
        signal.pidfd_send_signal(self._fd, signal.SIGCONT)

    def kill(self) -> None:
        """Returns when the process is gone. Killing again does nothing."""
        if self._fd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            select.select([self._fd], [], [], ANSWER_S)
            os.close(self._fd)
            self._fd = -1
            self._pipe.close()

    def _states(self) -> set[str]:
        found = set()
        for task in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with suppress(OSError):  # A thread that ended meanwhile.
                found.add(task.read_text().rpartition(")")[2].split()[0])
        return found


class ForkTemplate:
    """A process that has imported this module, and forks the processes of checks."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve("
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{code}{theirs.fileno()})"], pass_fds=[theirs.fileno()]
        )
        theirs.close()

    def fork(self, pipe: Connection, transport: str, settings: TransportSettings) -> int:
        request = pickle.dumps((transport, settings))
        socket.send_fds(self._socket, [request], [pipe.fileno()])
        answer = self._socket.recv(8, socket.MSG_WAITALL)
        if len(answer) < 8:
            raise PeerDiedError("the process that forks the processes of checks has ended")
        return int.from_bytes(answer, "little")


def serve(fd: int) -> None:
    """The template: forks for every request, until the process that started it is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel takes the dead away.
    requests = socket.socket(fileno=fd)
    while True:
        request, fds, *_ = socket.recv_fds(requests, 1 << 16, 1)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            _act(Connection(fds[0]), *pickle.loads(request))
        os.close(fds[0])
        requests.sendall(pid.to_bytes(8, "little"))


_template: ForkTemplate | None = None


def fork_template() -> ForkTemplate:
    """The template of this process."""
    global _template
    if _template is None or _template.owner != os.getpid():
        _template = ForkTemplate()
    return _template


class ReceiverProcess(PeerProcess):
    """A receiver whose memory the check sees. `expected` is what should be in it."""

    def __init__(
        self, transport: str, settings: TransportSettings, region_bytes: list[int]
    ) -> None:
        super().__init__(transport, settings)
        self.region_bytes = region_bytes
        self.descriptor, file, self.starts = self.ask("expose", region_bytes)
        path = Path(f"/proc/{self.pid}/fd/{file.fd}").stat()
        self._file = MappedFile.open(self.pid, file.fd, (path.st_dev, path.st_ino))
        end = self.starts[-1] + -(-region_bytes[-1] // GUARD_BYTES) * GUARD_BYTES + GUARD_BYTES
        self.memory: Memory = np.frombuffer(self._file.mapping, np.uint8, end, file.offset)
        self.expected: Memory = np.zeros(end, np.uint8)

    def expect(self, sources: Memory, rows: TrialRows) -> None:
        columns = (rows.source, rows.target, rows.bytes, rows.region)
        for source, target, size, region in zip(*(c.tolist() for c in columns), strict=True):
            place = self.starts[region] + target
            self.expected[place : place + size] = sources[source : source + size]

    def difference(self) -> str:
        """Where the memory is not as expected; empty if it is."""
        wrong = np.flatnonzero(self.memory != self.expected)
        if not len(wrong):
            return ""
        place = int(wrong[0])
        region = max((n for n, start in enumerate(self.starts) if start <= place), default=0)
        offset = place - self.starts[region]
        inside = 0 <= offset < self.region_bytes[region]
        where = f"offset {offset:,} of region {region}" if inside else "memory outside all regions"
        return f"{len(wrong):,} bytes are wrong, the first at {where}"

    def snapshot(self) -> Memory:
        return self.memory.copy()


@dataclass(frozen=True, slots=True)
class WritePair:
    """A sender with random sources, and its link to a receiver."""

    receiver: ReceiverProcess
    sender: PeerProcess
    link: int
    sources: Memory

    def write(self, rows: TrialRows, timeout_s: float = ANSWER_S) -> Outcome:
        outcome: Outcome = self.sender.ask("write", self.link, rows, timeout_s)
        return outcome

    def land(self, rows: TrialRows, what: str) -> Iterator[str]:
        """Write rows that must land; sentences if they do not."""
        outcome = self.write(rows)
        if outcome.error:
            yield f"{what}: the write failed: {outcome.error}"
            return
        self.receiver.expect(self.sources, rows)
        if wrong := self.receiver.difference():
            yield f"{what}: {wrong}"


class Trial:
    """What a check starts processes with. All of them are killed after it."""

    def __init__(self, transport: str, settings: TransportSettings | None = None) -> None:
        self.transport = transport
        self._settings = settings or TransportSettings(stall_s=1.0)
        self._started: list[PeerProcess] = []

    def receiver(self, *region_bytes: int) -> ReceiverProcess:
        receiver = ReceiverProcess(self.transport, self._settings, list(region_bytes))
        self._started.append(receiver)
        return receiver

    def sender(self) -> PeerProcess:
        """Raises TransportUnavailableError if this machine does not have the transport."""
        sender = PeerProcess(self.transport, self._settings)
        self._started.append(sender)
        return sender

    def pair(self, *region_bytes: int, source_bytes: int = 4 << 20) -> WritePair:
        receiver = self.receiver(*region_bytes)
        return self.link(receiver, self.sender(), source_bytes)

    def link(self, receiver: ReceiverProcess, sender: PeerProcess, source_bytes: int) -> WritePair:
        sources = new_sources(sender, source_bytes)
        return WritePair(receiver, sender, sender.ask("connect", receiver.descriptor), sources)

    def close(self) -> None:
        for process in self._started:
            process.kill()


def new_sources(sender: PeerProcess, count: int) -> Memory:
    """Fill a sender's memory with other bytes; what they are."""
    seed = secrets.randbits(32)
    sender.ask("sources", seed, count)
    return random_bytes(seed, count)


def until(holds: Callable[[], bool], what: str, seconds: float = ANSWER_S) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.002)
