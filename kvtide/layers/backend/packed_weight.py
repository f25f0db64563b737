"""Weights that stay as a checkpoint packs them until they are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def half_form(weight: Tensor) -> str | None:
    """The form of a matrix in 16 bits; None of any other tensor."""
    forms = {torch.bfloat16: "BF16", torch.float16: "F16"}
    return forms.get(weight.dtype) if weight.dim() == 2 else None


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows in one form: `data` has the bytes of each."""

    form: str
    data: Tensor

    @property
    def count(self) -> int:
        return self.data.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """Rows of a weight, one run of them after another; each row stands for `inputs` numbers.

    Forms are named as in GGUF: Q8_0, Q4_K, BF16 and so on; F8_E4M3 is that of `models/fp8`.
    """

    inputs: int
    runs: tuple[PackedRows, ...]

    @classmethod
    def of_halves(cls, weight: Tensor) -> PackedWeight | None:
        """A matrix in 16 bits; None of any other tensor."""
        form = half_form(weight)
        if form is None:
            return None
        data = weight.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)
        return cls(weight.shape[1], (PackedRows(form, data),))

    def __len__(self) -> int:
        return sum([run.count for run in self.runs])

    @property
    def device(self) -> torch.device:
        return self.runs[0].data.device

    def is_of(self, forms: Collection[str]) -> bool:
        """Whether all rows are in these forms, of which blocks of 32 numbers are the smallest."""
        return self.inputs % 32 == 0 and all(run.form in forms for run in self.runs)

    def moved(self, move: Callable[[Tensor], Tensor]) -> PackedWeight:
        """With rows in another order, which `move` gives them."""
        runs = (PackedRows(run.form, move(run.data).contiguous()) for run in self.runs)
        return replace(self, runs=tuple(runs))

    def take(self, rows: Tensor) -> PackedWeight:
        """These rows; of a weight of one form."""
        (run,) = self.runs
        return replace(self, runs=(PackedRows(run.form, run.data[rows]),))


Weight = Tensor | PackedWeight
"""As a projection holds it: numbers, or packed."""


def joined(weights: Sequence[PackedWeight]) -> PackedWeight:
    """The rows of several weights of the same inputs, one after another."""
    runs: list[PackedRows] = []
    for run in (run for weight in weights for run in weight.runs):
        if runs and runs[-1].form == run.form:
            runs[-1] = PackedRows(run.form, torch.cat([runs[-1].data, run.data]))
        else:
            runs.append(run)
    return PackedWeight(weights[0].inputs, tuple(runs))
