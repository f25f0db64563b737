"""The tensors of a GGUF file, for torch. The rest of the package does without it."""

from __future__ import annotations

import torch

from kvtide.models.gguf.gguf_file import GGUF

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_tensor(file: GGUF, name: str) -> torch.Tensor:
    """A tensor in memory of its own: in its own dtype, float32 where it is quantised."""
    tensor = file.tensors[name]
    dtype = _DTYPES.get(tensor.form.name)
    if dtype is None:
        return torch.from_numpy(file.floats(name))
    return torch.from_numpy(file.raw(name).copy()).view(dtype).reshape(tensor.shape)
