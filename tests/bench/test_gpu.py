"""The GPU benchmarks measure what their rows name, with tiny models on the CPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from xml.etree import ElementTree

import pytest
import tokenizers
import torch
from tokenizers.pre_tokenizers import ByteLevel

from kvtide.bench.gpu import (
    ceilings,
    constrained,
    multi_turn,
    overheads,
    plot,
    throughput,
    transformers_peer,
    ttft,
)
from kvtide.bench.gpu.engine_bed import Bed, alternating
from kvtide.bench.gpu.shapes import RandomWeights, deepseek_v4_flash, qwen3_8b, tiny
from kvtide.cache import TieredCache
from kvtide.engine import Engine, Request, RequestParams, SamplingParams, scheduler
from kvtide.engine.sampling.sampling_params import GREEDY
from kvtide.models.tokenizer import Tokenizer, read_tokenizer

CPU = torch.device("cpu")
BEST = ceilings.Ceilings(flops=1e12, bytes_s=1e10, link_bytes_s=1e9)
SHAPES = {shape.name: tiny(shape) for shape in (qwen3_8b(), deepseek_v4_flash())}


def bed(name: str) -> Bed:
    return Bed(SHAPES[name].build(CPU, torch.float32), CPU)


def test_ceilings_are_work_divided_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "timed", lambda function, device: function() is None or 0.5)
    found = ceilings.measure(CPU, size=64, block_bytes=1 << 16)
    assert found.flops == 2 * 64**3 / 0.5
    assert found.bytes_s == 2 * (1 << 16) / 0.5  # Read and written.
    assert found.link_bytes_s > 0


@pytest.mark.quick(name=[qwen3_8b().name])
@pytest.mark.parametrize("name", SHAPES)
def test_prefixes_come_from_the_named_tier(name: str) -> None:
    found = ttft.measure(bed(name), name, 600, BEST, rounds=1, chunk_tokens=256)
    page = SHAPES[name].page_tokens
    assert found.host_tokens == 599 // page * page
    assert found.moved_bytes > 0 and found.link_s == found.moved_bytes / BEST.link_bytes_s
    assert found.recompute_s > max(found.host_s, found.device_s) > 0


def test_the_bound_is_the_longer_of_two() -> None:
    found = ttft.TtftResult("x", 10, 9.0, 5.0, 3.0, 1.0, 8, 100, link_s=2.0)
    assert (found.bound_s, found.of_bound, found.times_faster) == (2.0, 1.5, 3.0)
    assert replace(found, link_s=0.5).bound_s == 1.0


def test_a_dense_models_work_is_counted_from_its_shape() -> None:
    config = {
        "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
        "head_dim": 4, "hidden_size": 5, "intermediate_size": 7, "vocab_size": 11,
    }  # fmt: skip
    layer = 5 * 12 + 2 * 5 * 4 + 12 * 5 + 3 * 5 * 7
    assert throughput.weight_bytes(config) == 2 * (2 * layer + 5 * 11)
    assert throughput.kv_bytes(config) == 2 * 2 * 8
    assert throughput.prefill_flops(config, 10) == 2 * (2 * 10 * layer + 4 * 12 * 55)


def test_prefill_and_decode_are_fractions_of_the_ceilings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, config = bed("qwen3-8b"), SHAPES["qwen3-8b"].config
    monkeypatch.setattr(throughput, "median_s", lambda once, times: once() and 0.25)
    prompt = throughput.prefill(model, config, 128, BEST)
    assert prompt.utilization == throughput.prefill_flops(config, 128) / 0.25 / BEST.flops
    decode_step_s = throughput.decode_step_s
    monkeypatch.setattr(throughput, "decode_step_s", lambda *given: decode_step_s(*given) and 0.125)
    single = throughput.decode(model, config, 2, 64, BEST, steps=4)
    read = throughput.weight_bytes(config) + 2 * 66 * throughput.kv_bytes(config)
    assert single.utilization == read / 0.125 / BEST.bytes_s


def test_the_whole_batch_decodes_after_chunked_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scheduler, throughput):
        monkeypatch.setattr(module, "MIXED_STEP_TOKENS", 8)
    model = bed("qwen3-8b")
    with model.engine(4 * 256, chunk_tokens=256, max_running=4) as engine:
        assert throughput.decode_step_s(model, engine, 4, 64, 5) > 0
        assert engine.idle


def test_bytes_of_a_decode_step_of_deepseek_v4() -> None:
    """More with every sequence, and all experts only when there are tokens enough for them."""
    model, config = bed("deepseek-v4-flash"), SHAPES["deepseek-v4-flash"].config
    one, two, many = (
        throughput.decode_v4_bytes(config, model, batch, 4096) for batch in (1, 2, 64)
    )
    assert one < two < many
    held = sum(w.numel() * w.element_size() for w in throughput.weights_of(model.model))
    assert one < held


def test_the_same_load_is_served_with_a_host_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast is a busy machine's affair; that pages were copied down is not."""
    copied: list[bool] = []
    close = TieredCache.close

    def closed(self: TieredCache) -> bool:
        copied.append(self.stats().moved_pages["backup"] > 0)
        return close(self)

    monkeypatch.setattr(TieredCache, "close", closed)
    model = bed("qwen3-8b")
    prefill = overheads.write_through_prefill(model, 200, 1, 1, chunk_tokens=128)
    decode = overheads.decode_with_backup(model, 2, 64, 3, 1)
    assert min(prefill.on_s, prefill.off_s, decode.on_s, decode.off_s) > 0
    assert Counter(copied) == {True: 2, False: 2}
    assert overheads.OverheadResult("x", on_s=2.0, off_s=1.0).relative_speed == 0.5


@pytest.mark.parametrize("given", [False, pytest.param(True, marks=pytest.mark.full)])
def test_half_of_a_batch_is_constrained_in_turn(
    monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """By the grammar of a response format, with SmolLM2's vocabulary or a given one."""
    asked: list[bool] = []
    finished: list[Request] = []
    submit = Engine.submit

    def noted(engine: Engine, params: RequestParams) -> Request:
        asked.append(params.grammar is not None)
        finished.append(submit(engine, params))
        return finished[-1]

    monkeypatch.setattr(Engine, "submit", noted)
    words = _tokenizer_of_bytes() if given else constrained.learned_tokenizer()
    model = replace(bed("qwen3-8b"), tokenizer=words if given else None)
    found = constrained.measure(model, 4, 32, 12, rounds=1)
    assert found.relative_speed > 0 and found.on_s > found.masks_s > 0
    assert found.what.endswith(f"{256 if given else 49152:,} learned tokens")
    half = [True] * 2 + [False] * 2
    assert asked == [*half, *[False] * 4] * 2  # Once to warm up.
    for request in finished:
        text = "".join(words.decode([one.token for one in request.output]).split())
        assert len(request.output) > 12 and '[{"name":"'.startswith(text[:10]) == (
            request.params.grammar is not None
        )


def _tokenizer_of_bytes() -> Tokenizer:
    alphabet = {letter: byte for byte, letter in enumerate(sorted(ByteLevel.alphabet()))}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    core.decoder = tokenizers.decoders.ByteLevel()
    with NamedTemporaryFile("w", suffix=".json") as file:
        file.write(core.to_str())
        file.flush()
        return read_tokenizer({"tokenizer.json": Path(file.name)}, {})


def test_sampling_and_greedy_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted_params: list[SamplingParams] = []
    submit = Engine.submit

    def submitted(self: Engine, ask: RequestParams) -> Request:
        submitted_params.append(ask.sampling)
        return submit(self, ask)

    monkeypatch.setattr(Engine, "submit", submitted)
    assert overheads.sampling(bed("qwen3-8b"), 2, 64, 3, rounds=1).relative_speed > 0
    assert Counter(submitted_params) == {overheads.QWEN3_SAMPLING: 4, GREEDY: 4}  # Once to warm up.


@pytest.mark.full
def test_conversations_hit_more_with_more_capacity() -> None:
    load = multi_turn.MultiTurnLoad(
        users=4, turns=3, system_tokens=128, question_tokens=60, answer_tokens=4
    )
    both, alone, unlimited = multi_turn.measure(bed("qwen3-8b"), load, device_fraction=0.4)
    assert both.requests == alone.requests == unlimited.requests == 12
    found = [sum(one.cached_tokens.values()) for one in (alone, both, unlimited)]
    assert found[0] < found[1] <= found[2] and both.cached_tokens["host"] > 0
    assert sum(both.steps.values()) >= load.turns * load.answer_tokens
    assert 0 <= both.idle_s < both.seconds


@pytest.mark.full
def test_transformers_serves_the_same_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but its continuous batching, which takes half a minute to set up without a GPU."""
    monkeypatch.setattr(
        transformers_peer._Transformers, "continuous", lambda self: (None, "not asked")
    )
    work = transformers_peer.PeerLoad(first=96, context=32, batch=2, answer=3, steps=2)
    found = list(transformers_peer.measure(bed("qwen3-8b"), SHAPES["qwen3-8b"].config, work))
    assert [one.what for one in found] == list(work.names)
    assert all(one.kvtide_s > 0 for one in found)
    assert [one.transformers_s is None for one in found] == [False, False, False, True]
    assert found[3].why == "not asked"


def test_variants_alternate_in_both_orders() -> None:
    order: list[str] = []
    variants = [lambda: float(order.append("a") or 1.0), lambda: float(order.append("b") or 2.0)]
    assert alternating(variants, 3) == [1.0, 2.0] and "".join(order) == "abbaab"


def test_random_weights_know_their_names_and_no_others() -> None:
    shape = SHAPES["deepseek-v4-flash"]
    weights = RandomWeights(shape.tensors(shape.config), CPU, torch.float32)
    assert weights.has("model.layers.1.attn.indexer.compressor.ape")
    assert not weights.has("model.layers.0.attn.compressor.ape")
    assert not weights.has("model.layers.0.ffn.gate.bias")
    table = weights.get("model.layers.0.ffn.gate.tid2eid")
    assert all(len(set(row)) == len(row) for row in table[:20].tolist())


def test_the_chart_has_a_bar_for_every_tier() -> None:
    groups = [("a", {"recompute": 9.0, "host": 3.0}), ("b", {"storage": 1.0})]
    picture = ElementTree.fromstring(plot.draw("times", groups))
    bars = picture.findall("{http://www.w3.org/2000/svg}rect")[1:]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert len(widths) == 3 and widths[0] == pytest.approx(3 * widths[1], rel=1e-2)


def test_labels_of_the_chart_end_within_it() -> None:
    group = ("a", {"all, 16 at once": 3301.0, "hot, own choices": 128_197.0})
    picture = ElementTree.fromstring(plot.draw("speed", [group], "tokens/s"))
    for label in picture.findall("{http://www.w3.org/2000/svg}text"):
        x, width = float(label.attrib["x"]), 7 * len(label.text or "")
        first = x - width if label.attrib["text-anchor"] == "end" else x
        assert first >= 0 and first + width <= 720, label.text


def test_every_colour_of_the_chart_has_a_light_and_a_dark_value() -> None:
    names = ["recompute", "storage", "host", "device", *"abcdef"]
    picture = ElementTree.fromstring(plot.draw("times", [("a", dict.fromkeys(names, 1.0))]))
    style = picture.find("{http://www.w3.org/2000/svg}style")
    assert style is not None and style.text is not None
    light, _, dark = style.text.partition("@media (prefers-color-scheme: dark)")
    shapes = picture.findall("{http://www.w3.org/2000/svg}rect")
    classes = {"ground", *(shape.attrib["class"] for shape in shapes)}
    assert len(classes) == 6
    for selector in ("text ", *(f".{name} " for name in classes)):
        assert f"{selector}{{ fill: #" in light and f"{selector}{{ fill: #" in dark, selector
    assert all("fill" not in element.attrib for element in picture.iter())
