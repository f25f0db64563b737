"""What a cache is made with. Everything is checked before any memory is taken."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch

from kvtide.cache.write_policies import POLICIES
from kvtide.index import DEFAULT_POLICY
from kvtide.index import POLICIES as EVICTIONS
from kvtide.spec.sizing import TOKENS_PER_CHECKPOINT
from kvtide.tiers import Layout, Ratio, TierError, TierSize
from kvtide.transfer import backends

_TWICE = Ratio(2.0)
PATIENCE = ("best_effort", "timeout", "wait_complete")


@dataclass(frozen=True, slots=True)
class FetchPatience:
    """How long a request waits for what storage has of its prompt.

    | policy          | a request waits                                                     |
    |-----------------|---------------------------------------------------------------------|
    | `best_effort`   | not at all: what has come when its turn comes is used               |
    | `timeout`       | `base_s`, and `per_1k_s` per 1,000 tokens, but not beyond `max_s`  |
    | `wait_complete` | until all has come, but not beyond `complete_s`                     |

    min_tokens  a prompt that misses fewer tokens is not looked up
    """

    policy: str = "timeout"
    base_s: float = 1.0
    per_1k_s: float = 0.25
    max_s: float = 10.0
    complete_s: float = 60.0
    min_tokens: int = 256

    def __post_init__(self) -> None:
        if self.policy not in PATIENCE:
            raise TierError(
                f"prefetch policy {self.policy} is not known; use {', '.join(PATIENCE)}"
            )
        times = (self.base_s, self.per_1k_s, self.max_s, self.complete_s)
        if not all(0 <= seconds < math.inf for seconds in times):
            raise TierError("prefetch times must be 0 or more seconds, and end; use 1.0 or 0.25")

    @property
    def waits(self) -> bool:
        return self.policy != "best_effort"

    def limit_s(self, tokens: int) -> float:
        """The time limit of a fetch of so many tokens."""
        if self.policy == "timeout":
            return min(self.max_s, self.base_s + self.per_1k_s * tokens / 1000)
        return self.complete_s


_PATIENT = FetchPatience()


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes and policies of the tiers.

    device_size         the device tier; no default, since it is what weights leave free
    host_size           the host tier; None for none
    device              a torch device: "cuda", "cuda:1", "cpu"
    host_layout         the host's layout; see `tiers.layout`
    device_layout       the device's layout
    backend             how bytes move (`transfer.backends`); None for the device's default
    write_policy        when pages are copied to the host (`cache.write_policies`)
    eviction            which pages a full tier evicts first (`index.evict.policies`)
    tokens_per_checkpoint  windows and states get slots for one checkpoint per so many tokens
    headroom            the fraction of device slots that write_back keeps free
    session_fraction    the most that session pins may hold of the device's slots
    session_share       the most of that which one session may pin
    hot_rows            requests that may run at once where the memory has hot pools
    longest_tokens      the longest sequence that is served; None for whatever fits the tiers
    tail_rows           prompts that peers may hand over at once; 0: none (`cache.receiving`)
    shared_host         other processes of this machine may map the host tier
    transfer_timeout_s  the deadline of a transfer
    patience            how long requests wait for storage, once one is attached
    fingerprint         digest of the weights and their precision, for keys in storage
    draft_fingerprint   the same of a draft: pages that another draft wrote count as absent
    any_tensor_ranks    pages that another number of tensor ranks stored are used, too; they may
                        differ in their last bits
    lossy_pages         a store may round pages (`?codec=fp8`), and whatever is computed on them:
                        part of all keys, so that no other cache takes them for exact ones
    """

    device_size: TierSize
    host_size: TierSize | None = _TWICE
    device: str = "cpu"
    host_layout: Layout = Layout.PAGE_FIRST_DIRECT
    device_layout: Layout = Layout.PAGE_FIRST_DIRECT
    backend: str | None = None
    write_policy: str = "write_through"
    eviction: str = DEFAULT_POLICY
    tokens_per_checkpoint: int = TOKENS_PER_CHECKPOINT
    headroom: float = 0.05
    session_fraction: float = 0.5
    session_share: float = 0.5
    hot_rows: int = 64
    longest_tokens: int | None = None
    tail_rows: int = 0
    shared_host: bool = False
    transfer_timeout_s: float = 30.0
    patience: FetchPatience = _PATIENT
    fingerprint: bytes = b""
    draft_fingerprint: bytes = b""
    any_tensor_ranks: bool = True
    lossy_pages: bool = False

    def __post_init__(self) -> None:
        if self.write_policy not in POLICIES:
            raise TierError(
                f"write policy {self.write_policy} is not known; use {', '.join(POLICIES)}"
            )
        if self.eviction not in EVICTIONS:
            raise TierError(f"eviction {self.eviction} is not known; use {', '.join(EVICTIONS)}")
        if not 0 <= self.headroom < 1:
            raise TierError(f"a headroom of {self.headroom:g}; use a fraction from 0 to below 1")
        if not 0 <= self.session_fraction <= 1:
            raise TierError(f"a session fraction of {self.session_fraction:g}; use 0 to 1")
        if not 0 <= self.session_share <= 1:
            raise TierError(f"a session share of {self.session_share:g}; use 0 to 1")
        if self.tail_rows and self.host_size is None:
            raise TierError(
                "prompts are handed over into a host tier, and there is none; size one, or serve "
                "without handoffs"
            )
        if not 0 < self.transfer_timeout_s < math.inf:
            raise TierError(
                f"a transfer timeout of {self.transfer_timeout_s:g} s fails every transfer, or "
                "waits for ever; use a number of seconds above 0, like 30"
            )
        backends.check(self.torch_device, self.backend_name, self.host_layout)

    @property
    def identity(self) -> bytes:
        """What pages of this cache are computed from and with: caches of another never share one.

        The fingerprint alone where pages are exact.
        """
        if not self.lossy_pages:
            return self.fingerprint
        return hashlib.sha256(self.fingerprint + b"\0lossy pages").digest()

    @property
    def torch_device(self) -> torch.device:
        try:
            return torch.device(self.device)
        except RuntimeError:
            kinds = " or ".join(backends.DEFAULTS)
            raise TierError(f"device {self.device} is not known; use {kinds}") from None

    @property
    def backend_name(self) -> str:
        return self.backend or backends.DEFAULTS.get(self.torch_device.type, "reference")
