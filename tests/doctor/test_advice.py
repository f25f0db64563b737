"""Which settings a doctor recommends, and that a server would accept them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest

from kvtide.bench.transfer_speed import TransferMeasurement
from kvtide.byte_sizes import parse_bytes
from kvtide.doctor.advice import Advice, advise
from kvtide.doctor.probes import Measured
from kvtide.server.setting_sources import add_flags, read
from kvtide.server.settings import Settings
from kvtide.tiers import MachineMemory
from tests.doctor.examined import FOLDER, GB, H200, ON_CPU, RATES, examined, facts, qwen


def accepted(advice: Advice) -> Settings:
    """What `kvtide serve` makes of the command."""
    program, verb, *words = advice.words
    assert (program, verb) == ("kvtide", "serve")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return read(vars(parser.parse_args(words)), {})


def test_a_server_accepts_the_command_beside_a_gpu() -> None:
    chosen = accepted(examined(model=qwen()).advice)
    assert (chosen.model, chosen.device, chosen.page_tokens) == ("/models/qwen3-8b", "cuda", 64)
    assert chosen.device_bytes == pytest.approx(0.8 * (139 - 16) * GB, rel=0.01)
    assert chosen.host_bytes == pytest.approx(0.5 * 120 * GB, rel=0.01)
    assert (chosen.host_layout, chosen.io_backend) == ("page_first_direct", "auto")
    assert chosen.storage == "file:///pages?cap=500000MB"


def test_tiers_on_a_cpu_leave_room_for_the_weights_and_for_others() -> None:
    for free in (24 * GB, 40 * GB, 4000 * GB):
        machine = facts(**ON_CPU, memory=MachineMemory(2 * free, free))
        sizes = examined(machine, qwen()).advice.sizes
        assert sizes is not None and sizes.fits
        assert sizes.device_bytes + sizes.host_bytes + 16 * GB < free
        assert sizes.host_bytes == pytest.approx(2 * sizes.device_bytes, rel=0.01)
        assert sizes.device_bytes <= 131_072 * 147_456 + 1


def test_a_model_without_room_gets_the_least_tiers_and_does_not_fit() -> None:
    sizes = examined(model=qwen(weights_bytes=200 * GB)).advice.sizes
    assert sizes is not None and not sizes.fits and sizes.device_bytes > 0


def test_a_model_without_room_on_one_gpu_is_divided_over_as_few_as_have_room() -> None:
    model, several = qwen(weights_bytes=200 * GB), facts(gpus=(H200,) * 4)
    chosen = accepted(examined(several, model).advice)
    assert chosen.tp == 2
    assert chosen.device_bytes == pytest.approx(0.8 * (139 - 100) * GB, rel=0.01)
    assert chosen.host_bytes == pytest.approx(0.5 * 120 * GB / 2, rel=0.01)
    assert accepted(examined(several, qwen()).advice).tp == 1, "one has room"
    sizes = examined(several, qwen(weights_bytes=2000 * GB)).advice.sizes
    assert sizes is not None and not sizes.fits and sizes.ranks == 1


@pytest.mark.parametrize(
    "url", ["redis://10.0.0.9:6379/0", "s3://bucket/kv?endpoint=https://s3.example.com", "memory:"]
)
def test_a_store_that_was_named_is_advised_as_it_was_given(url: str) -> None:
    chosen = accepted(examined(model=qwen(), storage=url, free_bytes=0).advice)
    assert chosen.storage == url
    slow = examined(model=qwen(), storage=url, rates={"storage_read": 1e8}).advice
    assert accepted(slow).storage == "none"


@pytest.mark.parametrize("gain", [0.6, 1.2, 1.3])
def test_a_codec_is_advised_where_pages_are_read_clearly_faster_with_it(gain: float) -> None:
    advised = examined(model=qwen(), codec=gain).advice
    assert ("codec=lossless" in str(accepted(advised).storage)) == (gain == 1.3)
    (choice,) = (one for one in advised.choices if one.setting == "storage")
    assert f"codec=lossless reads {gain:.2f} times as fast as none" in choice.why
    own = examined(model=qwen(), storage="memory:?codec=fp8", codec=1.3).advice
    assert accepted(own).storage == "memory:?codec=fp8", "as it was given"


def test_a_codec_that_reads_faster_makes_fetching_pay() -> None:
    model = qwen()
    limit = model.memory.history_bytes_per_token() * 0.5 * 700e12 / (2 * 8 * GB)
    slow = {"storage_read": limit / 1.4}
    assert accepted(examined(model=model, rates=slow).advice).storage == "none"
    with_codec = accepted(examined(model=model, rates=slow, codec=1.45).advice)
    assert "codec=lossless" in str(with_codec.storage)


def test_a_password_is_left_out_of_the_command() -> None:
    url = "redis://user:sesame@10.0.0.9:6379/0"
    found = examined(model=qwen(), storage=url, codec=1.5).advice
    assert "sesame" not in found.command and accepted(found).storage is None
    (choice,) = (one for one in found.choices if one.setting == "storage")
    assert "KVTIDE_STORAGE" in choice.why and "&codec=lossless" in choice.why
    assert "sesame" not in choice.why


def test_pages_are_not_stored_where_fetching_does_not_pay() -> None:
    assert accepted(examined(model=qwen(), rates={"storage_read": 1e8}).advice).storage == "none"
    assert accepted(examined(model=qwen(), free_bytes=100).advice).storage == "none"


def test_without_rates_a_store_is_recommended_as_uncompared() -> None:
    measured = Measured({name: rate for name, rate in RATES.items() if name != "gemm"})
    advice = advise(facts(), measured, qwen(), FOLDER, GB)
    (storage,) = (one for one in advice.choices if one.setting == "storage")
    assert storage.value == "file:///pages?cap=500MB" and "not compared" in storage.why


def test_without_a_model_the_server_sizes_its_tiers_itself() -> None:
    chosen = accepted(examined().advice)
    assert chosen.model is None and chosen.device_bytes is None and chosen.host_bytes is None


def test_a_built_in_description_is_served_from_a_folder_of_its_name() -> None:
    model = replace(qwen(weights_bytes=None), path=None)
    assert examined(model=model).advice.words[2] == "./qwen3-8b"


def cell(layout: str, backend: str, gb_s: float) -> TransferMeasurement:
    values: dict[str, Any] = {"case": "", "bytes": 1, "legs": 1, "alone": 1.0, "goal": None}
    return TransferMeasurement(
        **values, way="load", layout=layout, backend=backend, gb_s=gb_s, back_to_back=1.0
    )


@pytest.mark.parametrize(
    ("kernel_gb_s", "expected"),
    [(60.0, ("page_first_direct", "auto")), (70.0, ("layer_first", "kernel"))],
)
def test_the_default_layout_stays_unless_another_is_clearly_faster(
    kernel_gb_s: float, expected: tuple[str, str]
) -> None:
    cells = [cell("page_first_direct", "auto", 50.0), cell("layer_first", "kernel", kernel_gb_s)]
    advice = advise(facts(), Measured(RATES, {}, None, cells), qwen(), FOLDER, GB)
    chosen = accepted(advice)
    assert (chosen.host_layout, chosen.io_backend) == expected


def test_sizes_are_written_as_settings_read_them() -> None:
    advice = examined(model=qwen()).advice
    sizes = advice.sizes
    assert sizes is not None
    written = {one.setting: one.value for one in advice.choices}
    assert parse_bytes(str(written["device_bytes"])) == sizes.device_bytes
    assert parse_bytes(str(written["host_bytes"])) == sizes.host_bytes
