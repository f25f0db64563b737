"""The settings of `kvtide serve` in one table, with their defaults.

They come from flags, the environment and a config file (`setting_sources`). Settings that cannot
work are refused here, before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.cache import Bytes, FetchPatience, Layout, Ratio, Tokens
from kvtide.cache.cache_config import PATIENCE
from kvtide.cache.write_policies import POLICIES
from kvtide.engine.engine import DRAFT_TOKENS
from kvtide.engine.handoff.handoffs import HANDOFF_MIN_TOKENS
from kvtide.engine.rank_topology import GLOO, NCCL
from kvtide.engine.speculation.ngram import NGRAM_DRAFTS
from kvtide.engine.speculation.speculation import MAX_DRAFTS
from kvtide.index import DEFAULT_POLICY
from kvtide.index import POLICIES as EVICTIONS
from kvtide.server.handoff.handoff_settings import (
    SECRET_VARIABLE,
    HandoffSettings,
    Role,
    parse_urls,
)
from kvtide.server.kv_events.kv_event_settings import (
    REPLAY_BATCHES,
    BlockNames,
    KVEventSettings,
    parse_endpoint,
)
from kvtide.server.sessions.session_settings import MAX_TTL_S, SessionSettings
from kvtide.server.sessions.stable_prefix import NO_RULES, parse_rules, parse_stable_prefix
from kvtide.server.setting_values import (
    SettingsError,
    count,
    fraction,
    is_loopback,
    number,
    one_of,
    parse_flag,
    parse_resident,
    parse_size,
    parse_text,
    seconds,
    setting,
)
from kvtide.server.tools.parser_registry import PARSERS, REASONING_PARSERS
from kvtide.spec.residency import Residency
from kvtide.storage import StoreError
from kvtide.storage.codec.opening import is_lossy
from kvtide.tiers import TierSize
from kvtide.transfer.backends import CELLS
from kvtide.transfer.peer.transport import PROTOCOLS
from kvtide.transfer.peer.transport_registry import TRANSPORTS

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("fp32", "bf16", "fp16", "fp8")
BACKENDS = tuple(sorted({name for _, name in CELLS}))
NGRAM, EAGLE3, MTP, NO_SPECULATION = "ngram", "eagle3", "mtp", "none"
"""What drafts tokens: the values of `--speculate`."""

NO_STORAGE = "none"
_LOCAL = ("file:", "memory:")
_PATIENCE = FetchPatience()
_HANDOFF = HandoffSettings()
_SESSIONS = SessionSettings()
_MIN_LOCAL_TOKENS = 64
"""A lookup in a local store takes microseconds: a single page is worth it."""

ALTERNATIVES = (("device_tokens", "device_bytes"), ("host_tokens", "host_bytes", "host_ratio"))
"""Settings that exclude each other; a flag overrides all of its group in a weaker source."""


# -- the table --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    model: str | None = setting(
        None, parse_text, "folder or .gguf file; SmolLM2-135M-Instruct if none"
    )
    name: str | None = setting(None, parse_text, "the model's name in the API", "NAME")
    address: str = setting("127.0.0.1", parse_text, "the address to listen on", "IP")
    port: int = setting(8000, count(0, 65535), "0 for any that is free", "P")
    api_key: str | None = setting(None, parse_text, "clients must send it as a bearer token", "KEY")
    admin_key: str | None = setting(None, parse_text, "admin routes need it", "KEY")
    show_text: bool = setting(False, parse_flag, "the live page shows text of prompts")

    device: str = setting("cpu", parse_text, "cpu, cuda or cuda:N", "D")
    tp: int = setting(
        1, count(1, 64), "tensor-parallel ranks: processes that divide every layer", "N"
    )
    pp: int = setting(1, count(1, 64), "pipeline stages: each has a range of the layers", "N")
    rank_backend: str | None = setting(
        None, one_of(GLOO, NCCL), "gloo: through host memory; nccl on GPUs if not given", "B"
    )
    nodes: int = setting(1, count(1, 64), "machines that the ranks divide over", "N")
    node: int = setting(0, count(0, 63), "which of them this is; 0 has HTTP", "I")
    rendezvous: str | None = setting(
        None, parse_text, "an address of node 0, where the ranks of all nodes meet", "HOST:PORT"
    )
    rank_secret_file: str | None = setting(
        None, parse_text, "the file with the secret of all nodes; or its text in KVTIDE_RANK_SECRET"
    )
    rank_timeout_seconds: float = setting(
        30.0, number(1, 86400, float), "a rank without a sign of life for so long is lost", "S"
    )
    step_timeout_seconds: float = setting(
        600.0, number(1, 86400, float), "a step of several ranks that takes so long is lost", "S"
    )
    dtype: str | None = setting(
        None, one_of(*DTYPES), "the dtype of the computation; float32 on a CPU, else bfloat16", "T"
    )
    kv_dtype: str | None = setting(
        None, one_of(*KV_DTYPES), "the dtype of the KV cache; as computed if not given", "T"
    )
    deterministic: bool = setting(
        False, parse_flag, "outputs do not depend on batches, chunks or tiers, to the last bit"
    )

    speculate: str | None = setting(
        None,
        one_of(NGRAM, EAGLE3, MTP, NO_SPECULATION),
        "what drafts tokens: ngram, eagle3, mtp or none; if not given, the checkpoint's layer for "
        "multi-token prediction, or a draft beside the weights, or none",
        "D",
    )
    draft: str | None = setting(None, parse_text, "the folder of an EAGLE3 draft", "DIR")
    draft_tokens: int | None = setting(
        None,
        count(1, MAX_DRAFTS),
        f"drafts of a request in a step, at most; {NGRAM_DRAFTS} with ngram, else {DRAFT_TOKENS}",
        "K",
    )

    page_tokens: int | None = setting(None, count(), "tokens per page; the family's own", "N")
    checkpoint_tokens: int | None = setting(
        None, count(), "where recurrent states may be checkpointed; every page if not given", "N"
    )
    tokens_per_checkpoint: int = setting(
        1024, count(), "windows and states get slots for one checkpoint per so many tokens", "N"
    )
    resident: str = setting(
        "all",
        parse_resident,
        "which pages of running requests are on the device: all; hot:B: pools that attention "
        "selects from are on the host, with B entries of a request on the device; auto: what fits",
        "R",
    )
    device_tokens: int | None = setting(None, count(), "size of the device tier", "N")
    device_bytes: int | None = setting(None, parse_size, "the same in bytes: 60GB", "X")
    host_tokens: int | None = setting(None, count(), "size of the host tier", "N")
    host_bytes: int | None = setting(None, parse_size, "the same in bytes: 200GB", "X")
    host_ratio: float | None = setting(
        None,
        fraction(1e6),
        "the same in device tiers; 0 for no host tier; 2 if not given, or half of the free memory "
        "beside a GPU",
        "R",
    )
    host_layout: str = setting(
        Layout.PAGE_FIRST_DIRECT.value,
        one_of(*(layout.value for layout in Layout)),
        "the order of pools, layers and slots in host memory",
        "L",
    )
    io_backend: str | None = setting(
        None, one_of(*BACKENDS), "the transfer backend between device and host", "B"
    )
    write_policy: str = setting(
        "write_through",
        one_of(*(name for name in POLICIES if name != "none")),
        "when pages are copied to the host",
        "W",
    )
    eviction: str = setting(
        DEFAULT_POLICY, one_of(*EVICTIONS), "the eviction policy of a full tier", "E"
    )
    verify_restores: float = setting(
        0.0, fraction(), "recompute this fraction of restored prefixes and compare", "P"
    )

    storage: str | None = setting(
        None,
        parse_text,
        "the store that keeps pages: file:///path?cap=200GB, redis://…, none; "
        "a folder in your cache directory if not given",
        "URL",
    )
    prefetch_policy: str = setting(
        _PATIENCE.policy, one_of(*PATIENCE), "whether requests wait for storage", "P"
    )
    prefetch_base_seconds: float = setting(
        _PATIENCE.base_s, seconds(), "how long a request waits with timeout", "S"
    )
    prefetch_per_1k_seconds: float = setting(
        _PATIENCE.per_1k_s, seconds(), "how much longer for every 1,000 tokens", "S"
    )
    prefetch_max_seconds: float | None = setting(
        None,
        seconds(),
        f"the longest wait; {_PATIENCE.max_s:g}, {_PATIENCE.complete_s:g} with wait_complete",
        "S",
    )
    prefetch_min_tokens: int | None = setting(
        None,
        count(),
        f"the shortest prefix to fetch; {_MIN_LOCAL_TOKENS} from a local store, "
        f"else {_PATIENCE.min_tokens}",
        "N",
    )

    session_ttl_seconds: float = setting(
        _SESSIONS.ttl_s, seconds(MAX_TTL_S), "how long a session outlives its last request", "S"
    )
    session_fraction: float = setting(
        0.5, fraction(), "the most of the device tier that sessions may pin", "F"
    )
    session_share: float = setting(
        0.5, fraction(), "the most of that which one session may pin", "F"
    )
    stable_prefix: str | None = setting(
        None,
        parse_stable_prefix,
        "rules that drop or move what changes at the front of conversations: billing-header, "
        "dates, regex:PATTERN, with commas between them",
        "RULES",
    )

    role: str = setting(
        Role.BOTH.value,
        one_of(*(role.value for role in Role)),
        "prefill: computes prompts for decode servers; decode: receives their pages and decodes",
        "R",
    )
    prefill_from: str | None = setting(
        None, parse_urls, "servers that prefill for this one: http://HOST:PORT[,…]", "URLS"
    )
    handoff_host: str = setting(
        _HANDOFF.host, parse_text, "the address by which peers of handoffs reach this server", "IP"
    )
    handoff_port: int | None = setting(
        None, count(0, 65535), "where a prefill server awaits peers; 0 for any that is free", "P"
    )
    handoff_transport: str = setting(
        _HANDOFF.transport, one_of(*TRANSPORTS), "what writes pages into a peer's memory", "T"
    )
    handoff_protocol: str = setting(
        _HANDOFF.protocol, one_of(*PROTOCOLS), "how Mooncake's engine sends", "P"
    )
    handoff_devices: str | None = setting(
        None, parse_text, "network devices that it may use, with commas between them; all", "NAMES"
    )
    handoff_min_tokens: int = setting(
        HANDOFF_MIN_TOKENS, count(0), "prompts that lack fewer tokens here are prefilled here", "N"
    )
    handoff_timeout_seconds: float = setting(
        _HANDOFF.timeout_s, seconds(), "how long a request waits for a handoff without news", "S"
    )
    handoff_secret_file: str | None = setting(
        None,
        parse_text,
        f"the file with the secret that peers prove; or its text in {SECRET_VARIABLE}",
        "FILE",
    )

    handoff_bytes_per_second: int | None = setting(
        None, parse_size, "the most that is written to peers, like 2GB; no limit if not given", "B"
    )

    kv_events: str | None = setting(
        None, parse_endpoint, "publish KV events, as vLLM does: tcp://ADDRESS:PORT", "ENDPOINT"
    )
    kv_events_replay: str | None = setting(
        None, parse_endpoint, "where consumers ask for missed ones; the next port", "ENDPOINT"
    )
    kv_events_topic: str = setting("", str, "the topic of all batches", "T")
    kv_events_names: str = setting(
        BlockNames.VLLM.value,
        one_of(*(names.value for names in BlockNames)),
        "vllm: block hashes as vLLM computes them; page_keys: the keys that stores have",
        "N",
    )
    kv_events_batches: int = setting(REPLAY_BATCHES, count(), "batches kept for replays", "N")

    chat_template: str | None = setting(
        None, parse_text, "a file with the chat template, instead of the checkpoint's own", "FILE"
    )
    tool_parser: str | None = setting(
        None,
        one_of(*PARSERS),
        "how the model writes calls of tools; by its chat template or family if not given",
        "P",
    )
    reasoning_parser: str | None = setting(
        None,
        one_of(*REASONING_PARSERS),
        "how the model thinks aloud: think, harmony or none; chosen like the tool parser",
        "P",
    )

    chunk_tokens: int | None = setting(
        None, count(), "the token budget of a step; 512, on a GPU 8192", "N"
    )
    max_running: int | None = setting(
        None,
        count(),
        "the largest number of running requests; what the device tier holds, 64 to 256",
        "N",
    )
    max_waiting: int = setting(
        256, count(0), "the longest queue beside a full batch; further requests get 429", "N"
    )
    drain_seconds: float = setting(
        30.0, seconds(), "how long requests and storage may take to finish after SIGTERM", "S"
    )

    def __post_init__(self) -> None:
        for names in ALTERNATIVES:
            self._only_one(*names)
        if self.admin_key is None and not self.loopback:
            raise SettingsError(
                f"listening on {self.address} opens the admin routes to the network; set "
                "--admin-key, or leave --address at 127.0.0.1"
            )
        if self.write_policy != "write_through" and self.host_ratio == 0:
            raise SettingsError(
                f"--write-policy {self.write_policy} writes to a host tier, and --host-ratio 0 "
                "leaves it out; drop one of them"
            )
        if self.storage not in (None, NO_STORAGE) and self.host_ratio == 0:
            raise SettingsError(
                "--storage is reached through a host tier, and --host-ratio 0 leaves it out; drop "
                "one of them"
            )
        if self.residency.hot is not None and self.host_ratio == 0:
            raise SettingsError(
                f"--resident {self.resident} keeps pages of running requests on the host, and "
                "--host-ratio 0 leaves it out; give the host a size, or use --resident all"
            )
        if self.handoff.receives and self.host_ratio == 0:
            raise SettingsError(
                "pages of a handoff are written to the host tier, and --host-ratio 0 leaves it "
                "out; give the host a size, or drop --role decode and --prefill-from"
            )
        if self.draft is not None and self.speculate in (NGRAM, MTP):
            raise SettingsError(
                f"--draft {self.draft} is an EAGLE3 draft, and --speculate {self.speculate} drafts "
                "without one; drop one of them"
            )
        if self.kv_event_settings is not None:
            _ = self.kv_event_settings.replay_endpoint  # Refuses where there is no next port.
        elif self.kv_events_replay is not None:
            raise SettingsError(
                "--kv-events-replay is for consumers of --kv-events, which is not given; give "
                "both, or drop it"
            )
        parsers = {self.tool_parser, self.reasoning_parser} - {None}
        if "harmony" in parsers and not parsers <= {"harmony", "none"}:
            raise SettingsError(
                "harmony reads calls and reasoning together; give both --tool-parser and "
                "--reasoning-parser as harmony, or drop one of them"
            )
        if self.max_running is not None and self.max_running > self.step_tokens:
            raise SettingsError(
                f"--max-running {self.max_running} is more than the {self.step_tokens} tokens of a "
                "step, of which every running request takes one; use fewer, or more --chunk-tokens"
            )
        _ = self.lossy_storage  # Refuses an unknown codec.
        if self.deterministic:
            self._check_determinism()

    def _check_determinism(self) -> None:
        if self.tp > 2:
            raise SettingsError(
                f"--deterministic adds in one order, which {self.tp} tensor ranks do not keep; "
                "use --tp 2 with more --pp, or drop one of them"
            )
        if self.lossy_storage:
            raise SettingsError(
                "--deterministic promises the bits that computing gives, and codec=fp8 rounds "
                "stored pages; use codec=lossless, or drop --deterministic"
            )

    def _only_one(self, *names: str) -> None:
        given = [flag(name) for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise SettingsError(f"{' and '.join(given)} size the same tier; keep one of them")

    @property
    def lossy_storage(self) -> bool:
        """Whether pages come back from the store with rounded numbers."""
        if self.storage in (None, NO_STORAGE):
            return False
        try:
            return is_lossy(self.storage)
        except StoreError as error:
            raise SettingsError(str(error)) from None

    @property
    def ranks(self) -> int:
        """Processes that serve the model together."""
        return self.tp * self.pp

    @property
    def node_ranks(self) -> int:
        """Those on one machine."""
        return self.ranks // self.nodes

    @property
    def loopback(self) -> bool:
        return is_loopback(self.address)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def step_tokens(self) -> int:
        """The token budget of a step."""
        return self.chunk_tokens or (8192 if self.on_gpu else 512)

    @property
    def device_size(self) -> TierSize | None:
        if self.device_bytes is not None:
            return Bytes(self.device_bytes)
        return None if self.device_tokens is None else Tokens(self.device_tokens)

    @property
    def host_size(self) -> TierSize | None:
        if self.host_tokens is not None:
            return Tokens(self.host_tokens)
        if self.host_bytes is not None:
            return Bytes(self.host_bytes)
        ratio = 2.0 if self.host_ratio is None else self.host_ratio
        return Ratio(ratio) if ratio else None

    @property
    def residency(self) -> Residency:
        """How pools that attention selects from are served."""
        return Residency.parse(parse_resident(self.resident))

    @property
    def sessions(self) -> SessionSettings:
        """The defaults of sessions, and the rules for the front of conversations."""
        rules = NO_RULES if self.stable_prefix is None else parse_rules(self.stable_prefix)
        return SessionSettings(self.session_ttl_seconds, rules)

    @property
    def handoff(self) -> HandoffSettings:
        """Which side of handoffs this server is, and how it meets its peers."""
        return HandoffSettings(
            role=Role(self.role),
            prefill_from=tuple(self.prefill_from.split(",")) if self.prefill_from else (),
            host=self.handoff_host,
            port=self.handoff_port,
            transport=self.handoff_transport,
            protocol=self.handoff_protocol,
            devices=self.handoff_devices or "",
            min_tokens=self.handoff_min_tokens,
            timeout_s=self.handoff_timeout_seconds,
            secret_file=self.handoff_secret_file,
            bytes_per_s=self.handoff_bytes_per_second,
        )

    @property
    def kv_event_settings(self) -> KVEventSettings | None:
        """How KV events are published; None if they are not."""
        if self.kv_events is None:
            return None
        return KVEventSettings(
            self.kv_events,
            self.kv_events_replay,
            self.kv_events_topic,
            BlockNames(self.kv_events_names),
            self.kv_events_batches,
        )

    @property
    def patience(self) -> FetchPatience:
        """How long requests wait for storage, and the shortest prefix that they fetch."""
        max_s, min_tokens = self.prefetch_max_seconds, self.prefetch_min_tokens
        local = self.storage is None or self.storage.startswith(_LOCAL)
        default = _MIN_LOCAL_TOKENS if local else _PATIENCE.min_tokens
        return FetchPatience(
            policy=self.prefetch_policy,
            base_s=self.prefetch_base_seconds,
            per_1k_s=self.prefetch_per_1k_seconds,
            max_s=_PATIENCE.max_s if max_s is None else max_s,
            complete_s=_PATIENCE.complete_s if max_s is None else max_s,
            min_tokens=default if min_tokens is None else min_tokens,
        )


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
