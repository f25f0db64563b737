"""What a doctor finds wrong with a machine: one judgement each, and nothing on a sound one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtide.doctor.findings import Severity, findings
from kvtide.tiers import MachineMemory
from tests.doctor.examined import GB, H200, ON_CPU, examined, facts, qwen

PROBLEM, WARNING, NOTE = Severity


def test_a_sound_machine_has_nothing_wrong() -> None:
    assert findings(examined()) == []
    assert findings(examined(model=qwen())) == []


@pytest.mark.parametrize(
    ("changes", "name", "severity"),
    [
        ({"gpus": (), "torch_cuda": None}, "torch without CUDA", PROBLEM),
        ({"gpus": ()}, "GPU not usable", PROBLEM),
        ({"gpus": (), "driver": None}, "no NVIDIA driver", PROBLEM),
        (ON_CPU, "no GPU", NOTE),
        ({"memlock_bytes": 8 << 20}, "memlock", WARNING),
        ({"huge_pages": "never"}, "huge pages", WARNING),
        ({"shared_huge_pages": "never"}, "huge pages of shared memory", NOTE),
        ({"installed_bytes": 512 * GB}, "cgroup limit", NOTE),
        ({"shared_memory_bytes": 64 << 20}, "shared memory", WARNING),
        ({"shared_memory_bytes": None}, "shared memory", WARNING),
        ({"open_files": 1024}, "open files", WARNING),
        ({"kernel_flaw": "there is no g++ on PATH"}, "no native kernels", WARNING),
        ({"gpus": (H200, H200)}, "several GPUs", NOTE),
    ],
)
def test_each_fact_has_its_finding(changes: dict[str, Any], name: str, severity: Severity) -> None:
    (one,) = findings(examined(facts(**changes), qwen()))
    assert (one.name, one.severity) == (name, severity)
    assert one.what and one.remedy and not one.what.endswith(".")


def test_memlock_matters_for_pinned_memory_alone() -> None:
    on_cpu = facts(**ON_CPU, memlock_bytes=8 << 20)
    assert [one.name for one in findings(examined(on_cpu, qwen()))] == ["no GPU"]
    enough = facts(memlock_bytes=100 * GB)
    assert findings(examined(enough, qwen())) == []


def test_a_control_group_that_grants_less_than_tiers_and_weights_is_a_problem() -> None:
    small = facts(**ON_CPU, installed_bytes=128 * GB, memory=MachineMemory(8 * GB, 8 * GB))
    found = findings(examined(small, qwen(weights_bytes=8 * GB)))
    assert [(one.name, one.severity) for one in found[:2]] == [
        ("no room", PROBLEM),
        ("cgroup limit", PROBLEM),
    ]
    assert "8.00 GB of 128.00 GB" in found[1].what
    beside = findings(examined(small, qwen(weights_bytes=6 * GB)))
    assert [(one.name, one.severity) for one in beside if one.name != "no GPU"] == [
        ("cgroup limit", NOTE)
    ], "the tiers were sized by it"


def test_a_model_that_does_not_fit_is_a_problem() -> None:
    names = [one.name for one in findings(examined(model=qwen(weights_bytes=200 * GB)))]
    assert names == ["no room"]


def test_a_disk_that_is_slower_than_computing_is_found_by_the_planners_arithmetic() -> None:
    """Qwen3-8B: 147,456 B a token; 700 TFLOP/s × 0.5 over 16 GFLOP a token are 21,875 tokens/s."""
    model = qwen()
    limit = model.memory.history_bytes_per_token() * 0.5 * 700e12 / (2 * 8 * GB)
    assert findings(examined(model=model, rates={"storage_read": 1.01 * limit})) == []
    (slow,) = findings(examined(model=model, rates={"storage_read": 0.99 * limit}))
    assert (slow.name, slow.severity) == ("slow storage", WARNING)


def test_a_description_without_weights_is_reported_as_one() -> None:
    model = replace(qwen(weights_bytes=None), path=None)
    (one,) = findings(examined(model=model))
    assert (one.name, one.severity) == ("weights not known", NOTE)
    assert examined(model=model).advice.words[2] == "./qwen3-8b"
    assert "./qwen3-8b in the command is a folder that is not here" in one.what


def test_several_gpus_of_which_one_is_enough_are_said_to_stay_idle() -> None:
    (one,) = findings(examined(facts(gpus=(H200,) * 4), qwen()))
    assert "--tp 4 each has 4.00 GB of weights" in one.what
    divided = findings(examined(facts(gpus=(H200,) * 4), qwen(weights_bytes=200 * GB)))
    assert divided == [], "the settings are for two of them"


def test_a_named_store_that_cannot_be_measured_is_a_problem_once() -> None:
    broken = dict.fromkeys(("storage_read", "storage_write"), "connection refused")
    found = findings(examined(storage="redis://10.0.0.9:6379", unmeasured=broken))
    assert [(one.name, one.severity) for one in found] == [("storage not usable", PROBLEM)]
    assert "redis://10.0.0.9:6379 could not be measured: connection refused" in found[0].what


def test_a_slow_link_is_found() -> None:
    (slow,) = findings(examined(rates={"load": 3e9}))
    assert slow.name == "slow link" and "load 3.00 GB/s" in slow.what and "backup" not in slow.what


def test_what_could_not_be_measured_is_reported_but_not_twice_without_a_gpu() -> None:
    (one,) = findings(examined(unmeasured={"load": "it took more than 60 s"}))
    assert one.what == "load was not measured: it took more than 60 s"
    on_cpu = examined(facts(**ON_CPU), unmeasured={"load": "no GPU", "storage_read": "read-only"})
    assert [found.name for found in findings(on_cpu)] == ["no GPU", "not measured"]


def test_the_worst_comes_first() -> None:
    bad = facts(gpus=(), open_files=256, shared_huge_pages="never")
    order = [one.severity for one in findings(examined(bad, qwen()))]
    assert order == [PROBLEM, WARNING, NOTE]
