"""One snapshot per interval for all viewers, encoded once; nothing without a viewer.

    engine thread ──take──▶ snapshot ──rates, texts, JSON──▶ frame ──▶ every viewer

A viewer that reads slowly misses frames and delays no other. The stream ends with the service.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from kvtide.index import TreeBranch
from kvtide.models.tokenizer import Tokenizer
from kvtide.server.live.engine_snapshot import (
    MAX_BRANCHES,
    EngineSnapshots,
    Json,
    TreeOutline,
)
from kvtide.server.live.finished import FinishedRequests
from kvtide.server.live.request_rows import MAX_MISSES
from kvtide.server.service import Service, ServiceEndedError
from kvtide.server.sessions.prompt_changes import change_reason
from kvtide.spec import RankShape

INTERVAL_S = 1.0
SLICES = 4
"""The survey of a large tree gets so many slices of the engine's time per interval."""
SILENT_S = 5.0
"""While the engine is in a long step, viewers get a comment so often: the server is there."""
MAX_TEXT = 160

log = logging.getLogger("kvtide")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a snapshot says of the server, which does not change. `tokenizer`: texts are shown."""

    name: str
    page_tokens: int
    device: str
    shape: RankShape
    tokenizer: Tokenizer | None = None


class LivePublisher:
    """`frames` is for one viewer. What it has cost in CPU seconds: `snapshots.engine_s` of the
    engine's thread, `encode_s` of the event loop's."""

    def __init__(
        self,
        service: Service,
        finished: FinishedRequests,
        served: ServedModel,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.snapshots = EngineSnapshots(tokens=served.tokenizer is not None, shape=served.shape)
        self.encode_s = 0.0
        self.viewers = 0
        self._service, self._finished, self._served = service, finished, served
        self.interval_s = interval_s
        self._started = time.time()
        self._frame: bytes | None = None
        self._changed = asyncio.Event()
        self._outline: TreeOutline | None = None
        self._tree_json = ""
        self._rates = _Rates()
        self._task: asyncio.Task[None] | None = None

    async def frames(self) -> AsyncGenerator[bytes]:
        """Server-sent events from now on, until the service ends."""
        self.viewers += 1
        if self._task is None or self._task.done():
            self._frame, self._rates = None, _Rates()
            self._task = asyncio.create_task(self._publish())
        seen: bytes | None = None
        try:
            while True:
                if self._frame is not None and self._frame is not seen:
                    seen = self._frame
                    yield seen
                elif self._task is None or self._task.done():
                    return
                elif not await self._news():
                    yield b": the engine is in a long step\n\n"
        finally:
            self.viewers -= 1
            if not self.viewers and self._task is not None:
                self._task.cancel()
                self._task = None
                self.snapshots.forget()

    async def _news(self) -> bool:
        """Wait for the next frame, or the end; False if there was none for a while."""
        assert self._task is not None
        waiting = asyncio.create_task(self._changed.wait())
        done, _ = await asyncio.wait(
            {waiting, self._task}, timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()
        return bool(done)

    async def _publish(self) -> None:
        """Runs while there are viewers."""
        try:
            while True:
                began = time.monotonic()
                taken = await self._service.call(self.snapshots.take)
                self._frame = self._encode(taken)
                self._changed.set()
                self._changed = asyncio.Event()
                await self._survey(began + self.interval_s)
        except ServiceEndedError:
            return
        except Exception:
            log.exception("the live page broke")

    async def _survey(self, until: float) -> None:
        """Pass the time until the next snapshot, with slices of the survey if it needs some."""
        more = True
        while (left_s := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, self.interval_s / SLICES) if more else left_s)
            if more and time.monotonic() < until:
                more = await self._service.call(self.snapshots.survey)

    # -- from a snapshot to a frame ---------------------------------------------------------

    def _encode(self, taken: Json) -> bytes:
        began = time.thread_time()
        outline = taken.pop("tree")
        if outline is not self._outline:
            self._outline, self._tree_json = outline, _compact(self._tree(outline))
        rest = _compact(self.snapshot(taken))
        self.encode_s += time.thread_time() - began
        return f'data: {rest[:-1]},"tree":{self._tree_json}}}\n\n'.encode()

    def snapshot(self, taken: Json) -> Json:
        """What viewers get of what the engine's thread took, but for the tree."""
        now, finished, served = time.time(), self._finished, self._served
        finished.ticks.note(taken.pop("tick"))
        loading_s = taken.pop("loading_s")
        self._rates.add(taken, time.monotonic())
        last = [*taken["misses"]["last"], *finished.misses]
        newest = sorted(last, key=lambda miss: -miss["number"])[:MAX_MISSES]
        taken["misses"]["last"] = [self._miss(miss) for miss in newest]
        for row in taken["requests"]["rows"]:
            self._add_text(row, "tokens")
        saved_s = finished.saved.seconds - loading_s
        return {
            "time": now,
            "started": self._started,
            "server": {
                "model": served.name,
                "page_tokens": served.page_tokens,
                "device": served.device,
                "ranks": served.shape.ranks,
                "viewers": self.viewers,
                "interval_s": self.interval_s,
                "shows_text": served.tokenizer is not None,
            },
            **taken,
            "ttft": finished.first_tokens(),
            "saved": {
                "tokens": finished.saved.tokens,
                "prefill_s": finished.saved.seconds,
                "loading_s": loading_s,
                "seconds": saved_s,
                "rank_seconds": saved_s * served.shape.ranks,
                "token_s": self._service.rate.prefill_token_s,
            },
            "finished": finished.count,
            "cost": {"engine_s": self.snapshots.engine_s, "encode_s": self.encode_s},
        }

    def _miss(self, miss: Json) -> Json:
        """A change of the prompt becomes a sentence, with its text only if that may be shown."""
        change = miss["change"]
        if change is None:
            return miss
        reason = change_reason(change, self._served.tokenizer)
        return miss | {"change": reason["reason"], "pools": [reason, *miss["pools"]]}

    def _tree(self, outline: TreeOutline) -> Json:
        """The widest branches, each behind its parent."""
        listed = outline.top.widest(MAX_BRANCHES)
        return {
            "width": outline.top.width,
            "nodes": outline.nodes,
            "found": round(outline.found, 1),
            "branches": [self._branch(parent, branch) for parent, branch in listed],
        }

    def _branch(self, parent: int, branch: TreeBranch) -> Json:
        used = self._finished.ticks.time_of(branch.last)
        row = {
            "parent": parent,
            "start": branch.start,
            "tokens": branch.tokens,
            "width": branch.width,
            "tiers": [*(tier.name.lower() for tier in branch.tiers), *["storage"] * branch.stored],
            "arriving": branch.arriving,
            "hits": branch.hits,
            "used": None if used is None else round(used, 1),
            "sessions": branch.standing,
            "names": [json.loads(name)[-1] for name in branch.names],
            "head": branch.head,
        }
        self._add_text(row, "head")
        return row

    def _add_text(self, row: Json, name: str) -> None:
        """Tokens become text. Without leave to show it a snapshot has no tokens at all."""
        tokens, tokenizer = row.pop(name, None), self._served.tokenizer
        if tokens is not None and tokenizer is not None:
            ids = memoryview(tokens).cast("i").tolist() if isinstance(tokens, bytes) else tokens
            row["text"] = tokenizer.decode(ids)[:MAX_TEXT]


def _compact(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"))


class _Rates:
    """Changes per second between two snapshots, of counters that only grow."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._at = 0.0

    def add(self, taken: Json, now: float) -> None:
        """Give every flow its bytes per second, and the tokens of every origin their rate."""
        counters = {f"flow {way}": flow["bytes"] for way, flow in taken["flows"].items()}
        counters |= {f"from {origin}": count for origin, count in taken["tokens"].items()}
        passed = now - self._at
        rates = {
            name: max(0.0, (count - self._last[name]) / passed) if name in self._last else 0.0
            for name, count in counters.items()
        }
        for way, flow in taken["flows"].items():
            flow["bytes_s"] = round(rates[f"flow {way}"])
        taken["token_rates"] = {
            origin: round(rates[f"from {origin}"], 2) for origin in taken["tokens"]
        }
        self._last, self._at = counters, now
