"""Batched arithmetic with GEMMs by native kernels, whose weights may stay packed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers.backend.arithmetic import Batched
from kvtide.layers.backend.packed_weight import PackedRows, PackedWeight
from kvtide.layers.native.c_functions import FORMS, Functions

FEW_ROWS = 64
"""More rows go to torch's GEMM, which divides its work better."""
STRIP_ELEMENTS = 1 << 20
"""Of a packed weight that are unpacked for a GEMM at a time."""


class NativeArithmetic(Batched):
    """Few rows are multiplied by native kernels, more by torch's GEMM."""

    packed_forms = FORMS.keys()

    def __init__(self, functions: Functions) -> None:
        self._linear, self._packed_linear = functions.linear, functions.packed_linear
        self._unpack = functions.unpack
        self._scratch = _Scratch()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = x.shape
        if (
            shape[0] > FEW_ROWS
            or x.dtype is not torch.float32
            or weight.dtype is not torch.float32
            or len(shape) != 2
            or not (x.is_contiguous() and weight.is_contiguous())
            or shape[0] == 0
        ):
            return functional.linear(x, weight, bias)
        outputs, inputs = weight.shape
        assert shape[1] == inputs, f"{shape[1]} inputs for a weight of {inputs}"
        out = x.new_empty(shape[0], outputs)
        self._linear(
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            shape[0],
            outputs,
            inputs,
            torch.get_num_threads(),
        )
        return out

    def packed_linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        rows, inputs = x.shape
        assert inputs == weight.inputs, f"{inputs} inputs for a weight of {weight.inputs}"
        outputs = len(weight)
        out = x.new_empty(rows, outputs)
        if rows > FEW_ROWS:
            for strip, first in _strips(weight):
                numbers = self._numbers(strip, self._scratch.floats)
                torch.mm(x, numbers.T, out=out[:, first : first + len(strip)])
            return out if bias is None else out.add_(bias)
        x, first = x.contiguous(), 0
        for run in weight.runs:
            self._packed_linear(
                out.data_ptr() + first * out.element_size(),
                x.data_ptr(),
                run.data.data_ptr(),
                None if bias is None else bias.data_ptr() + first * bias.element_size(),
                FORMS[run.form],
                rows,
                run.count,
                inputs,
                outputs,
                torch.get_num_threads(),
            )
            first += run.count
        return out

    def unpacked(self, weight: PackedWeight) -> Tensor:
        return self._numbers(weight, torch.empty(len(weight) * weight.inputs))

    def _numbers(self, weight: PackedWeight, room: Tensor) -> Tensor:
        """A weight's numbers, at the beginning of this room."""
        out, first = room[: len(weight) * weight.inputs].view(-1, weight.inputs), 0
        for run in weight.runs:
            self._unpack(
                out[first:].data_ptr(),
                run.data.data_ptr(),
                FORMS[run.form],
                run.count,
                weight.inputs,
                torch.get_num_threads(),
            )
            first += run.count
        return out


class _Scratch(threading.local):
    """Every thread's room for a strip of a weight: new memory would cost a fault for each page."""

    @cached_property
    def floats(self) -> Tensor:
        return torch.empty(STRIP_ELEMENTS)


def _strips(weight: PackedWeight) -> Iterator[tuple[PackedWeight, int]]:
    """Rows of a packed weight that fit into the cache when they are unpacked, and the first's
    number."""
    first, step = 0, STRIP_ELEMENTS // weight.inputs
    for run in weight.runs:
        for data in run.data.split(step):
            yield PackedWeight(weight.inputs, (PackedRows(run.form, data),)), first
            first += data.shape[0]
