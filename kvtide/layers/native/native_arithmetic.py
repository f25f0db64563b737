"""Batched arithmetic with GEMMs by native kernels, whose weights may stay packed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers.backend.arithmetic import Batched
from kvtide.layers.backend.packed_weight import PackedWeight
from kvtide.layers.native.c_functions import FORMS, Functions

MOST_ROWS = 256
"""More rows of weights in fp32 go to torch's GEMM."""


class NativeArithmetic(Batched):
    """Weights in fp32 take torch's GEMM for many rows; packed ones always take native kernels."""

    packed_forms = FORMS.keys()

    def __init__(self, functions: Functions) -> None:
        self._linear, self._packed_linear = functions.linear, functions.packed_linear
        self._unpack = functions.unpack

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = x.shape
        if (
            shape[0] > MOST_ROWS
            or x.dtype is not torch.float32
            or weight.dtype is not torch.float32
            or len(shape) != 2
            or not (x.is_contiguous() and weight.is_contiguous())
            or shape[0] == 0
            or shape[1] != weight.shape[1]  # Which torch refuses.
        ):
            return functional.linear(x, weight, bias)
        outputs, inputs = weight.shape
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
        if inputs != weight.inputs:
            raise RuntimeError(f"{inputs} columns for a weight of {weight.inputs}")
        x, first, outputs = x.contiguous(), 0, len(weight)
        out = x.new_empty(rows, outputs)
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
        out, first = torch.empty(len(weight), weight.inputs), 0
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
