"""How many requests run at once, where the settings leave it open."""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.cache import Bytes, CacheConfig
from kvtide.cache.rank_agreement import Agreement
from kvtide.models import Model
from kvtide.server.settings import Settings
from kvtide.server.setup.residency_setup import UNSET_RUNNING, auto_context
from kvtide.spec.sizing import largest_batch, requests_in
from kvtide.tiers.tier_size import capacity_pages, tier_bytes

REQUEST_TOKENS = 256
"""A request's own tokens, beside a prefix that it shares. Admission counts slots anyway: a batch
that is too large costs CUDA graphs and their buffers, one that is too small leaves a GPU idle."""
MAX_RUNNING = 256
"""CUDA graphs are captured up to this batch: 17 sizes instead of 11 for each maximum length."""
LOGITS_PART = 64
"""Logits of a batch take at most this part of a GPU's tier: what is beside it must hold them."""


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """`sentence`: the line about it that a starting server prints."""

    requests: int
    sentence: str


def choose_batch(
    settings: Settings, model: Model, config: CacheConfig, agreement: Agreement
) -> BatchChoice:
    """What the settings ask for, or what the device tier holds; the same on all ranks."""
    if settings.max_running is not None:
        return BatchChoice(
            settings.max_running, f"up to {settings.max_running} requests run at once"
        )
    wanted = _hot_rows(model, config) if model.memory.hot_pools else _held(settings, model, config)
    (requests,) = agreement.all_min([min(wanted, settings.step_tokens)])
    return BatchChoice(
        requests,
        f"up to {requests} requests run at once, chosen by the device tier; --max-running N for "
        "another number",
    )


def _held(settings: Settings, model: Model, config: CacheConfig) -> int:
    """So many requests of `REQUEST_TOKENS` as the device tier holds, within the bounds."""
    memory, distance = model.memory, config.tokens_per_checkpoint
    pages = capacity_pages(memory, config.device_size, tokens_per_checkpoint=distance)
    held = min(requests_in(memory, pages, REQUEST_TOKENS), MAX_RUNNING)
    if settings.on_gpu:
        tier = tier_bytes(memory, config.device_size, tokens_per_checkpoint=distance)
        held = min(held, tier // LOGITS_PART // (4 * model.vocabulary))
    return max(held, UNSET_RUNNING)


def _hot_rows(model: Model, config: CacheConfig) -> int:
    """Hot buffers are allocated for all that may run: fewer, where a tier of bytes is small."""
    if not isinstance(config.device_size, Bytes):
        return UNSET_RUNNING
    context = auto_context(model.max_positions)
    fitting = largest_batch(model.memory, context, config.device_size.bytes)
    return UNSET_RUNNING if fitting is None else max(1, min(fitting, UNSET_RUNNING))
