"""From settings to an engine that serves: checkpoint, model, draft, cache, tokenizer, store.

`gpu_sizes` chooses how much of free GPU memory and of the machine's is for KV pages.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvtide.cache import Bytes, CacheConfig, Layout, Ranks, Ratio, TieredCache, Tokens
from kvtide.cache.rank_agreement import Agreement, Alone
from kvtide.engine import Engine, EngineError, RankTopology
from kvtide.engine.rank_topology import NCCL
from kvtide.engine.restore_oracle import RestoreOracle, bounds_of
from kvtide.models import Model, build, longest_sequence
from kvtide.models.checkpoint import Checkpoint, OnDevice, open_checkpoint
from kvtide.models.default_model import NAME, default_model
from kvtide.models.model import Decoder
from kvtide.models.model_errors import CheckpointError
from kvtide.models.tokenizer import Tokenizer, load_tokenizer
from kvtide.server.engine_rank import EngineRank
from kvtide.server.handoff.rank_handoff import RankHandoff
from kvtide.server.ranks.rank_group import rank_backend, ranks_per_gpu
from kvtide.server.setting_values import SettingsError
from kvtide.server.settings import MTP, Settings
from kvtide.server.setup import store_setup
from kvtide.server.setup.batch_setup import choose_batch
from kvtide.server.setup.residency_setup import (
    DeclaredModel,
    ResidencyChoice,
    choose_residency,
    stored_bytes,
)
from kvtide.server.setup.speculation_setup import (
    SpeculationChoice,
    build_draft,
    choose_speculation,
    make_drafter,
)
from kvtide.server.tools.parser_registry import ChatFormats
from kvtide.spec import ModelMemory, SpecError
from kvtide.spec.config import Config
from kvtide.spec.families import KVDType, declare, language_model
from kvtide.storage import StoreError
from kvtide.tiers import MachineMemory, TierError, TierSize, device_memory, machine_memory
from kvtide.tiers.tier_size import tier_bytes
from kvtide.transfer import backends
from kvtide.transfer.peer.transport import TransportUnavailableError

DEFAULT_TOKENS = 16_384
"""The default device tier on a CPU: a few conversations with a small model."""
GPU_FRACTION, HOST_FRACTION = 0.8, 0.5
"""The default tiers beside a GPU: of its free memory after the weights, and of the machine's free
memory (elsewhere: gpu_memory_utilization). A step's activations take the rest of the GPU's."""

AGREEMENT_TIMEOUT_S = 600.0
"""How long a rank waits for the slowest one: a pipeline stage may be ahead by a whole step."""

REFUSALS = (
    *(CheckpointError, EngineError, SettingsError, SpecError, StoreError, TierError),
    TransportUnavailableError,
)
"""What `open_engine` raises where settings, checkpoint and machine do not fit."""

_REMEDY = "use cpu, cuda or cuda:N"
_KV_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Serving:
    """A rank that is ready to serve.

    name         the model's name in the API
    storage      the sentence about the attached store
    speculation  the sentence about what drafts tokens
    residency    the sentence about pages on the host, empty where all are resident
    formats      how the model writes calls and reasoning
    batch        the sentence about how many requests run at once
    """

    rank: EngineRank
    name: str
    storage: str
    speculation: str
    residency: str
    formats: ChatFormats
    batch: str

    @property
    def engine(self) -> Engine:
        return self.rank.engine


def open_engine(settings: Settings, topology: RankTopology | None = None) -> Serving:
    """Load the model and allocate the tiers, or raise one of `REFUSALS`.

    All ranks call it at the same time, each for its own layers or slices of layers.
    """
    topology = topology or RankTopology()
    device = _device(settings)
    config = cache_config(settings)
    checkpoint = open_checkpoint(default_model() if settings.model is None else settings.model)
    tokenizer = _tokenizer(settings, checkpoint)
    choice = choose_speculation(settings, checkpoint)
    resident = choose_residency(
        settings,
        lambda: _declared(settings, checkpoint),
        lambda memory: _device_bytes(settings, checkpoint, memory, topology),
        choice.drafts(settings),
    )
    choice = choice.within(resident.drafts)
    model = _build(settings, checkpoint, device, topology, choice, resident)
    draft = build_draft(choice, checkpoint, model)
    fingerprint = _fingerprint(settings, checkpoint, device)
    agreement = Ranks(timeout_s=AGREEMENT_TIMEOUT_S) if topology.ranks > 1 else Alone()
    _agree_on_weights(agreement, fingerprint)
    config = _sized_together(config, settings, model, agreement)
    batch = choose_batch(settings, model, config, agreement)
    config = replace(
        _for_requests(config, settings, batch.requests),
        longest_tokens=model.max_positions,
        fingerprint=fingerprint,
        draft_fingerprint=choice.fingerprint(fingerprint),
        any_tensor_ranks=not settings.deterministic,
        lossy_pages=settings.lossy_storage,
    )
    cache = TieredCache(model.memory, config, agreement=agreement)
    engine = Engine(
        model,
        cache,
        tokenizer,
        chunk_tokens=settings.step_tokens,
        max_running=batch.requests,
        oracle=_oracle(settings, cache),
        topology=topology,
        drafter=make_drafter(choice, draft, model, cache, topology),
        draft_tokens=max(1, resident.drafts),
        handoff_min_tokens=settings.handoff.min_tokens,
    )
    handoff = None
    try:
        _prepare(engine)
        storage = store_setup.attach(settings, cache, os.environ)
        if settings.handoff.listens or settings.handoff.receives:
            handoff = RankHandoff(engine, topology, settings.handoff)
    except (SettingsError, TransportUnavailableError):
        cache.close()
        raise
    name = settings.name or (_name(checkpoint) if settings.model else NAME)
    rank = EngineRank(engine, topology, handoff=handoff)
    formats = _formats(settings, checkpoint, engine)
    drafting = choice.sentence(resident.drafts)
    return Serving(rank, name, storage, drafting, resident.sentence, formats, batch.sentence)


def _for_requests(config: CacheConfig, settings: Settings, requests: int) -> CacheConfig:
    """With what is allocated for each request that may run at once."""
    receives = settings.handoff.receives
    return replace(
        config,
        hot_rows=requests,
        tail_rows=requests if receives else 0,
        shared_host=receives and settings.handoff.transport == "shm",
    )


def _tokenizer(settings: Settings, checkpoint: Checkpoint) -> Tokenizer | None:
    """The checkpoint's, with its own chat template or the one of the settings."""
    if settings.chat_template is None:
        return load_tokenizer(checkpoint)
    try:
        source = Path(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as flaw:
        raise SettingsError(
            f"--chat-template {settings.chat_template} cannot be read ({flaw}); give a file with a "
            "template in Jinja"
        ) from None
    if not source.strip():
        raise SettingsError(
            f"--chat-template {settings.chat_template} is empty; give a file with a template in "
            "Jinja"
        )
    tokenizer = load_tokenizer(checkpoint, source)
    if tokenizer is None:
        raise SettingsError(
            "--chat-template writes text, and this model came without a tokenizer; add its "
            "tokenizer.json, or drop the template"
        )
    return tokenizer


def _formats(settings: Settings, checkpoint: Checkpoint, engine: Engine) -> ChatFormats:
    whole = Config(str(checkpoint.config.get("model_type")), checkpoint.config)
    model_type = str(language_model(whole).find("model_type"))
    return ChatFormats(
        engine.tokenizer, model_type, settings.tool_parser, settings.reasoning_parser
    )


def _agree_on_weights(agreement: Agreement, fingerprint: bytes) -> None:
    """Refuse ranks that have opened different checkpoints: other machines have files of their own.

    All ranks refuse alike. All have loaded their weights when it returns.
    """
    number = int.from_bytes(fingerprint[:7], "little")
    minimum, negated_maximum = agreement.all_min([number, -number])
    if minimum != -negated_maximum:
        raise SettingsError(
            "the nodes have different weights, dtypes or versions of torch; give all of them the "
            "same model"
        )


def _prepare(engine: Engine) -> None:
    try:
        engine.warm_up()
    except torch.OutOfMemoryError:
        raise SettingsError(
            "the GPU has no room left for steps beside its tier; use a smaller --device-tokens, "
            "--device-bytes or --max-running"
        ) from None


def check_ranks(settings: Settings) -> None:
    """Refuse ranks that do not divide the model or do not draft, before any process starts."""
    if settings.ranks > 1:
        _check_backend(settings)
        _device(settings)
        model = default_model() if settings.model is None else settings.model
        checkpoint = open_checkpoint(model)
        choose_speculation(settings, checkpoint)
        config, page = checkpoint.config, settings.page_tokens
        memory = declare(config, model=str(config.get("model_type")), page_tokens=page)
        list(memory.stages(settings.pp, 0, settings.tp))


def _check_backend(settings: Settings) -> None:
    devices, backend = torch.cuda.device_count(), rank_backend(settings)
    if settings.device.startswith("cuda:"):
        raise SettingsError(
            f"--device {settings.device} is one device, and {settings.ranks} ranks divide all that "
            "there are; use --device cuda"
        )
    if backend == NCCL and not settings.on_gpu:
        raise SettingsError(
            f"--rank-backend nccl is for GPUs, and --device is {settings.device}; use gloo"
        )
    if backend == NCCL and devices < settings.node_ranks:
        raise SettingsError(
            f"{settings.node_ranks} ranks need a GPU each, and torch finds {devices}; use a "
            "smaller --tp or --pp, or --rank-backend gloo, with which ranks share a GPU"
        )


def _name(checkpoint: Checkpoint) -> str:
    """The name of the folder, or of the GGUF file without its suffix."""
    path = checkpoint.path.resolve()
    return path.name if checkpoint.gguf is None else path.stem


def _device(settings: Settings) -> torch.device:
    """The device of the settings, or a refusal before a model is loaded for it."""
    try:
        device = torch.device(settings.device)
    except RuntimeError:
        raise SettingsError(f"--device {settings.device} is not known; {_REMEDY}") from None
    if device.type not in backends.DEFAULTS:
        raise SettingsError(f"--device {settings.device}: nothing is computed there; {_REMEDY}")
    devices = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= devices:
        raise SettingsError(
            f"--device {settings.device}: torch finds {devices} such devices here; {_REMEDY}"
        )
    return device


def _fingerprint(settings: Settings, checkpoint: Checkpoint, device: torch.device) -> bytes:
    """The fingerprint of stored pages: the weights, and how the KV is computed from them.

    With `--deterministic` only pages of the same device type and torch version are reused, since
    others differ in their last bits.
    """
    method = [str(_dtype(settings))]
    if settings.deterministic:
        method += ["deterministic", device.type, torch.__version__]
    return hashlib.sha256(checkpoint.fingerprint() + " ".join(method).encode()).digest()


def cache_config(settings: Settings) -> CacheConfig:
    """The cache's configuration before the model is loaded, which `sized` completes."""
    return CacheConfig(
        device_size=settings.device_size or Tokens(DEFAULT_TOKENS),
        host_size=settings.host_size,
        device=settings.device,
        host_layout=Layout(settings.host_layout),
        backend=settings.io_backend,
        write_policy=settings.write_policy,
        eviction=settings.eviction,
        tokens_per_checkpoint=settings.tokens_per_checkpoint,
        patience=settings.patience,
        session_fraction=settings.session_fraction,
        session_share=settings.session_share,
    )


def sized(config: CacheConfig, settings: Settings, model: Model) -> CacheConfig:
    """The configuration with default tier sizes for this model and the memory beside it."""
    default: TierSize = Tokens(max(DEFAULT_TOKENS, model.memory.page_tokens))
    device_size, host_size = settings.device_size or default, settings.host_size
    if settings.on_gpu:
        gpu = device_memory(torch.device(settings.device))
        device_size, host_size = gpu_sizes(settings, gpu, machine_memory())
    return replace(config, device_size=device_size, host_size=host_size)


def _sized_together(
    config: CacheConfig, settings: Settings, model: Model, agreement: Agreement
) -> CacheConfig:
    """As `sized`; all ranks have measured what is free before any of them takes it."""
    found = sized(config, settings, model)
    agreement.all_true([True])
    return found


def gpu_sizes(
    settings: Settings, gpu: MachineMemory, machine: MachineMemory
) -> tuple[TierSize, TierSize | None]:
    """The tiers beside a GPU, with defaults where no size is set. Ranks share the machine, and may
    share a GPU."""
    device_size, host_size = settings.device_size, settings.host_size
    if device_size is None:
        device_size = Bytes(max(1, gpu.portion(GPU_FRACTION) // ranks_per_gpu(settings)))
    if isinstance(host_size, Ratio) and settings.host_ratio is None:
        host_size = Bytes(max(1, machine.portion(HOST_FRACTION) // settings.node_ranks))
    return device_size, host_size


def _device_bytes(
    settings: Settings, checkpoint: Checkpoint, memory: ModelMemory, topology: RankTopology
) -> int:
    """The device tiers of all stages before the model is loaded: about what `sized` gives then.

    Ranks that have the same GPU get the same number.
    """
    size = settings.device_size
    if size is None and settings.on_gpu:
        weights = stored_bytes(checkpoint) // topology.ranks
        total = device_memory(torch.device(settings.device)).total_bytes // ranks_per_gpu(settings)
        return topology.stages * int(GPU_FRACTION * max(0, total - weights))
    if isinstance(size, Bytes):
        return topology.stages * size.bytes
    return tier_bytes(memory, size or Tokens(max(DEFAULT_TOKENS, memory.page_tokens)))


def _declared(settings: Settings, checkpoint: Checkpoint) -> DeclaredModel:
    """The model without a draft."""
    memory = declare(
        checkpoint.config,
        model=str(checkpoint.config.get("model_type")),
        page_tokens=settings.page_tokens,
        kv_dtype=_kv_dtype(settings),
        checkpoint_tokens=settings.checkpoint_tokens,
    )
    return DeclaredModel(memory, longest_sequence(checkpoint.config, checkpoint.weights))


def _kv_dtype(settings: Settings) -> KVDType:
    return KVDType.parse(settings.kv_dtype or _KV_DTYPES[_dtype(settings)])


def _oracle(settings: Settings, cache: TieredCache) -> RestoreOracle | None:
    if not settings.verify_restores:
        return None
    bounds = None
    if not settings.deterministic:
        lossy = settings.lossy_storage
        bounds = bounds_of(cache.memory, _dtype(settings), rounded_pages=lossy)
    return RestoreOracle(cache, settings.verify_restores, bounds)


def _dtype(settings: Settings) -> torch.dtype:
    default = "float32" if torch.device(settings.device).type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, settings.dtype or default)
    return dtype


def _build(
    settings: Settings,
    checkpoint: Checkpoint,
    device: torch.device,
    topology: RankTopology,
    choice: SpeculationChoice,
    resident: ResidencyChoice,
) -> Decoder:
    with device:
        return build(
            checkpoint.config,
            OnDevice(checkpoint.weights, device),
            page_tokens=settings.page_tokens,
            kv_dtype=_kv_dtype(settings),
            checkpoint_tokens=settings.checkpoint_tokens,
            dtype=_dtype(settings),
            deterministic=settings.deterministic,
            resident=resident.residency,
            draft_tokens=resident.drafts,
            mtp=choice.method == MTP,
            draft=choice.draft,
            stage=topology.stage,
            stages=topology.stages,
            ranks=topology.tensor,
        )
