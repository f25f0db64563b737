"""The secondary tier under vLLM's real manager, and what the connector refuses.

Run by `test_vllm` in vLLM's own environment.

    PYTHONPATH=. python -m tests.integrations.vllm_tier_checks SCRATCH

Prints the name of every check that holds.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtide.integrations import vllm as plug_in
from kvtide.integrations import vllm_connector
from kvtide.storage import StoreError

CHUNKS, CHUNK_BYTES, KEYS = 48, 64 << 10, 12
HISTORY, WINDOW = 0, 1
MAX_S = 60.0
ENGINES = itertools.count()


def config(
    *group_ids: int,
    model: str = "model",
    dtype: str = "bfloat16",
    rank: int = 0,
    tier: dict[str, Any] | None = None,
) -> OffloadingConfig:
    """Of a model with a group of full attention, and one with windows unless others are asked."""
    groups = {
        HISTORY: OffloadingGroupConfig(16, ("layers.0", "layers.2"), HISTORY),
        WINDOW: OffloadingGroupConfig(32, ("layers.1", "layers.3"), WINDOW),
    }
    return OffloadingConfig(
        groups=tuple(groups[one] for one in group_ids or groups),
        worker_kv_bytes_per_block=CHUNK_BYTES // 2,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": CHUNKS * CHUNK_BYTES, "secondary_tiers": [tier or {}]},
        engine_id=f"kvtide-check-{os.getpid()}-{next(ENGINES)}",
        model=OffloadingModelConfig(model, dtype),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            *(rank, 2, 2, 1, 1, 1),
            *(0, 1, None, False),
        ),
    )


class World:
    """What a vLLM process has, made by its own spec: a manager, and its CPU tier."""

    def __init__(
        self, folder: str, *group_ids: int, settings: dict[str, Any] | None = None, **changes: Any
    ) -> None:
        tier = {
            "type": "KvtideTier",
            "module_path": "kvtide.integrations.vllm",
            "url": f"file://{folder}?cap=64MB&floor=0",
            "fingerprint": "r1",
        }
        made = config(*group_ids, **changes, tier=tier | (settings or {}))
        self.spec = TieringOffloadingSpec(made)
        self.manager = self.spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        region = self.spec._scheduler_mmap
        os.unlink(region.mmap_path)  # A check that is killed leaves no memory behind.
        region._creator = False
        self.memory = region.base_tensor.numpy().reshape(CHUNKS, CHUNK_BYTES)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=[]))

    def store(self, keys: list[Any]) -> None:
        context = ReqContext(req_id="store")
        self.manager.on_new_request(context)
        chunks = self.manager.prepare_store(keys, context).store_spec.chunk_ids
        for number, chunk in enumerate(chunks):
            self.memory[chunk] = number + 1
        self.manager.complete_store(keys, context)
        self.step()
        self.manager.on_request_finished(context)
        self.tier.drain_jobs()
        self.step()

    def found(self, keys: list[Any]) -> list[bool]:
        """Which keys are promoted to the CPU tier, once every look-up is answered."""
        context, deadline = ReqContext(req_id="load"), time.monotonic() + MAX_S
        self.manager.on_new_request(context)
        while True:
            results = [self.manager.lookup(key, context) for key in keys]
            self.step()
            if all(one in (LookupResult.HIT, LookupResult.MISS) for one in results):
                break
            assert time.monotonic() < deadline, results
            time.sleep(0.002)
        hits = [one is LookupResult.HIT for one in results]
        loaded = [key for key, hit in zip(keys, hits, strict=True) if hit]
        if loaded:
            chunks = self.manager.prepare_load(loaded, context).chunk_ids
            for key, chunk in zip(loaded, chunks, strict=True):
                assert (self.memory[chunk] == keys.index(key) + 1).all(), "other bytes"
            self.manager.complete_load(loaded, context)
        self.manager.on_request_finished(context)
        return hits

    def close(self) -> None:
        mapped = self.spec._scheduler_mmap.mmap_obj
        del self.memory
        self.manager.shutdown()
        assert mapped.closed, "the tier holds memory of vLLM's"


def keys(count: int = KEYS, group: int = HISTORY) -> list[Any]:
    return [make_offload_key(bytes([number]) * 32, group) for number in range(count)]


def filled(folder: str) -> None:
    world = World(folder)
    world.store(keys())
    assert world.tier.objects.counts["written"] == KEYS
    world.close()


def check_another_process_promotes_what_was_cascaded(folder: str) -> None:
    filled(folder)
    world = World(folder)
    assert world.found([*keys(), *keys(KEYS + 1)[KEYS:]]) == [True] * KEYS + [False]
    assert world.tier.objects.counts["read"] == KEYS
    assert not world.tier.has_pending_work()
    world.close()


def check_other_models_slices_and_dtypes_find_nothing(folder: str) -> None:
    filled(folder)
    for other in ({"model": "b"}, {"dtype": "float16"}, {"rank": 1}):
        world = World(folder, **other)
        assert world.found(keys()) == [False] * KEYS
        world.close()
    world = World(folder, settings={"fingerprint": "r2"})
    assert world.found(keys()) == [False] * KEYS
    world.close()


def check_a_damaged_chunk_is_a_miss_and_the_others_are_kept(folder: str) -> None:
    filled(folder)
    world = World(folder)
    read = world.tier.objects.store.read

    def damages(names: list[bytes], targets: list[memoryview]) -> list[int]:
        lengths = read(names, targets)
        for name, target in zip(names, targets, strict=True):
            if name == world.tier._pool.key(keys()[5]):
                target[100] ^= 1
        return lengths

    world.tier.objects.store.read = damages
    assert world.found(keys()) == [True] * 5 + [False] + [True] * (KEYS - 6)
    assert world.tier.objects.counts["corrupt"] == 1
    world.close()


def check_what_was_stored_survives_kill_minus_nine(folder: str) -> None:
    child = os.fork()
    if not child:
        World(folder).store(keys())
        os.kill(os.getpid(), 9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    world = World(folder)
    assert world.found(keys()) == [True] * KEYS
    world.close()


def check_vllm_learns_what_happened_to_chunks(folder: str) -> None:
    filled(folder)
    world = World(folder)
    assert world.found([*keys(), *keys(KEYS + 1)[KEYS:]]) == [True] * KEYS + [False]
    stats = world.tier.get_stats()
    assert stats.reduce() == {
        f"{plug_in.CHUNKS}:('read',)": KEYS,
        f"{plug_in.BYTES}:('read',)": KEYS * CHUNK_BYTES,
    }
    defined = type(world.tier).build_metric_definitions({})
    assert {name: len(one.labelnames) for name, one in defined.items()} == {
        plug_in.CHUNKS: 1,
        plug_in.BYTES: 1,
    }
    assert world.tier.get_stats() is None
    world.close()


def check_groups_of_a_hybrid_are_kept_apart(folder: str) -> None:
    """Chunks of equal tokens, which their keys tell apart by group alone."""
    both = [*keys(), *keys(group=WINDOW)]
    world = World(folder)
    world.store(both)
    world.close()
    world = World(folder)
    assert world.found(both) == [True] * 2 * KEYS
    assert world.tier.objects.counts["read"] == 2 * KEYS
    world.close()
    world = World(folder)
    name = world.tier._pool.key(keys(group=WINDOW)[3])
    world.tier.objects.store.remove([name])
    assert world.found(both) == [True] * (KEYS + 3) + [False] + [True] * (KEYS - 4)
    world.close()
    world = World(folder, HISTORY)
    assert world.found(both) == [False] * 2 * KEYS, "a model without windows"
    world.close()


def check_retrained_weights_in_the_same_folder_find_nothing(folder: str) -> None:
    model = Path(folder) / "model"
    model.mkdir()
    found = []
    for weights in (b"first", b"other", b"first"):
        model.joinpath("model.safetensors").write_bytes(weights)
        world = World(folder, settings={"fingerprint": ""}, model=str(model))
        found.append(world.found(keys()))
        if not any(found[-1]):
            world.store(keys())
        world.close()
    assert found == [[False] * KEYS, [False] * KEYS, [True] * KEYS]


def check_bad_settings_are_refused(folder: str) -> None:
    for settings, expected in (
        ({"url": ""}, "the tier's config names no store"),
        ({"cap": "4GB"}, "the tier's config has cap; kvtide knows url and fingerprint"),
        ({"fingerprint": ""}, "the weights of model are not known on this machine"),
    ):
        sentence = ""
        try:
            World(folder, settings=settings)
        except StoreError as error:
            sentence = str(error)
        assert expected in sentence, sentence


def unsupported(*specs: Any, **changed: Any) -> list[str]:
    """Sentences about a model of these groups, and settings that differ from good ones."""
    settings = {
        "kv_transfer_config": {"kv_load_failure_policy": "recompute"},
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
        "cache_config": {"prefix_caching_hash_algo": "sha256"},
    }
    config = SimpleNamespace(speculative_config=changed.pop("speculative_config", None))
    for name, values in settings.items():
        setattr(config, name, SimpleNamespace(**{**values, **changed.pop(name, {})}))
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return list(vllm_connector._unsupported(config, SimpleNamespace(kv_cache_groups=groups)))


def check_what_the_connector_does_not_support_is_refused(folder: str) -> None:
    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=64)
    assert unsupported(full) == []
    found = [
        *unsupported(full, kv_transfer_config={"kv_load_failure_policy": "fail"}),
        *unsupported(full, window),
        *unsupported(window),
        *unsupported(full, parallel_config={"pipeline_parallel_size": 2}),
        *unsupported(full, speculative_config="ngram"),
        *unsupported(full, cache_config={"prefix_caching_hash_algo": "xxhash"}),
    ]
    remedies = [
        *('set "kv_load_failure_policy": "recompute"', "use OffloadingConnector with"),
        *("use OffloadingConnector with", "use tensor parallelism alone"),
        *("leave out its config", "use --prefix-caching-hash-algo sha256"),
    ]
    assert len(found) == len(remedies)
    assert all(remedy in sentence for remedy, sentence in zip(remedies, found, strict=True))


def main() -> None:
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            folder = Path(sys.argv[1]) / name
            folder.mkdir()
            check(str(folder))
            print(name, flush=True)


if __name__ == "__main__":
    main()
