"""A model that keeps what it has not declared is refused before it serves, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, EngineError
from kvtide.engine.declared_state.state_check import check_declared_state
from kvtide.layers import Place, Step
from kvtide.layers.reference.kv_write import kv_write
from kvtide.models import Model
from kvtide.spec import ModelMemory, PoolSpec, Reuse
from kvtide.spec.memory import with_draft
from kvtide.spec.pool import NOTHING
from tests.models.tiny import CONFIGS, ours

CPU = torch.device("cpu")
SEEN: list[Tensor] = []


@functools.cache
def cached(width: int) -> dict[str, Tensor]:
    return {}


def broken(change: Callable[[Any, Tensor, Any], object], name: str = "qwen3") -> Model:
    """A model whose second layer does something besides what it should."""
    model: Any = ours(name)

    class Keeping:
        """Has attributes, a class and a module to keep things in."""

        table: Tensor | None = None
        last: Tensor | None = None

        def __init__(self, layer: Any) -> None:
            self.layer = layer
            self.inner = SimpleNamespace(state=torch.zeros(96), seen=[], by_length={})
            self.hook = functools.partial(lambda kept: None, {})

        def __call__(self, x: Tensor, run: Any) -> Tensor:
            x = self.layer(x, run)
            change(self, x, run)
            return x

    model.layers[1] = Keeping(model.layers[1])
    return model


def _constant(layer: Any, x: Tensor, run: Any) -> None:
    if layer.table is None:
        layer.table = torch.arange(1000)


def _attribute(layer: Any, x: Tensor, run: Any) -> None:
    layer.last = x[-1]


def _list(layer: Any, x: Tensor, run: Any) -> None:
    layer.inner.seen.append(x)


def _dictionary(layer: Any, x: Tensor, run: Any) -> None:
    layer.inner.by_length[len(x)] = x


def _in_place(layer: Any, x: Tensor, run: Any) -> None:
    layer.inner.state += x.sum(0)


def _swapped_data(layer: Any, x: Tensor, run: Any) -> None:
    layer.inner.state.data = x.sum(0)


def _partial(layer: Any, x: Tensor, run: Any) -> None:
    layer.hook.args[0]["x"] = x


def _closure(layer: Any, x: Tensor, run: Any) -> None:
    layer.read = lambda: x


def _class(layer: Any, x: Tensor, run: Any) -> None:
    type(layer).last = x


def _module(layer: Any, x: Tensor, run: Any) -> None:
    SEEN.append(x)


def _cached_function(layer: Any, x: Tensor, run: Any) -> None:
    cached(96)["last"] = x


@pytest.mark.quick(name=[name for name in CONFIGS if "-" not in name])
@pytest.mark.parametrize("deterministic", [False, True], ids=["batched", "determined"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_family_keeps_only_what_it_declares(
    name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ours(name, deterministic=deterministic)
    forward, computed = model.forward, list[int]()

    def counted(step: Step, before: Tensor | None = None) -> Tensor:
        computed.append(len(step.tokens))
        return forward(step, before)

    monkeypatch.setattr(model, "forward", counted)
    check_declared_state(model, CPU)
    longest = max(pool.tokens_per_entry for pool in model.memory.pools)
    assert len(computed) == 3 and sum(computed) <= 2 * longest + 12, "every engine pays for this"


@pytest.mark.parametrize("page_tokens", [1, 4, 256])
def test_pages_of_any_size_will_do(page_tokens: int) -> None:
    check_declared_state(ours("falcon_h1", page_tokens=page_tokens), CPU)


def test_a_constant_that_is_made_when_it_is_first_needed_may_stay() -> None:
    check_declared_state(broken(_constant), CPU)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_attribute, r"model.layers\[1\].last holds a new tensor \[96\] after a step, and no pool"),
        (_list, r"model.layers\[1\].inner.seen\[2\] holds a new tensor \[\d+, 96\]"),
        (_dictionary, r"model.layers\[1\].inner.by_length\[\d+\] holds a new tensor"),
        (_in_place, r"model.layers\[1\].inner.state was changed in place by a step"),
        (_swapped_data, r"model.layers\[1\].inner.state was changed in place by a step"),
        (_partial, r"model.layers\[1\].hook<partial>\[0\]\['x'\] holds a new tensor"),
        (_closure, r"model.layers\[1\].read.x holds a new tensor"),
        (_class, r"Keeping.last holds a new tensor"),
        (_module, r"tests.engine.test_state_check.SEEN\[\d+\] holds a new tensor"),
        (
            _cached_function,
            r"tests.engine.test_state_check.cached<.*>.*\['last'\] holds a new tensor",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_tensor_without_a_pool_is_refused_by_name(change: Any, says: str) -> None:
    with pytest.raises(EngineError, match=says) as refusal:
        check_declared_state(broken(change), CPU)
    assert "declare a pool for it and keep it there" in str(refusal.value)


def test_an_engine_does_not_start_with_such_a_model() -> None:
    model = broken(_attribute)
    cache = TieredCache(model.memory, CacheConfig(Tokens(64)))
    with pytest.raises(EngineError, match=r"qwen3: model.layers\[1\].last"):
        Engine(model, cache)
    cache.close()


def test_all_that_is_found_is_counted() -> None:
    model: Any = broken(_list)
    model.layers[2] = type(model.layers[1])(model.layers[2])
    with pytest.raises(EngineError, match=r"seen\[2\] holds .* \(and 1 more\)"):
        check_declared_state(model, CPU)


# -- pools ---------------------------------------------------------------------------------------


def _with(memory: ModelMemory, *pools: PoolSpec) -> ModelMemory:
    return replace(memory, pools=(*memory.pools, *pools))


def test_a_pool_that_is_not_declared_is_refused_by_name() -> None:
    def ask(layer: Any, x: Tensor, run: Any) -> None:
        run.step.view("index", 1)

    with pytest.raises(EngineError, match=r"asks for a pool index for layer 1, which .*; declare"):
        check_declared_state(broken(ask), CPU)


def test_a_layer_that_its_pool_does_not_have_is_refused() -> None:
    model: Any = ours("gemma3")
    (windows,) = (pool for pool in model.memory.pools if pool.name == "swa")
    attention = model.layers[5].attention
    attention.place = Place(windows, 5)
    with pytest.raises(EngineError, match=r"asks for a pool swa for layer 5, which"):
        check_declared_state(model, CPU)


def test_slots_that_are_not_declared_are_refused() -> None:
    ghost = PoolSpec("ghost", (1,), ours("qwen3").memory.pools[0].entry)

    def keep(layer: Any, x: Tensor, run: Any) -> None:
        kv_write(run, Place(ghost, 1), {"k": x, "v": x})

    with pytest.raises(EngineError, match=r"asks for a pool ghost with slots of its own, which"):
        check_declared_state(broken(keep), CPU)


@pytest.mark.parametrize("follows", [None, "kv"])
def test_a_pool_that_no_layer_uses_is_refused_by_name(follows: str | None) -> None:
    model = ours("qwen3")
    entry = model.memory.pools[0].entry
    model.memory = _with(model.memory, PoolSpec("spare", (0, 2), entry, follows=follows))
    says = r"qwen3: pool spare is declared for layers \[0, 2\], .* never asked .*; take them out"
    with pytest.raises(EngineError, match=says):
        check_declared_state(model, CPU)


def test_a_layer_that_no_pool_uses_is_refused_by_number() -> None:
    model: Any = ours("qwen3")
    model.layers[1] = lambda x, run: x
    with pytest.raises(EngineError, match=r"pool kv is declared for layers \[1\], "):
        check_declared_state(model, CPU)


def test_a_drafts_pools_and_those_without_a_byte_need_no_use() -> None:
    model = ours("qwen3")
    draft = replace(model.memory, model="draft")
    empty = PoolSpec("swa", (0, 1), NOTHING, reuse=Reuse(reach=8))
    model.memory = with_draft(_with(model.memory, empty), draft)
    assert len(model.memory.pools) == 3
    check_declared_state(model, CPU)


def test_prompts_are_long_enough_for_pools_with_an_entry_for_many_tokens() -> None:
    """A compressor may ask for its pool only when it has an entry to keep."""
    model: Any = ours("qwen3", page_tokens=64)
    entry = model.memory.pools[0].entry
    compressed = PoolSpec("c32", (0,), entry, tokens_per_entry=32, follows="kv")
    model.memory = _with(model.memory, compressed)
    forward = model.forward

    def compress(step: Step, before: Tensor | None = None) -> Tensor:
        if any(rows.total // 32 > rows.past // 32 for rows in step.sequences):
            step.view("c32", 0)
        result: Tensor = forward(step, before)
        return result

    model.forward = compress
    check_declared_state(model, CPU)
