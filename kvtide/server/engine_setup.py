"""From settings to an engine that serves: checkpoint, model, cache, tokenizer, store."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.cache import Bytes, CacheConfig, Layout, Ranks, Ratio, TieredCache, Tokens
from kvtide.cache.rank_agreement import Alone
from kvtide.engine import Engine, RankTopology
from kvtide.engine.oracle import BOUNDS, Oracle
from kvtide.layers import Weights
from kvtide.models import Model, build
from kvtide.models.checkpoint import Checkpoint, open_checkpoint
from kvtide.models.default_model import NAME, default_model
from kvtide.models.tokenizer import load_tokenizer
from kvtide.server import store_setup
from kvtide.server.command_error import CommandError
from kvtide.server.engine_commands import Post
from kvtide.server.settings import Settings
from kvtide.spec.families import KVDType, declare
from kvtide.tiers import MachineMemory, TierSize, device_memory, machine_memory
from kvtide.transfer import backends

DEFAULT_TOKENS = 16_384
"""The device tier of a CPU, if nothing is said: a few conversations with a small model."""
GPU_SHARE, HOST_SHARE = 0.8, 0.5
"""Of a GPU's memory beside the weights, and of the machine's beside a GPU: the tiers there, if
nothing is said. The rest of the GPU's is what a step takes."""

AGREE_S = 600.0
"""How long ranks wait for the slowest of them: a stage may be ahead by a whole step."""

_REMEDY = "use cpu, cuda or cuda:N"
_KEPT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Serving:
    """A rank that is ready, what the model is called, and where its pages are stored."""

    post: Post
    name: str
    stored: str

    @property
    def engine(self) -> Engine:
        return self.post.engine


def open_engine(settings: Settings, topology: RankTopology | None = None) -> Serving:
    """Load the model and take the memory, or refuse in a sentence.

    All ranks do so together, each with its own layers, or its share of them.
    """
    topology = topology or RankTopology()
    device = _device(settings)
    checkpoint = open_checkpoint(default_model() if settings.model is None else settings.model)
    model = _build(settings, checkpoint, device, topology)
    fingerprint = _fingerprint(settings, checkpoint, device)
    agreement = Ranks(timeout_s=AGREE_S) if topology.ranks > 1 else Alone()
    config = cache_config(settings, model, fingerprint)
    cache = TieredCache(model.memory, config, agreement=agreement)
    engine = Engine(
        model,
        cache,
        load_tokenizer(checkpoint),
        chunk_tokens=settings.step_tokens,
        max_running=settings.max_running,
        oracle=_oracle(settings, cache),
        topology=topology,
    )
    try:
        _prepare(engine)
        stored = store_setup.attach(settings, cache, os.environ)
    except CommandError:
        cache.close()
        raise
    name = settings.name or (_name(checkpoint) if settings.model else NAME)
    return Serving(Post(engine, topology), name, stored)


def _prepare(engine: Engine) -> None:
    try:
        engine.prepare()
    except torch.OutOfMemoryError:
        raise CommandError(
            "the GPU has no room left for steps beside its tier; use a smaller --device-tokens, "
            "--device-bytes or --max-running"
        ) from None


def check_ranks(settings: Settings) -> None:
    """Refuse ranks over which the model does not divide, before they are started."""
    if settings.ranks > 1:
        there = torch.cuda.device_count()
        if settings.device == "cuda" and there < settings.ranks:
            raise CommandError(
                f"{settings.ranks} ranks need a GPU each, and torch finds {there}; use a smaller "
                "--tp or --pp"
            )
        _device(settings)
        model = default_model() if settings.model is None else settings.model
        config, page = open_checkpoint(model).config, settings.page_tokens
        memory = declare(config, model=str(config.get("model_type")), page_tokens=page)
        list(memory.stages(settings.pp, 0, settings.tp))


def _name(checkpoint: Checkpoint) -> str:
    """A folder's name may have dots; a file's ends with what kind it is."""
    path = checkpoint.path.resolve()
    return path.name if checkpoint.gguf is None else path.stem


def _device(settings: Settings) -> torch.device:
    """Where to compute, if it can be done there: refused before a model is loaded for it."""
    try:
        device = torch.device(settings.device)
    except RuntimeError:
        raise CommandError(f"--device {settings.device} is not known; {_REMEDY}") from None
    if device.type not in backends.DEFAULTS:
        raise CommandError(f"--device {settings.device}: nothing is computed there; {_REMEDY}")
    there = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= there:
        raise CommandError(
            f"--device {settings.device}: torch finds {there} such devices here; {_REMEDY}"
        )
    backend = settings.io_backend or backends.DEFAULTS[device.type]
    backends.check(device, backend, Layout(settings.layout))
    return device


def _fingerprint(settings: Settings, checkpoint: Checkpoint, device: torch.device) -> bytes:
    """Whose pages may be used: those computed from the same weights, and in the same way.

    Who wants answers that are equal to the last bit takes no page that was computed otherwise.
    """
    way = [str(_dtype(settings))]
    if settings.deterministic:
        way += ["deterministic", device.type, torch.__version__]
    return hashlib.sha256(checkpoint.fingerprint() + " ".join(way).encode()).digest()


def cache_config(settings: Settings, model: Model, fingerprint: bytes) -> CacheConfig:
    usual: TierSize = Tokens(max(DEFAULT_TOKENS, model.memory.page_tokens))
    device_size, host_size = settings.device_size or usual, settings.host_size
    if settings.on_gpu:
        gpu = device_memory(torch.device(settings.device))
        device_size, host_size = gpu_sizes(settings, gpu, machine_memory())
    return CacheConfig(
        device_size=device_size,
        host_size=host_size,
        device=settings.device,
        layout=Layout(settings.layout),
        backend=settings.io_backend,
        write_policy=settings.write_policy,
        eviction=settings.eviction,
        tokens_per_checkpoint=settings.tokens_per_checkpoint,
        patience=settings.patience,
        fingerprint=fingerprint,
    )


def gpu_sizes(
    settings: Settings, gpu: MachineMemory, machine: MachineMemory
) -> tuple[TierSize, TierSize | None]:
    """The tiers beside a GPU, as far as nothing is said of them. Ranks share the machine."""
    device_size, host_size = settings.device_size, settings.host_size
    if device_size is None:
        device_size = Bytes(max(1, gpu.share(GPU_SHARE)))
    if isinstance(host_size, Ratio) and settings.host_ratio is None:
        host_size = Bytes(max(1, machine.share(HOST_SHARE) // settings.ranks))
    return device_size, host_size


def _oracle(settings: Settings, cache: TieredCache) -> Oracle | None:
    if not settings.verify_restores:
        return None
    bounds = None if settings.deterministic else BOUNDS[_dtype(settings)]
    return Oracle(cache, settings.verify_restores, bounds)


def _dtype(settings: Settings) -> torch.dtype:
    usual = "float32" if torch.device(settings.device).type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, settings.dtype or usual)
    return dtype


def _build(
    settings: Settings, checkpoint: Checkpoint, device: torch.device, topology: RankTopology
) -> Model:
    dtype = _dtype(settings)
    with device:
        return build(
            checkpoint.config,
            OnDevice(checkpoint.weights, device),
            page_tokens=settings.page_tokens,
            kv_dtype=KVDType.parse(settings.kv_dtype or _KEPT[dtype]),
            checkpoint_tokens=settings.checkpoint_tokens,
            dtype=dtype,
            deterministic=settings.deterministic,
            stage=topology.stage,
            stages=topology.stages,
            ranks=topology.tensor,
        )


class OnDevice:
    """A checkpoint whose tensors come where the model computes."""

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self._weights = weights
        self._device = device

    def get(self, name: str) -> Tensor:
        return self._weights.get(name).to(self._device)

    def has(self, name: str) -> bool:
        return self._weights.has(name)
