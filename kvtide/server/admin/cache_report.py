"""The JSON of `GET /admin/cache`: tiers, pools, counters and violated invariants."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvtide.engine import Engine
from kvtide.server.setup.store_setup import storage_report
from kvtide.spec import PoolSpec, Tier
from kvtide.spec.residency import hot_slots


def cache_report(engine: Engine) -> dict[str, Any]:
    stats, memory, config = engine.cache.stats(), engine.cache.memory, engine.cache.config
    return {
        "model": memory.model,
        "page_tokens": memory.page_tokens,
        "requests": {
            "running": len(engine.scheduler.running),
            "waiting": engine.scheduler.waiting,
            "max_sequence_tokens": engine.max_sequence_tokens,
        },
        "settings": {
            "device": config.device,
            "host_layout": config.host_layout.value,
            "io_backend": config.backend_name,
            "write_policy": config.write_policy,
            "eviction": config.eviction,
        },
        "pools": [_pool(engine, name) for name in (pool.name for pool in memory.pools)],
        "tiers": {
            tier.name.lower(): {
                anchor: {
                    "capacity_pages": count.capacity,
                    "resident_pages": count.resident,
                    "free_pages": count.free,
                    "page_bytes": memory.kept_in(tier).slot_bytes(anchor),
                }
                for (where, anchor), count in stats.pages.items()
                if where is tier
            }
            for tier in (Tier.DEVICE, Tier.HOST)
        },
        "tokens": {
            "prompt": stats.prompt_tokens,
            **{f"from_{tier.name.lower()}": stats.cached_tokens.get(tier, 0) for tier in Tier},
        },
        "misses": [
            {"pool": pool, "reason": reason, "leases": count}
            for (pool, reason), count in stats.misses.items()
        ],
        "transfers": [
            {"way": way, "end": end, "count": count}
            for (way, end), count in stats.transfers.items()
        ],
        "moved_bytes": dict(stats.moved_bytes),
        "in_flight": stats.in_flight,
        "overdue": stats.overdue,
        "refused_reservations": stats.refused,
        "skipped_backups": stats.skipped_backups,
        "sessions": stats.sessions.pinned,
        "storage": storage_report(stats.storage),
        "handoff": handoff_report(engine),
        "violations": engine.cache.validate(),
    }


def handoff_report(engine: Engine) -> dict[str, Any]:
    """Open handoffs by state, ended ones, and the slots that a peer may still write to."""
    incoming, outgoing = engine.handoffs.decode, engine.handoffs.prefill
    receiving, writer = engine.cache.receiving, outgoing.writer
    return {
        "incoming": {state.value: count for state, count in incoming.by_state.items()},
        "incoming_ended": {state.value: count for state, count in incoming.ended.items()},
        "handed_tokens": incoming.handed_tokens,
        "landed_bytes": incoming.landed_bytes,
        "quarantined": {
            "handoffs": len(receiving.quarantined),
            "slots": receiving.quarantined_slots,
        },
        "free_tail_rows": receiving.free_tail_rows,
        "outgoing": len(outgoing.rooms),
        "outgoing_ended": dict(outgoing.ended),
        "sender": None if writer is None else asdict(writer.sender.stats()),
    }


def _pool(engine: Engine, name: str) -> dict[str, Any]:
    pool = engine.cache.memory.pool(name)
    home = engine.cache.memory.pool(pool.follows or name).home
    reach = pool.reuse.reach
    return {
        "name": name,
        "layers": len(pool.layers),
        "follows": pool.follows,
        "reach": reach if isinstance(reach, int) else "all",
        "row_bytes": pool.row_bytes(engine.cache.memory.page_tokens),
        "home": home.name.lower(),
        "hot": None if pool.hot is None else _hot(engine, pool),
    }


def _hot(engine: Engine, pool: PoolSpec) -> dict[str, Any]:
    """How a pool on the host is used: `entries` of a request and layer are on the device."""
    rows = dict(zip(("in_use", "capacity"), engine.cache.index.hot_rows, strict=True))
    counts = engine.hot_counts()[pool.name]
    return {
        "entries": pool.hot,
        "rows": rows,
        "slots": {state: hot_slots(pool, count) for state, count in rows.items()},
        "hits": sum(counts.hits.values()),
        "misses": sum(counts.misses.values()),
        "gathered": sum(counts.gathered.values()),
        "hit_rate": counts.hit_rate,
        "swapped_bytes": counts.swapped_bytes,
    }
