"""The tensors of a GGUF file, for torch. The rest of the package does without it."""

from __future__ import annotations

import torch

from kvtide.layers.backend.packed_weight import PackedRows, PackedWeight
from kvtide.models.gguf.gguf_file import GGUF
from kvtide.models.safetensors_folder import WeightOutline

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_tensor(file: GGUF, name: str, rows: range | None = None) -> torch.Tensor:
    """A tensor, or these rows of it, in memory of its own: in its own dtype, float32 where it is
    quantised."""
    dtype = _DTYPES.get(file.tensors[name].form.name)
    if dtype is None:
        return torch.from_numpy(file.floats(name, rows))
    count, *row = file.tensors[name].shape
    shape = (count if rows is None else len(rows), *row)
    return torch.from_numpy(file.raw(name, rows).copy()).view(dtype).reshape(shape)


def packed_matrix(file: GGUF, name: str) -> PackedWeight | None:
    """A matrix in the form of the file, in memory of its own; None of any other tensor."""
    form, tensor = tensor_outline(file, name).form, file.tensors[name]
    if form is None:
        return None
    data = torch.from_numpy(file.raw(name).copy()).view(tensor.shape[0], tensor.row_bytes)
    return PackedWeight(tensor.shape[1], (PackedRows(form, data),))


def tensor_outline(file: GGUF, name: str) -> WeightOutline:
    """What the two functions above give."""
    tensor = file.tensors[name]
    dtype = _DTYPES.get(tensor.form.name, torch.float32)
    if len(tensor.shape) != 2 or tensor.form.name == "F32":
        return WeightOutline(dtype)
    return WeightOutline(dtype, tensor.form.name, tensor.row_bytes)
