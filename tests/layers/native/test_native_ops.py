"""Native kernels give what the torch references give."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvtide.layers import ForwardPass, Place, Rows, Step
from kvtide.layers.backend.arithmetic import Batched
from kvtide.layers.backend.kernel_args import (
    AttentionParams,
    AttentionParts,
    ConvWeights,
    DeltaGates,
    Norm,
    QKVParams,
    ScanParams,
)
from kvtide.layers.backend.ops import Ops
from kvtide.layers.backend.packed_weight import PackedWeight
from kvtide.layers.backend.torch_ops import TorchOps
from kvtide.layers.dense import Linear
from kvtide.layers.elementwise import gelu_tanh, swish
from kvtide.layers.native.build import library
from kvtide.layers.native.c_functions import Functions
from kvtide.layers.native.native_arithmetic import MOST_ROWS
from kvtide.layers.native.native_ops import NativeOps
from kvtide.spec import ALL, DType, Entry, Field, ModelMemory, PoolSpec, Reuse
from kvtide.spec.families.pool_parts import KVDType, by_head
from kvtide.tiers import Arrangement, Buffers, Layout
from tests.layers.kernels.recurring import World, world

PAGE = 16
TORCH = TorchOps(Batched())


@pytest.fixture(scope="module")
def native() -> NativeOps:
    found = library()
    if found is None:
        pytest.skip("no compiler here: tests/layers/native/test_build.py covers this")
    return NativeOps(Functions.of(found))


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    sinks: bool = False
    cap: float | None = None
    stored: KVDType = KVDType.FP32

    def how(self) -> AttentionParams:
        sinks = torch.randn(self.heads) if self.sinks else None
        return AttentionParams(self.dim**-0.5, self.window, sinks, self.cap)


CASES = {
    "by head": Case(3, 3, 32),
    "grouped": Case(9, 3, 64),
    "odd group, odd width": Case(5, 1, 27),
    "window": Case(4, 2, 32, window=19),
    "small window and sinks": Case(4, 2, 16, window=3, sinks=True),
    "capped, sinks": Case(6, 2, 80, cap=1.5, sinks=True),
    "16 bits": Case(4, 2, 48, stored=KVDType.BF16),
}
STEPS = [
    [(0, 37), (0, 5)],
    [(70, 1), (16, 1), (3, 1), (0, 1)],
    [(45, 1), (0, 20), (33, 118), (90, 2)],
    [(1500, 1), (63, 1), (64, 66)],
]
"""Tokens before the step and in it, of every sequence. The longest is divided between threads."""


def forward_pass(pool: PoolSpec, step: list[tuple[int, int]]) -> ForwardPass:
    """Over pages with random numbers; a page that a window has left behind has no slot."""
    memory = ModelMemory("test", PAGE, (pool,), layers=1)
    counts = [-(-(past + new) // PAGE) for past, new in step]
    free = list(range(sum(counts) + 3))
    random.Random(3).shuffle(free)
    arrangement = Arrangement(memory, {pool.name: len(free)}, Layout.PAGE_FIRST_DIRECT)
    buffers = Buffers(arrangement, torch.zeros(arrangement.bytes, dtype=torch.uint8))
    for field in buffers.view(pool.name, 0).values():
        field.copy_(torch.randn(field.shape).to(field.dtype))
    rows, at = list[Rows](), list[int]()
    for (past, new), count in zip(step, counts, strict=True):
        slots = torch.tensor([free.pop() for _ in range(count)])
        if pool.reuse.reach is not ALL:
            slots[: max(0, past - pool.reuse.reach) // PAGE] = -1
        rows.append(Rows(len(at), len(at) + new, past, {pool.name: slots}))
        at += range(past, past + new)
    positions = torch.tensor(at)
    view = buffers.view
    return ForwardPass(Step(positions, positions, tuple(rows), PAGE, view, lambda layer: None))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_over_pages(case: Case, step: list[tuple[int, int]], native: NativeOps) -> None:
    torch.manual_seed(0)
    reach = ALL if case.window is None else case.window - 1
    entry = by_head(case.kv_heads, case.dim, case.stored.element)
    pool = PoolSpec("kv", (0,), entry, reuse=Reuse(reach))
    run, place, how = forward_pass(pool, step), Place(pool, 0), case.how()
    tokens = len(run.positions)
    shape = (tokens, case.kv_heads, case.dim)
    kept = TORCH.kv_write(run, place, {"k": torch.randn(shape), "v": torch.randn(shape)})
    queries = torch.randn(tokens, case.heads, case.dim)
    wanted = TORCH.paged_attention(run, place, queries, kept, how)
    close(native.paged_attention(run, place, queries, kept, how), wanted)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        close(native.paged_attention(run, place, queries, kept, how), wanted)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("step", STEPS)
def test_attention_over_latents(step: list[tuple[int, int]], native: NativeOps) -> None:
    torch.manual_seed(0)
    fields = (Field("latent", (40,), DType.FP32), Field("rope", (8,), DType.FP32))
    pool = PoolSpec("mla", (0,), Entry(fields))
    run, place = forward_pass(pool, step), Place(pool, 0)
    tokens, how = len(run.positions), AttentionParams(0.2)
    fresh = {"latent": torch.randn(tokens, 40), "rope": torch.randn(tokens, 8)}
    kept, queries = TORCH.kv_write(run, place, fresh), torch.randn(tokens, 7, 48)
    wanted = TORCH.mla_attention(run, place, queries, kept, how, None)
    close(native.mla_attention(run, place, queries, kept, how, None), wanted)


def test_a_missing_page_is_noticed(native: NativeOps) -> None:
    pool = PoolSpec("kv", (0,), by_head(2, 16, DType.FP32))
    run = forward_pass(pool, [(40, 1)])
    run.sequences[0].slots["kv"][1] = -1
    kept = {"k": torch.randn(1, 2, 16), "v": torch.randn(1, 2, 16)}
    with pytest.raises(AssertionError, match="not resident"):
        native.paged_attention(run, Place(pool, 0), torch.randn(1, 2, 16), kept, AttentionParams(1))


@pytest.mark.parametrize("rotated", [0, 7, 16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("stored", [DType.FP32, DType.BF16, DType.FP16])
def test_heads_into_pages(stored: DType, normed: bool, rotated: int, native: NativeOps) -> None:
    """In 16 bits, a number on the verge may be rounded the other way; values are not computed."""
    torch.manual_seed(0)
    heads, kv_heads, dim = 4, 2, 32
    pool = PoolSpec("kv", (0,), by_head(kv_heads, dim, stored))
    norm = Norm(torch.rand(dim), 1e-5) if normed else None
    how = QKVParams(kv_heads, norm, norm, 1.5 if normed else 1.0)
    wide = torch.randn(22, 10, dim)  # As of a gated attention: gates lie behind.
    cos_sin = torch.randn(22, 2, rotated) if rotated else None
    made = []
    for ops in (TORCH, native):
        torch.manual_seed(1)
        run = forward_pass(pool, [(14, 20), (0, 1), (31, 1)])
        run.sequences[0].slots["kv"][1] = -1
        queries, kept = ops.qkv_write(run, Place(pool, 0), wide[:, : heads + 4], cos_sin, how)
        pages = run.step.view("kv", 0)
        made.append((queries, kept["k"], pages["k"], kept["v"], pages["v"]))
    rounding = 0.0 if stored is DType.FP32 else 2**-7
    for number, (found, wanted) in enumerate(zip(made[1], made[0], strict=True)):
        if number == 0:
            close(found, wanted)
        elif number < 3:
            torch.testing.assert_close(
                found.float(), wanted.float(), rtol=max(1e-5, rounding), atol=1e-5
            )
        else:
            assert torch.equal(found.float(), wanted.float())


def test_numbers_are_rounded_to_16_bits_as_torch_does(native: NativeOps) -> None:
    """Halves of steps, subnormal numbers, overflow, infinities and NaN."""
    steps = torch.tensor([1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-12, 1 + 3 * 2**-12, 1 + 2**-8 - 2**-12])
    small = torch.tensor([2**-14, 2**-14 - 2**-25, 3 * 2**-25, 2**-25, 2**-26, 1e-40, 0.0])
    large = torch.tensor([65504.0, 65519.996, 65520.0, 1e5, 3.39e38, 3.4e38, torch.inf, torch.nan])
    some = torch.cat([steps, small, large])
    some = torch.cat([some, -some, torch.randn(200) * 10.0 ** torch.randint(-9, 6, (200,))])
    for stored in (DType.BF16, DType.FP16):
        pool = PoolSpec("kv", (0,), by_head(1, len(some), stored))
        run, how = forward_pass(pool, [(0, 1)]), QKVParams(1)
        native.qkv_write(run, Place(pool, 0), some.repeat(1, 3, 1), None, how)
        page = run.step.view("kv", 0)["v"][run.sequences[0].slots["kv"][0], 0, 0]
        assert torch.equal(page.nan_to_num(7.0), some.to(page.dtype).nan_to_num(7.0))


class Layer:
    """Random projections around attention of 6 heads and 2 KV heads, and around a gated MLP."""

    WIDTH, DIM = 96, 32

    def __init__(self, native: NativeOps, form: str, stored: DType) -> None:
        sizes = {"qkv": 10 * self.DIM, "gate_up": 2 * 160}
        self.qkv, self.gate_up = (
            self.linear(native, form, rows, self.WIDTH) for rows in sizes.values()
        )
        self.out, self.down = (
            self.linear(native, form, self.WIDTH, inputs) for inputs in (6 * self.DIM, 160)
        )
        self.pool = PoolSpec("kv", (0,), by_head(2, self.DIM, stored), reuse=Reuse(18))
        norm = Norm(torch.rand(self.DIM), 1e-5)
        how = AttentionParams(0.2, window=19, sinks=torch.randn(6), cap=3.0)
        self.parts = AttentionParts(self.qkv, self.out, QKVParams(2, norm, norm, 1.1), how)

    def linear(self, native: NativeOps, form: str, rows: int, inputs: int) -> Linear:
        weight, bias = torch.randn(rows, inputs) * 0.2, torch.randn(rows)
        halves = PackedWeight.of_halves(weight.bfloat16())
        assert halves is not None
        return Linear(native.arithmetic, weight if form == "fp32" else halves, bias)


@pytest.mark.parametrize("stored", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("form", ["fp32", "packed"])
def test_parts_of_a_layer_in_one_call(form: str, stored: DType, native: NativeOps) -> None:
    torch.manual_seed(0)
    layer = Layer(native, form, stored)
    for step in STEPS:
        made = []
        for ops in (Ops, NativeOps):
            torch.manual_seed(1)
            run = forward_pass(layer.pool, step)
            x, cos_sin = torch.randn(len(run.positions), layer.WIDTH), torch.randn(1, 2, 9)
            cos_sin = cos_sin.repeat(len(x), 1, 1)
            place = Place(layer.pool, 0)
            attended = ops.self_attention(native, run, place, x, layer.parts, cos_sin)
            mlp = ops.gated_mlp(native, x, layer.gate_up, layer.down, swish)
            made.append((attended, mlp, *run.step.view("kv", 0).values()))
        for found, wanted in zip(made[1], made[0], strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("form", ["fp32", "packed"])
@pytest.mark.parametrize("name", ["qkv", "out", "gate_up", "down"])
def test_weights_of_other_shapes_are_refused(name: str, form: str, native: NativeOps) -> None:
    """Of a checkpoint that its config does not describe: an error, and no memory is overrun."""
    layer = Layer(native, form, DType.FP32)
    outputs, inputs = len(getattr(layer, name).held), layer.WIDTH
    if name in ("out", "down"):
        inputs = 2 * layer.DIM
    setattr(layer, name, layer.linear(native, form, outputs // 2, inputs))
    parts = replace(layer.parts, qkv=layer.qkv, out=layer.out)
    run = forward_pass(layer.pool, STEPS[0])
    x, cos_sin = torch.randn(len(run.positions), layer.WIDTH), torch.randn(1, 2, 9)
    place, rows = Place(layer.pool, 0), cos_sin.repeat(len(x), 1, 1)

    def attend() -> None:
        native.self_attention(run, place, x, parts, rows)

    def mlp() -> None:
        native.gated_mlp(x, layer.gate_up, layer.down, swish)

    with pytest.raises(RuntimeError):
        (attend if name in ("qkv", "out") else mlp)()


@pytest.mark.parametrize("rows", [1, 3, 8, 11, 17, 64, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("shape", [(1, 1), (25, 7), (70, 576), (96, 100)])
def test_rows_times_a_weight(shape: tuple[int, int], rows: int, native: NativeOps) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, shape[1]), torch.randn(shape), torch.randn(shape[0])
    for given in (None, bias):
        found = native.arithmetic.linear(x, weight, given)
        torch.testing.assert_close(
            found, torch.nn.functional.linear(x, weight, given), rtol=1e-5, atol=5e-5
        )


@pytest.mark.parametrize("width", [1, 16, 119, 576])
def test_functions_of_rows(width: int, native: NativeOps) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, width) * 3, torch.randn(5, width)
    norm = Norm(torch.rand(width), 1e-5)
    close(native.rms_norm(x, norm), TORCH.rms_norm(x, norm))
    for found, wanted in zip(
        native.add_rms_norm(x, y, norm), TORCH.add_rms_norm(x, y, norm), strict=True
    ):
        close(found, wanted)
    gate, up = torch.randn(5, 2 * width).mul(6).chunk(2, dim=1)
    for activation in (swish, gelu_tanh):
        close(native.gated(gate, up, activation), TORCH.gated(gate, up, activation))


def test_extreme_gates_stay_finite(native: NativeOps) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, 3.0]])
    for activation in (swish, gelu_tanh):
        found = native.gated(gate, torch.ones_like(gate), activation)
        close(found, TORCH.gated(gate.clamp(-1e9), torch.ones_like(gate), activation))


def test_pools_that_no_kernel_reads_go_to_the_references(native: NativeOps) -> None:
    pool = PoolSpec("kv", (0,), by_head(2, 16, KVDType.FP8.element))
    run, place = forward_pass(pool, [(20, 3)]), Place(pool, 0)
    kept = TORCH.kv_write(run, place, {"k": torch.randn(3, 2, 16), "v": torch.randn(3, 2, 16)})
    given = (run, place, torch.randn(3, 4, 16), kept, AttentionParams(0.25))
    assert torch.equal(native.paged_attention(*given), TORCH.paged_attention(*given))


# -- recurrent states ------------------------------------------------------------------------------

SHORT = [[(70, 1), (16, 1), (0, 1), (3, 1)], [(70, 4), (0, 2), (30, 1)], [(70, 1), (16, 9)]]


def from_states(
    native: NativeOps,
    fields: tuple[Field, ...],
    step: list[tuple[int, int]],
    run: Callable[[TorchOps, ForwardPass, Place], Tensor],
    kept: bool = True,
) -> None:
    """Both give the same outputs, and leave the same states."""
    found = []
    for ops in (native, TORCH):
        one: World = world(fields, step, torch.device("cpu"), kept=kept)
        whole = ForwardPass(replace(one.run.step, sequences=one.rows))
        found.append([run(ops, whole, one.place)])
        if kept:
            found[-1] += [t for n in range(len(step)) for t in one.after(n).values()]
    for ours, wanted in zip(*found, strict=True):
        close(ours, wanted)


@pytest.mark.parametrize("step", SHORT)
@pytest.mark.parametrize("by_channel", [False, True])
def test_gated_delta(by_channel: bool, step: list[tuple[int, int]], native: NativeOps) -> None:
    heads, keys, values, count = 4, 24, 40, sum(new for _, new in step)

    def run(ops: TorchOps, given: ForwardPass, place: Place) -> Tensor:
        torch.manual_seed(0)
        channels = heads * (keys if by_channel else 1)
        dt, beta = torch.randn(count, channels), torch.randn(count, heads + 2)[:, :-2]
        gates = DeltaGates(dt, torch.randn(channels), -torch.rand(heads), beta)
        inputs = torch.randn(count, 2 * 2 * keys + heads * values)
        return ops.gated_delta(given, place, inputs, gates)

    field = Field("delta", (heads, keys, values), DType.FP32)
    from_states(native, (field,), step, run)


@pytest.mark.parametrize("step", SHORT)
def test_ssd_scan(step: list[tuple[int, int]], native: NativeOps) -> None:
    heads, dim, width, count = 4, 10, 27, sum(new for _, new in step)

    def run(ops: TorchOps, given: ForwardPass, place: Place) -> Tensor:
        torch.manual_seed(0)
        how = ScanParams(torch.randn(4), -torch.rand(4), torch.randn(4, 1), (0.0, 5.0))
        inputs = torch.randn(count, heads * dim + 2 * 2 * width)
        return ops.ssd_scan(given, place, how, inputs, torch.randn(count, heads))

    from_states(native, (Field("ssm", (heads, dim, width), DType.FP32),), step, run)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("stored", [DType.FP32, DType.BF16])
def test_causal_conv(stored: DType, kept: bool, native: NativeOps) -> None:
    fields = (Field("conv_q", (6, 3), stored), Field("conv_k", (10, 3), stored))
    step = SHORT[0] if kept else [(0, 1), (0, 1)]

    def run(ops: TorchOps, given: ForwardPass, place: Place) -> Tensor:
        torch.manual_seed(0)
        conv = ConvWeights(torch.randn(4, 16), torch.randn(16), fields)
        return ops.causal_conv(given, place, conv, torch.randn(len(step), 16), swish)

    from_states(native, fields, step, run, kept)
