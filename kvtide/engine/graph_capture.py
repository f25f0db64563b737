"""Where passes are recorded: what a device does is taken down once and then done again.

Studios of all devices have the same: `mirror`, numbers that change from one time to the next,
`record`, and `left`, what came of it. On a CUDA device a recording is CUDA graphs. On any other it
is the pass itself, computed anew: what a recording may depend on can be tried there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Wait = Callable[[int], None]
"""Called before a layer reads what was kept of earlier tokens."""
LATE = 0.75
"""How much of a pass is most of it: what is left takes longer than laying out the next."""


class InputBuffer(Protocol):
    """int32 numbers of the host, all -1 at first, and what a device has of them."""

    there: Tensor

    def open(self) -> NDArray[np.int32]:
        """The numbers, when the device has no more need of what they were."""

    def send(self) -> None:
        """Before what is computed next: nobody waits for it."""


class CapturedGraph(Protocol):
    """What was recorded."""

    def play(self, wait: Wait) -> None: ...

    def linger(self) -> None:
        """Wait until most of it is done, as it was last played."""


class GraphCapture(Protocol):
    def mirror(self, count: int) -> InputBuffer: ...

    def record(
        self, forward: Callable[[Wait], Tensor], room: str, most: int, cut: bool
    ) -> CapturedGraph:
        """Leaves what `forward` gives, of up to `most` rows, in a room that recordings share.

        Rooms are known by name. Only one recording is played at a time. If `cut`, it can be played
        while prefixes are on their way, as each layer waits for its own part; and it can be told
        how far it is.
        """

    def left(self, room: str, rows: int) -> Tensor:
        """What was left in a room, until something is played again."""


def graph_capture(device: torch.device) -> GraphCapture:
    return _Graphs(device) if device.type == "cuda" else _Anew()


# -- CUDA --------------------------------------------------------------------------------------


class _Pinned:
    def __init__(self, count: int, device: torch.device) -> None:
        self._here = torch.full((count,), -1, dtype=torch.int32).pin_memory()
        self.there = self._here.to(device)
        self._sent = torch.cuda.Event()

    def open(self) -> NDArray[np.int32]:
        self._sent.synchronize()
        return self._here.numpy()

    def send(self) -> None:
        from kvtide.layers.kernels.host_copy import host_copy

        host_copy(self._here, self.there)
        self._sent.record()


class _Graphs:
    """With one stream and one pool of memory for all recordings: libraries keep memory for every
    stream that they have seen."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rooms: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def mirror(self, count: int) -> InputBuffer:
        return _Pinned(count, self._device)

    def record(
        self, forward: Callable[[Wait], Tensor], room: str, most: int, cut: bool
    ) -> CapturedGraph:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Programs are compiled when they first run, which cannot be recorded.
            such = forward(nothing)
            if room not in self._rooms:
                self._rooms[room] = such.new_empty((most, *such.shape[1:]))
                # Of a recording's memory, the first of a kind takes the most, and while it is made
                # nothing can be given back.
                torch.cuda.empty_cache()
        taken, target = _Taken(self._stream, self._pool), self._rooms[room][: len(such)]
        with _garbage_kept(), taken:
            target.copy_(forward(taken.cut if cut else nothing))
        torch.cuda.current_stream().wait_stream(self._stream)
        return taken

    def left(self, room: str, rows: int) -> Tensor:
        return self._rooms[room][:rows]


class _Taken:
    """Graphs, and the layer that each of them begins with; the first begins with none."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._current, self._pool = torch.cuda.stream(stream), pool
        self._graphs: list[tuple[int | None, torch.cuda.CUDAGraph]] = []
        self._open = False
        self._late = torch.cuda.Event()

    def __enter__(self) -> None:
        self._current.__enter__()
        try:
            self._begin(None)
        except BaseException:
            self._current.__exit__(None, None, None)
            raise

    def __exit__(self, *raised: Any) -> None:
        try:
            self._end()
        finally:
            self._current.__exit__(*raised)

    def cut(self, layer: int) -> None:
        """End a graph before this layer, and begin the next. What the first holds is still held
        by whoever computes the pass, and so by none of the next."""
        self._end()
        self._begin(layer)

    def _begin(self, layer: int | None) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads copy pages meanwhile, which is none of the recording's business.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        self._graphs.append((layer, graph))
        self._open = True

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._graphs[-1][1].capture_end()

    def play(self, wait: Wait) -> None:
        late = int(LATE * len(self._graphs))
        for number, (layer, graph) in enumerate(self._graphs):
            if layer is not None:
                wait(layer)
            if number == late:
                self._late.record()
            graph.replay()

    def linger(self) -> None:
        self._late.synchronize()


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Memory of a device cannot be given back in the midst of a recording, and garbage may hold
    some: engines that were closed, and what they had recorded."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def nothing(layer: int) -> None:
    """No prefix is on its way to anybody in the pass."""


# -- elsewhere ---------------------------------------------------------------------------------


class _Plain:
    def __init__(self, count: int) -> None:
        self.there = torch.full((count,), -1, dtype=torch.int32)

    def open(self) -> NDArray[np.int32]:
        return self.there.numpy()

    def send(self) -> None:
        pass


class _Computed:
    def __init__(self, play: Callable[[Wait], None]) -> None:
        self.play = play

    def linger(self) -> None:
        pass


class _Anew:
    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}

    def mirror(self, count: int) -> InputBuffer:
        return _Plain(count)

    def record(
        self, forward: Callable[[Wait], Tensor], room: str, most: int, cut: bool
    ) -> CapturedGraph:
        def play(wait: Wait) -> None:
            given = forward(wait if cut else nothing)
            if room not in self._rooms:
                self._rooms[room] = given.new_empty((most, *given.shape[1:]))
            self._rooms[room][: len(given)] = given

        return _Computed(play)

    def left(self, room: str, rows: int) -> Tensor:
        return self._rooms[room][:rows]
