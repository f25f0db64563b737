"""Sizes of grids come from the device, which is asked once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvtide.layers.kernels.grid import INTERPRETED_SMS, divided_up, power_of_two, sm_count


def test_the_driver_is_asked_once_for_the_sm_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(multi_processor_count=78 + device.index)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    sm_count.cache_clear()
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    found = [sm_count(device) for device in (first, second, first, torch.device("cuda", 0))]
    sm_count.cache_clear()
    assert found == [78, 79, 78, 78]
    assert asked == [first, second]


def test_the_interpreter_has_the_sm_count_of_an_h200() -> None:
    assert sm_count(torch.device("cpu")) == INTERPRETED_SMS == 132


def test_sizes_are_rounded_up() -> None:
    assert [power_of_two(size) for size in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert [divided_up(total, 4) for total in (0, 1, 4, 5)] == [0, 1, 1, 2]
