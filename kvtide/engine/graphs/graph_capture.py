"""Capturing a forward pass once and replaying it: CUDA graphs, and their stand-in on a CPU.

Every device offers the same three things: `input_buffer`, numbers that change from one replay to
the next; `capture`; and `output`, what the last replay wrote. On a CUDA device a captured pass is
one or several CUDA graphs. Elsewhere a replay computes the pass again, so that what a captured pass
may depend on is tested without a GPU.
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

from kvtide.engine.device_kernels import DeviceKernels, device_kernels

Wait = Callable[[int], None]
"""Called before a layer reads the KV of earlier tokens: orders it behind the layer's load."""
LATE = 0.75
"""A replay counts as late when this fraction of its graphs is done: the rest takes longer than
preparing the next step."""


class InputBuffer(Protocol):
    """int32 inputs on the host, all -1 at first, and their copy on the device."""

    on_device: Tensor

    def open(self) -> NDArray[np.int32]:
        """The host's numbers, once the device has read what was sent before."""

    def send(self) -> None:
        """Queue the copy to the device, ahead of what is queued next. Does not block."""


class CapturedGraph(Protocol):
    def replay(self, wait: Wait) -> None: ...

    def wait_until_late(self) -> None:
        """Block until most of the last replay is done."""


class GraphCapture(Protocol):
    def input_buffer(self, count: int) -> InputBuffer: ...

    def capture(
        self, forward: Callable[[Wait], Tensor], output: str, max_rows: int, per_layer: bool
    ) -> CapturedGraph:
        """Capture `forward`, whose result goes to the named output buffer of `max_rows` rows.

        Graphs share output buffers by name; one graph is replayed at a time. With `per_layer` each
        layer is a graph of its own: a replay can then wait for every layer's load, and report when
        it is late.
        """

    def output(self, name: str, rows: int) -> Tensor:
        """What the last replay wrote, valid until the next one."""


def graph_capture(device: torch.device) -> GraphCapture:
    kernels = device_kernels(device)
    return _EagerCapture() if kernels is None else _CudaCapture(device, kernels)


def no_wait(layer: int) -> None:
    """No request of the step is loading its prefix."""


# -- CUDA --------------------------------------------------------------------------------------


class _PinnedInput:
    def __init__(self, count: int, device: torch.device, kernels: DeviceKernels) -> None:
        self._kernels = kernels
        self._here = torch.full((count,), -1, dtype=torch.int32).pin_memory()
        self.on_device = self._here.to(device)
        self._sent = torch.cuda.Event()

    def open(self) -> NDArray[np.int32]:
        self._sent.synchronize()
        return self._here.numpy()

    def send(self) -> None:
        self._kernels.host_copy(self._here, self.on_device)
        self._sent.record()


class _CudaCapture:
    """All graphs share one stream and one memory pool: libraries keep a workspace per stream."""

    def __init__(self, device: torch.device, kernels: DeviceKernels) -> None:
        self._device, self._kernels = device, kernels
        self._outputs: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def input_buffer(self, count: int) -> InputBuffer:
        return _PinnedInput(count, self._device, self._kernels)

    def capture(
        self, forward: Callable[[Wait], Tensor], output: str, max_rows: int, per_layer: bool
    ) -> CapturedGraph:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Kernels are compiled at their first launch, which cannot be captured.
            result = forward(no_wait)
            if output not in self._outputs:
                self._outputs[output] = result.new_empty((max_rows, *result.shape[1:]))
                # The first graph of a kind is the largest, and no memory is freed during capture.
                torch.cuda.empty_cache()
        graphs, target = _CudaGraphs(self._stream, self._pool), self._outputs[output][: len(result)]
        with _garbage_collection_off(), graphs:
            target.copy_(forward(graphs.cut if per_layer else no_wait))
        torch.cuda.current_stream().wait_stream(self._stream)
        return graphs

    def output(self, name: str, rows: int) -> Tensor:
        return self._outputs[name][:rows]


class _CudaGraphs:
    """The graphs of one pass, each with the layer it begins at; the first begins at none."""

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
        """End a graph before this layer and begin the next.

        Tensors that the first graph hands on are alive in `forward`, so the second takes none of
        their memory.
        """
        self._end()
        self._begin(layer)

    def _begin(self, layer: int | None) -> None:
        graph = torch.cuda.CUDAGraph()
        # Copy lanes call CUDA from their own threads during capture.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        self._graphs.append((layer, graph))
        self._open = True

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._graphs[-1][1].capture_end()

    def replay(self, wait: Wait) -> None:
        late = int(LATE * len(self._graphs))
        for number, (layer, graph) in enumerate(self._graphs):
            if layer is not None:
                wait(layer)
            if number == late:
                self._late.record()
            graph.replay()

    def wait_until_late(self) -> None:
        self._late.synchronize()


@contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Device memory cannot be freed during capture, and garbage may hold some: closed engines and
    their graphs."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


# -- CPU ---------------------------------------------------------------------------------------


class _HostInput:
    def __init__(self, count: int) -> None:
        self.on_device = torch.full((count,), -1, dtype=torch.int32)

    def open(self) -> NDArray[np.int32]:
        return self.on_device.numpy()

    def send(self) -> None:
        pass


class _EagerGraph:
    def __init__(self, replay: Callable[[Wait], None]) -> None:
        self.replay = replay

    def wait_until_late(self) -> None:
        pass


class _EagerCapture:
    def __init__(self) -> None:
        self._outputs: dict[str, Tensor] = {}

    def input_buffer(self, count: int) -> InputBuffer:
        return _HostInput(count)

    def capture(
        self, forward: Callable[[Wait], Tensor], output: str, max_rows: int, per_layer: bool
    ) -> CapturedGraph:
        def replay(wait: Wait) -> None:
            result = forward(wait if per_layer else no_wait)
            if output not in self._outputs:
                self._outputs[output] = result.new_empty((max_rows, *result.shape[1:]))
            self._outputs[output][: len(result)] = result

        return _EagerGraph(replay)

    def output(self, name: str, rows: int) -> Tensor:
        return self._outputs[name][:rows]
