"""Writes GGUF files, and reads stored numbers one at a time: what the reader is checked against.

The layouts of blocks are written down here a second time, as a loop over elements with the
formulas of the format's description, so that both sides share no code.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

F32, F16, BF16 = 0, 1, 30
ALIGNMENT = 32


@dataclass(frozen=True)
class Number:
    """A metadata value of a given type, where Python's own would be ambiguous."""

    kind: int
    value: float


@dataclass(frozen=True)
class Raw:
    """A tensor's bytes, its type in the file and its shape as torch writes it."""

    kind: int
    shape: tuple[int, ...]
    data: bytes


NUMBER_FORMS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
STRING, ARRAY = 8, 9


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _kind(value: object) -> int:
    match value:
        case Number(kind=kind):
            return kind
        case bool():
            return 7
        case int():
            return 4
        case float():
            return 6
        case str():
            return STRING
        case list():
            return ARRAY
    raise AssertionError(value)


def _value(value: object) -> bytes:
    match value:
        case Number(kind=kind, value=number):
            return struct.pack(NUMBER_FORMS[kind], number)
        case str():
            return _string(value)
        case list():
            kind = _kind(value[0])
            return struct.pack("<IQ", kind, len(value)) + b"".join(map(_value, value))
    return struct.pack(NUMBER_FORMS[_kind(value)], value)


def f32(tensor: torch.Tensor) -> Raw:
    return Raw(F32, tuple(tensor.shape), tensor.float().contiguous().numpy().tobytes())


def write(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Mapping[str, Raw],
    version: int = 3,
) -> Path:
    """A file as llama.cpp lays it out. Shapes are written with the row's length first."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + struct.pack("<I", _kind(value)) + _value(value)
    body = b""
    for name, tensor in tensors.items():
        sizes = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        head += _string(name) + struct.pack("<I", len(tensor.shape)) + sizes
        head += struct.pack("<IQ", tensor.kind, len(body))
        body += tensor.data + b"\0" * (-len(tensor.data) % ALIGNMENT)
    path.write_bytes(head + b"\0" * (-len(head) % ALIGNMENT) + body)
    return path


def tiny_llama(
    path: Path, tokens: Sequence[str], special: int, template: str, tool_use: str | None = None
) -> Path:
    """A random Llama of two layers that talks by a chat template, and by another one where there
    are tools; tokens are byte-level, the last few of them special."""
    hidden, inner, heads = 32, 48, 4
    sizes = {
        "block_count": 2, "context_length": 4096, "embedding_length": hidden,
        "feed_forward_length": inner, "attention.head_count": heads,
        "attention.head_count_kv": heads, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        **{f"llama.{name}": value for name, value in sizes.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [1] * (len(tokens) - special) + [3] * special,
        "tokenizer.ggml.merges": [f"{tokens[0]} {tokens[0]}"],
        "tokenizer.chat_template": template,
        **({} if tool_use is None else {"tokenizer.chat_template.tool_use": tool_use}),
    }
    shapes = {"attn_q": hidden, "attn_k": hidden, "attn_v": hidden, "attn_output": hidden,
              "ffn_gate": inner, "ffn_up": inner}  # fmt: skip
    noise = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Raw:
        return f32(torch.randn(shape, generator=noise) * 0.15)

    tensors = {
        "token_embd.weight": random(len(tokens), hidden),
        "output_norm.weight": random(hidden),
    }
    for layer in range(2):
        named = {name: random(rows, hidden) for name, rows in shapes.items()}
        named |= {"ffn_down": random(hidden, inner)}
        named |= {name: random(hidden) for name in ("attn_norm", "ffn_norm")}
        tensors |= {f"blk.{layer}.{name}.weight": raw for name, raw in named.items()}
    return write(path, metadata, tensors)


# -- numbers, one at a time --------------------------------------------------------------------


def _half(block: bytes, at: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", block, at)[0])


def _nibble32(block: bytes, at: int, i: int) -> int:
    return block[at + i] & 15 if i < 16 else block[at + i - 16] >> 4


def _bit(block: bytes, at: int, i: int) -> int:
    return block[at + i // 8] >> (i % 8) & 1


def _q8_0(block: bytes, i: int) -> np.float32:
    return _half(block, 0) * np.float32(struct.unpack_from("<b", block, 2 + i)[0])


def _q4_0(block: bytes, i: int) -> np.float32:
    return _half(block, 0) * np.float32(_nibble32(block, 2, i) - 8)


def _q4_1(block: bytes, i: int) -> np.float32:
    return _half(block, 0) * np.float32(_nibble32(block, 4, i)) + _half(block, 2)


def _q5_0(block: bytes, i: int) -> np.float32:
    return _half(block, 0) * np.float32(_nibble32(block, 6, i) + 16 * _bit(block, 2, i) - 16)


def _q5_1(block: bytes, i: int) -> np.float32:
    level = _nibble32(block, 8, i) + 16 * _bit(block, 4, i)
    return _half(block, 0) * np.float32(level) + _half(block, 2)


def _k_scale(block: bytes, run: int) -> tuple[np.float32, np.float32]:
    """llama.cpp's get_scale_min_k4, times the two scales of the block."""
    q = block[4:16]
    if run < 4:
        scale, offset = q[run] & 63, q[run + 4] & 63
    else:
        scale = q[run + 4] & 15 | q[run - 4] >> 6 << 4
        offset = q[run + 4] >> 4 | q[run] >> 6 << 4
    return _half(block, 0) * np.float32(scale), _half(block, 2) * np.float32(offset)


def _k_nibble(block: bytes, at: int, i: int) -> int:
    byte = block[at + i // 64 * 32 + i % 32]
    return byte & 15 if i % 64 < 32 else byte >> 4


def _q4_k(block: bytes, i: int) -> np.float32:
    scale, offset = _k_scale(block, i // 32)
    return scale * np.float32(_k_nibble(block, 16, i)) - offset


def _q5_k(block: bytes, i: int) -> np.float32:
    scale, offset = _k_scale(block, i // 32)
    fifth = block[16 + i % 32] >> (i // 32) & 1
    return scale * np.float32(_k_nibble(block, 48, i) + 16 * fifth) - offset


def _q6_k(block: bytes, i: int) -> np.float32:
    half, run, place = i // 128, i % 128 // 32, i % 32
    byte = block[half * 64 + (run % 2) * 32 + place]
    low = byte & 15 if run < 2 else byte >> 4
    high = block[128 + half * 32 + place] >> (2 * run) & 3
    scale = struct.unpack_from("<b", block, 192 + i // 16)[0]
    return _half(block, 208) * np.float32(scale) * np.float32(low + 16 * high - 32)


def _f32(block: bytes, i: int) -> np.float32:
    return np.float32(struct.unpack("<f", block)[0])


def _bf16(block: bytes, i: int) -> np.float32:
    return np.float32(struct.unpack("<f", b"\0\0" + block)[0])


@dataclass(frozen=True)
class Scalar:
    """A format, element by element. `halves` are where a block keeps its scales."""

    kind: int
    elements: int
    bytes: int
    element: object
    halves: Sequence[int] = ()


SCALARS = {
    "F32": Scalar(0, 1, 4, _f32),
    "F16": Scalar(1, 1, 2, lambda block, i: _half(block, 0)),
    "BF16": Scalar(30, 1, 2, _bf16),
    "Q4_0": Scalar(2, 32, 18, _q4_0, [0]),
    "Q4_1": Scalar(3, 32, 20, _q4_1, [0, 2]),
    "Q5_0": Scalar(6, 32, 22, _q5_0, [0]),
    "Q5_1": Scalar(7, 32, 24, _q5_1, [0, 2]),
    "Q8_0": Scalar(8, 32, 34, _q8_0, [0]),
    "Q4_K": Scalar(12, 256, 144, _q4_k, [0, 2]),
    "Q5_K": Scalar(13, 256, 176, _q5_k, [0, 2]),
    "Q6_K": Scalar(14, 256, 210, _q6_k, [208]),
}


def random_blocks(form: Scalar, blocks: int, seed: int) -> bytes:
    """Any bytes at all, but for scales, which are ordinary numbers."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (blocks, form.bytes), dtype=np.uint8)
    if form.elements == 1:
        values = rng.standard_normal(blocks).astype(np.float32)
        if form.bytes == 4:
            return values.tobytes()
        if form.kind == F16:
            return values.astype(np.float16).tobytes()
        return values.view(np.uint16)[1::2].tobytes()
    for at in form.halves:
        scales = rng.standard_normal(blocks).astype(np.float16)
        data[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return data.tobytes()


def scalar_values(form: Scalar, data: bytes) -> np.ndarray:
    """Every element of these blocks, one after another."""
    blocks = [data[at : at + form.bytes] for at in range(0, len(data), form.bytes)]
    values = [form.element(block, i) for block in blocks for i in range(form.elements)]
    return np.array(values, np.float32)
