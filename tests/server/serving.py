"""Tiny models in folders, a server in this process, and one in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import tokenizers
import torch
import transformers
from aiohttp import web

from kvtide.engine import Engine
from kvtide.server.app import App
from kvtide.server.engine_commands import Leader
from kvtide.server.handoff.server_handoff import ServerHandoff
from kvtide.server.kv_events.publishing import publish_kv_events
from kvtide.server.service import Service
from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import Serving, open_engine
from tests.server.forking import ForkedCommand
from tests.server.talking import Client

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 320
PAGE = 16
POSITIONS = 4096
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'refused' %}{{ raise_exception('no such text') }}{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content + eos_token }}"
    "{% endfor %}{% if shout %}!{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = ["the cat sat on the mat", "and then the hat", "that is that", "Grüße, 世界"]

# -- models ---------------------------------------------------------------------------------------


def save_model(folder: Path, **fields: object) -> Path:
    """A random Llama that gives every token some chance."""
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": POSITIONS,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
            **fields,
        }
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, merges: int = 41) -> Path:
    """Bytes, a few merges, and three tokens that are no text. Without merges any text has one
    spelling in tokens, as the outputs of trained models mostly have."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=259 + merges,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXTS, trainer)
    core.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


# -- in this process ------------------------------------------------------------------------------


class InProcess:
    """A server on a thread of its own, as `kvtide serve` builds it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.serving: Serving = open_engine(settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.service, self.app, self._runner = self.on_loop(self._open)
        self.address, self.port = self._runner.addresses[0][:2]
        self.client = Client(self.address, self.port, settings.admin_key or settings.api_key)

    @property
    def engine(self) -> Engine:
        return self.serving.engine

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """Run a function, or what it returns if that can be awaited, on the server's loop."""

        async def run() -> Any:
            found = function()
            return await found if asyncio.iscoroutine(found) else found

        future: Future[Any] = asyncio.run_coroutine_threadsafe(run(), self._loop)
        return future.result(timeout=60)

    async def _open(self) -> tuple[Service, App, web.AppRunner]:
        service = Service(Leader(self.serving.rank), self.settings.max_waiting)
        self.handoff = ServerHandoff(service, self.serving.rank, self.settings.handoff)
        settings = self.settings.kv_event_settings
        self.events = publish_kv_events(settings, service, self.serving.rank)
        app = App(self.settings, self.serving, service, self.handoff, self.events)
        runner = app.runner()
        await runner.setup()
        await web.TCPSite(runner, self.settings.address, self.settings.port).start()
        return service, app, runner

    def settled(self) -> dict[str, Any]:
        """The cache's report once nothing runs, waits or moves; it must have nothing against it."""
        report = self.until(lambda found: not any(_going_on(found)))
        assert report["violations"] == []
        for pools in report["tiers"].values():
            for pool in pools.values():
                held = pool["capacity_pages"] - pool["free_pages"]
                assert held == pool["resident_pages"], "a slot that is neither free nor in use"
        return report

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first report of the cache that is as wanted."""
        deadline = time.monotonic() + 60
        while not wanted(report := self.client.get("/admin/cache").json()):
            assert time.monotonic() < deadline, f"never came to be: {report}"
            time.sleep(0.002)
        return report

    def close(self) -> None:
        self.handoff.close()
        if self.events is not None:
            self.events.close()
        self.on_loop(self.service.close)
        self.on_loop(self._runner.cleanup)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        if self.serving.rank.handoff is not None:
            self.serving.rank.handoff.close()
        self.engine.cache.close()


def _going_on(report: Mapping[str, Any]) -> tuple[int, int, int]:
    requests = report["requests"]
    return requests["running"], requests["waiting"], report["in_flight"]


# -- in a process of its own ----------------------------------------------------------------------


@dataclass
class Child:
    """`kvtide serve`, as a shell would start it. Leaving the context kills what is left of it."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    """Python that runs in the child before it serves."""
    patience_s: float = 60.0
    """How long it may take until it listens."""

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        self.process = self._start(("serve", *self.arguments), environment)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _start(
        self, words: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str] | ForkedCommand:
        code = f"{self.before}\nimport sys\nfrom kvtide.cli.main import main\nsys.exit(main())"
        return subprocess.Popen(
            [sys.executable, "-c", code, *words],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def client(self) -> Client:
        """Waits until it listens."""
        deadline = time.monotonic() + self.patience_s
        while not (found := re.search(r"listening on http://(\S+):(\d+)\n", "".join(self.lines))):
            assert self.process.poll() is None, "".join(self.lines)
            assert time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.01)
        return Client(found[1], int(found[2]))

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        code = self.process.wait(30)
        self._reader.join(10)
        return code

    @property
    def printed(self) -> str:
        return "".join(self.lines)


class ForkedChild(Child):
    """The same, forked from a process that has imported what it needs (`forking`)."""

    def _start(self, words: Sequence[str], environment: Mapping[str, str]) -> ForkedCommand:
        return ForkedCommand(words, environment, self.before)
