"""Counters of integrations, in the default registry of Prometheus, which engines export.

| metric | labels |
|---|---|
| `kvtide_engine_pages_total` | engine, event: read, written, missing, corrupt, refused, failed |
| `kvtide_engine_bytes_total` | engine, direction: read, written |
| `kvtide_engine_seconds_total` | engine, call: exists, read, write |
| `kvtide_engine_tokens_total` | engine, source: device, host, storage, computed |
"""

from __future__ import annotations

from prometheus_client import Counter

PAGES = Counter("kvtide_engine_pages", "Pages by what happened to them.", ["engine", "event"])
BYTES = Counter("kvtide_engine_bytes", "Bytes of pages.", ["engine", "direction"])
SECONDS = Counter("kvtide_engine_seconds", "Time within calls of the store.", ["engine", "call"])
TOKENS = Counter("kvtide_engine_tokens", "Prompt tokens by their source.", ["engine", "source"])
