"""What routers ask of a worker, beside `/health` and `/v1/models`.

| route                              | asked by               | what                              |
|------------------------------------|------------------------|-----------------------------------|
| GET /server_info, /get_server_info | smg, sglang-router     | model, role, ranks, handoffs      |
| GET /model_info, /get_model_info   | smg, sglang-router     | the model                         |
| GET /loads, /v1/loads              | smg                    | requests and tokens at this time  |
| GET /get_load                      | sglang-router          | the same in short                 |

The names of fields are those of SGLang, whose workers these routers expect; `role` and `handoff`
are our own. The path of the model is left out: a router on another machine would search for it
there. There is no `/version`: smg takes a worker that has one for vLLM's, and sends it no rooms.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from kvtide import __version__
from kvtide.engine import Engine
from kvtide.server.handoff.conventions import RouterConventions
from kvtide.server.handoff.handoff_settings import Role
from kvtide.server.service import Service
from kvtide.server.settings import Settings

Json = dict[str, Any]


class RouterRoutes:
    def __init__(
        self, settings: Settings, name: str, service: Service, conventions: RouterConventions
    ) -> None:
        self._settings, self._name = settings, name
        self._service, self._conventions = service, conventions

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/server_info", self._server),
            web.get("/get_server_info", self._server),
            web.get("/model_info", self._model),
            web.get("/get_model_info", self._model),
            web.get("/loads", self._loads),
            web.get("/v1/loads", self._loads),
            web.get("/get_load", self._load),
        ]

    async def _server(self, request: web.Request) -> web.Response:
        settings, handoff = self._settings, self._settings.handoff
        sizes = await self._service.call(_sizes)
        role = handoff.role
        return web.json_response(
            {
                **self._described(sizes),
                "version": __version__,
                "role": role.value,
                "disaggregation_mode": "null" if role is Role.BOTH else role.value,
                "handoff": self._handoff(),
                "tp_size": settings.tp,
                "pp_size": settings.pp,
                "dp_size": 1,
                "page_size": sizes["page_tokens"],
                "max_total_num_tokens": sizes["history_tokens"],
                "max_running_requests": sizes["max_running"],
            }
        )

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response(self._described(await self._service.call(_sizes)))

    def _described(self, sizes: Json) -> Json:
        return {
            "served_model_name": self._name,
            "model_type": sizes["model_type"],
            "is_generation": True,
            "max_model_len": sizes["max_sequence_tokens"],
        }

    def _handoff(self) -> Json | None:
        """How peers meet this server; None if it has no part in handoffs."""
        handoff, address = self._settings.handoff, self._conventions.address
        if not handoff.listens and not handoff.receives:
            return None
        return {
            "hands_over": address is not None,
            "receives": handoff.receives,
            "host": None if address is None else address.host,
            "port": None if address is None else address.port,
            "transport": handoff.transport,
        }

    async def _loads(self, request: web.Request) -> web.Response:
        load = await self._service.call(self._measured)
        return web.json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": __version__,
                "dp_rank_count": 1,
                "loads": [{"dp_rank": 0, **load}],
                "aggregate": {
                    "total_running_reqs": load["num_running_reqs"],
                    "total_waiting_reqs": load["num_waiting_reqs"],
                    "total_reqs": load["num_total_reqs"],
                    "avg_token_usage": load["token_usage"],
                    "avg_utilization": load["utilization"],
                },
            }
        )

    async def _load(self, request: web.Request) -> web.Response:
        load = await self._service.call(self._measured)
        short = {
            "dp_rank": 0,
            "num_reqs": load["num_total_reqs"],
            "num_waiting_reqs": load["num_waiting_reqs"],
            "num_tokens": load["num_used_tokens"] + load["num_waiting_uncached_tokens"],
        }
        return web.json_response([short])

    def _measured(self, engine: Engine) -> Json:
        """On the engine thread: requests, and the tokens whose pages they hold or wait for.

        What the cache has of a waiting prompt is known at its admission, so it counts whole.
        """
        scheduler, capacity = engine.scheduler, engine.cache.history_tokens
        running, waiting = len(scheduler.running), scheduler.waiting
        used = sum(request.length for request in scheduler.running)
        stats = engine.cache.stats()
        cached = sum(stats.cached_tokens.values())
        return {
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_waiting_uncached_tokens": sum(r.length for r in scheduler.queued),
            "num_used_tokens": used,
            "max_total_num_tokens": capacity,
            "token_usage": round(min(1.0, used / capacity), 4),
            "utilization": round(running / scheduler.max_running, 4),
            "max_running_requests": scheduler.max_running,
            "cache_hit_rate": round(cached / stats.prompt_tokens, 4)
            if stats.prompt_tokens
            else 0.0,
        }


def _sizes(engine: Engine) -> Json:
    memory = engine.cache.memory
    return {
        "model_type": memory.model,
        "page_tokens": memory.page_tokens,
        "history_tokens": engine.cache.history_tokens,
        "max_sequence_tokens": engine.max_sequence_tokens,
        "max_running": engine.scheduler.max_running,
    }
