"""The operations of layers by native kernels where they have one, else by the torch references.

A kernel takes fp32. Keys and values may lie in pages in 16 bits. Pools in eight bits, pools
that live on the host, and entries of several tokens go to the references.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers.backend.kernel_args import (
    AttentionParams,
    AttentionParts,
    ConvWeights,
    DeltaGates,
    Norm,
    Projection,
    QKVParams,
    ScanParams,
)
from kvtide.layers.backend.ops import Selection
from kvtide.layers.backend.torch_ops import TorchOps
from kvtide.layers.elementwise import Activation, gelu_tanh, swish
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.native.c_functions import (
    TYPES,
    AttentionCall,
    Functions,
    HeadsCall,
    States,
    StepTables,
)
from kvtide.layers.native.layer_calls import (
    MLPCalls,
    NativeLayer,
    attention_call,
    heads_call,
    norms_fit,
    point_to,
    rows_at_most,
    set_params,
    whereabouts,
)
from kvtide.layers.native.native_arithmetic import NativeArithmetic
from kvtide.layers.packing import Fields
from kvtide.spec import Encoding

SHORT_TOKENS = 4
"""New tokens of a sequence that recurrences take one by one."""
_GATINGS: dict[Activation, int] = {swish: 0, gelu_tanh: 1}


class NativeOps(TorchOps):
    def __init__(self, functions: Functions) -> None:
        super().__init__(NativeArithmetic(functions))
        self._functions = functions
        self._layers: dict[int, NativeLayer] = {}
        self._mlps = MLPCalls()

    # -- single rows -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        if not _is_plain(x) or norm.weight.shape != x.shape[-1:]:
            return super().rms_norm(x, norm)
        return self._normed(x.contiguous(), None, norm)[1]

    def add_rms_norm(self, x: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        if not (_is_plain(x) and _is_plain(y)) or norm.weight.shape != x.shape[-1:]:
            return super().add_rms_norm(x, y, norm)
        return self._normed(x.contiguous(), y.contiguous(), norm)

    def _normed(self, x: Tensor, y: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        width, out = x.shape[-1], torch.empty_like(x)
        total = x if y is None else torch.empty_like(x)
        self._functions.rms_norm(
            out.data_ptr(),
            total.data_ptr(),
            x.data_ptr(),
            None if y is None else y.data_ptr(),
            norm.weight.data_ptr(),
            x.numel() // width,
            width,
            width,
            norm.eps,
            torch.get_num_threads(),
        )
        return total, out

    def gated(
        self, gate: Tensor, up: Tensor, activation: Activation, limit: float | None = None
    ) -> Tensor:
        kind = _GATINGS.get(activation)
        if kind is None or limit is not None or not (_has_rows(gate) and _has_rows(up)):
            return super().gated(gate, up, activation, limit)
        out = gate.new_empty(gate.shape)
        self._functions.gated(
            out.data_ptr(),
            gate.data_ptr(),
            up.data_ptr(),
            gate.shape[0],
            gate.shape[1],
            gate.stride(0),
            up.stride(0),
            kind,
            torch.get_num_threads(),
        )
        return out

    def gated_mlp(
        self,
        x: Tensor,
        gate_up: Projection,
        down: Projection,
        activation: Activation,
        limit: float | None = None,
    ) -> Tensor:
        """In one call; the sums are those of the calls that it is made of."""
        kind, call = _GATINGS.get(activation), None
        if kind is not None and limit is None and _is_matrix(x):
            call = self._mlps.of(gate_up, down, kind)
        if (
            call is None
            or x.shape[1] != call.gate_up.inputs
            or len(x) > rows_at_most(gate_up, down)
        ):
            return super().gated_mlp(x, gate_up, down, activation, limit)
        out = x.new_empty(len(x), call.down.outputs)
        threads = torch.get_num_threads()
        self._functions.gated_mlp(call, out.data_ptr(), x.data_ptr(), len(x), threads)
        return out

    # -- attention -------------------------------------------------------------------------------

    def qkv_write(
        self,
        run: ForwardPass,
        place: Place,
        by_head: Tensor,
        cos_sin: Tensor | None,
        how: QKVParams,
    ) -> tuple[Tensor, Fields]:
        layer, pairs = self._layer(run, place), 0 if cos_sin is None else cos_sin.shape[-1]
        tokens, all_heads, dim = by_head.shape
        whole = _is_plain(by_head) and by_head.stride()[1:] == (dim, 1)
        whole = whole and all_heads > 2 * how.kv_heads
        if not (layer.by_head and whole and norms_fit(how, dim)):
            return super().qkv_write(run, place, by_head, cos_sin, how)
        heads = all_heads - 2 * how.kv_heads
        if layer.heads is None or layer.how is not how:
            view = run.step.view(place.pool.name, place.layer)
            layer.how, layer.heads = how, heads_call(view, heads, how, run.step.page_tokens)
        tables = _tables(run, place.anchor)
        queries = by_head.new_empty(tokens, heads, dim)
        keys, values = by_head.new_empty(2, tokens, how.kv_heads, dim)
        call = HeadsCall.from_buffer_copy(layer.heads)
        call.queries, call.keys = queries.data_ptr(), keys.data_ptr()
        call.values = values.data_ptr()
        call.by_head, call.token_stride = by_head.data_ptr(), by_head.stride(0)
        call.cos_sin = None if cos_sin is None else cos_sin.data_ptr()
        call.rows, call.owners, call.slots, call.table_width, _ = tables
        call.pairs, call.tokens, call.threads = pairs, tokens, torch.get_num_threads()
        self._functions.heads(call)
        return queries, {"k": keys, "v": values}

    def paged_attention(
        self, run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: AttentionParams
    ) -> Tensor:
        layer, k, v = self._layer(run, place), kept["k"], kept["v"]
        if not layer.readable or not _fits(queries, k, v):
            return super().paged_attention(run, place, queries, kept, how)
        return self._attend(run, layer, queries, (("k", k), ("v", v)), how)

    def self_attention(
        self,
        run: ForwardPass,
        place: Place,
        x: Tensor,
        parts: AttentionParts,
        cos_sin: Tensor | None,
    ) -> Tensor:
        """In one call; the sums are those of the calls that it is made of."""
        layer, call = self._layer(run, place), None
        if _is_matrix(x) and len(x) <= rows_at_most(parts.qkv, parts.out):
            view = run.step.view(place.pool.name, place.layer)
            call = layer.of_parts(view, parts, run.step.page_tokens)
        if call is None or x.shape[1] != call.qkv.inputs:
            return super().self_attention(run, place, x, parts, cos_sin)
        out = x.new_empty(len(x), call.out.outputs)
        step = _step_tables(run, place.anchor, cos_sin)
        resident = self._functions.self_attention(call, step, out.data_ptr(), x.data_ptr())
        assert resident, f"pool {place.pool.name}: tokens are needed and not resident"
        return out

    def mla_attention(
        self,
        run: ForwardPass,
        place: Place,
        queries: Tensor,
        kept: Fields,
        how: AttentionParams,
        selected: Selection | None,
    ) -> Tensor:
        layer, fields = self._layer(run, place), ("latent", "rope", "latent")
        ours = tuple((name, kept[name].unsqueeze(1)) for name in fields)
        if selected is not None or not layer.readable or not _fits(queries, *kept.values()):
            return super().mla_attention(run, place, queries, kept, how, selected)
        return self._attend(run, layer, queries, ours, how)

    def _layer(self, run: ForwardPass, place: Place) -> NativeLayer:
        """A view lies where it is while an engine lives; a model may serve one after another."""
        view, known = run.step.view(place.pool.name, place.layer), self._layers.get(id(place))
        if known is None or known.at != whereabouts(view):
            known = self._layers[id(place)] = NativeLayer(place, view)
        return known

    def _attend(
        self,
        run: ForwardPass,
        layer: NativeLayer,
        queries: Tensor,
        fresh: tuple[tuple[str, Tensor], ...],
        how: AttentionParams,
    ) -> Tensor:
        """`fresh` are the step's own vectors by field: keys, in one or two parts, and values."""
        if layer.attention is None:
            view = run.step.view(layer.place.pool.name, layer.place.layer)
            heads = queries.shape[1], fresh[0][1].shape[1]
            names = [name for name, _ in fresh]
            layer.attention = attention_call(view, names, *heads, run.step.page_tokens)
        wide = queries if queries.dtype is torch.float32 else queries.float()
        wide = wide.contiguous()
        out = wide.new_empty(*queries.shape[:2], fresh[-1][1].shape[-1])
        call = AttentionCall.from_buffer_copy(layer.attention)
        call.out, call.queries = out.data_ptr(), wide.data_ptr()
        call.rows, _, call.slots, call.table_width, call.sequences = _tables(
            run, layer.place.anchor
        )
        set_params(call, how)
        point_to(call.key, fresh[0][1])
        point_to(call.value, fresh[-1][1])
        if len(fresh) == 3:
            point_to(call.key_rest, fresh[1][1])
        call.threads = torch.get_num_threads()
        resident = self._functions.attention(call)
        assert resident, f"pool {layer.place.pool.name}: tokens are needed and not resident"
        return out if out.dtype is queries.dtype else out.to(queries.dtype)

    # -- recurrent layers ------------------------------------------------------------------------

    def causal_conv(
        self,
        run: ForwardPass,
        place: Place,
        conv: ConvWeights,
        inputs: Tensor,
        activation: Activation | None = None,
    ) -> Tensor:
        """In torch, of all sequences together, where each has one new token."""
        plain = place.pool.hot is None and place.pool.entry.encoding is Encoding.PLAIN
        if not (plain and conv.kept and run.batch.rows.shape[0] == inputs.shape[0]):
            return super().causal_conv(run, place, conv, inputs, activation)
        if run.batch.bounds.longest != 1:
            return super().causal_conv(run, place, conv, inputs, activation)
        fresh = conv.rounded(run, place, inputs).float()
        view, key = run.step.view(place.pool.name, place.layer), ("state rows", place.anchor)
        read, empty, kept, written = run.shared(key, lambda: _state_rows(run, place))
        tails = [view[field.name][read, -1].to(fresh.dtype) for field in conv.kept]
        window = torch.cat([torch.cat(tails, 1), fresh[:, :, None]], 2)
        if empty is not None:
            window[empty, :, :-1] = 0
        sums: Tensor = (window * conv.taps.T).sum(-1)
        sums = sums if conv.bias is None else sums + conv.bias
        first = 0
        for field in conv.kept:
            part = window[kept, first : first + field.shape[0], 1:]
            view[field.name][written, -1] = place.packing.pack({field.name: part})[field.name]
            first += field.shape[0]
        return sums if activation is None else activation(sums)

    def gated_delta(
        self, run: ForwardPass, place: Place, convolved: Tensor, gates: DeltaGates
    ) -> Tensor:
        if not (_is_short(run) and _is_state(run, place, "delta") and _is_whole(convolved)):
            return super().gated_delta(run, place, convolved, gates)
        heads, keys, values = place.field("delta").shape
        dt = functional.softplus(gates.dt.float() + gates.dt_bias, threshold=80.0)
        log_decay = gates.decay[:, None] * dt.unflatten(1, (heads, -1))
        log_decay, beta = log_decay.contiguous(), gates.beta.float().sigmoid().contiguous()
        out = convolved.new_empty(convolved.shape[0], heads, values)
        self._functions.delta(
            out.data_ptr(),
            convolved.data_ptr(),
            log_decay.data_ptr(),
            beta.data_ptr(),
            _states(run, place, "delta"),
            heads,
            (convolved.shape[1] - heads * values) // (2 * keys),
            keys,
            values,
            log_decay.shape[-1],
            torch.get_num_threads(),
        )
        return out

    def ssd_scan(
        self, run: ForwardPass, place: Place, how: ScanParams, convolved: Tensor, dt: Tensor
    ) -> Tensor:
        if not (_is_short(run) and _is_state(run, place, "ssm") and _is_whole(convolved)):
            return super().ssd_scan(run, place, how, convolved, dt)
        heads, dim, width = place.field("ssm").shape
        dt = functional.softplus(dt.float() + how.dt_bias, threshold=80.0).clamp(*how.dt_limits)
        dt = dt.contiguous()
        out = convolved.new_empty(convolved.shape[0], heads, dim)
        self._functions.scan(
            out.data_ptr(),
            convolved.data_ptr(),
            dt.data_ptr(),
            how.decay.data_ptr(),
            _states(run, place, "ssm"),
            heads,
            (convolved.shape[1] - heads * dim) // (2 * width),
            dim,
            width,
            torch.get_num_threads(),
        )
        x = convolved[:, : heads * dim].unflatten(1, (heads, dim))
        skipped: Tensor = out + x * how.skip
        return skipped.flatten(1)


# -- what calls take -----------------------------------------------------------------------------


def _tables(run: ForwardPass, anchor: str) -> tuple[int, int, int, int, int]:
    """Addresses of rows, owners and slots, the width of the table of slots, and sequences."""

    def found() -> tuple[int, int, int, int, int]:
        batch, slots = run.batch, run.batch.slots[anchor]
        assert slots.is_contiguous() and batch.rows.is_contiguous()
        addresses = batch.rows.data_ptr(), batch.owners.data_ptr(), slots.data_ptr()
        return *addresses, slots.shape[1], batch.rows.shape[0]

    return run.shared(("native tables", anchor), found)


def _step_tables(run: ForwardPass, anchor: str, cos_sin: Tensor | None) -> StepTables:
    """Of layers with this anchor and this rotation."""

    def made() -> tuple[StepTables, Tensor | None]:
        rows, owners, slots, width, sequences = _tables(run, anchor)
        tables = StepTables(
            cos_sin=None if cos_sin is None else cos_sin.data_ptr(),
            rows=rows,
            owners=owners,
            slots=slots,
            table_width=width,
            sequences=sequences,
            tokens=len(run.positions),
            pairs=0 if cos_sin is None else cos_sin.shape[-1],
            threads=torch.get_num_threads(),
        )
        return tables, cos_sin

    return run.shared(("native step", anchor, id(cos_sin)), made)[0]


def _is_matrix(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.dim() == 2 and x.is_contiguous() and x.numel() > 0


def _is_short(run: ForwardPass) -> bool:
    """Whether token by token is faster than chunks, which are GEMMs."""
    return run.batch.bounds.longest <= SHORT_TOKENS


def _is_state(run: ForwardPass, place: Place, field: str) -> bool:
    if place.pool.hot is not None or place.pool.entry.encoding is not Encoding.PLAIN:
        return False
    state = run.step.view(place.pool.name, place.layer)[field]
    return state.dtype is torch.float32 and state[0, 0].is_contiguous()


def _state_rows(run: ForwardPass, place: Place) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Slots to read from, the sequences that have none; sequences that have a slot to write to, and
    these."""
    before, after = (slots.long() for slots in run.state_slots(place))
    empty = (before < 0).nonzero().squeeze(1)
    kept = (after >= 0).nonzero().squeeze(1)
    return before.clamp(min=0), empty if empty.numel() else None, kept, after[kept]


def _is_whole(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous()


def _states(run: ForwardPass, place: Place, field: str) -> States:
    state, batch = run.step.view(place.pool.name, place.layer)[field], run.batch
    before, after = run.state_slots(place)
    assert before.is_contiguous() and after.is_contiguous()
    return States(
        state[0, -1].data_ptr(),
        state.stride(0) * state.element_size(),
        before.data_ptr(),
        after.data_ptr(),
        batch.rows.data_ptr(),
        batch.rows.shape[0],
    )


def _is_plain(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.numel() > 0


def _has_rows(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.dim() == 2 and x.stride(1) == 1 and x.shape[0] > 0


def _fits(queries: Tensor, *fresh: Tensor) -> bool:
    """Whether queries and the step's own keys and values are such as kernels take."""
    if queries.numel() == 0:
        return False
    for each in fresh:
        if each.dim() == 3 and queries.shape[1] % each.shape[1]:
            return False
        inner = (each.shape[2], 1) if each.dim() == 3 else (1,)
        if each.dtype not in TYPES or each.stride()[1:] != inner:
            return False
    return True
