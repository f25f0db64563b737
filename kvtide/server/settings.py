"""The settings of `kvtide serve` in one table: flags, environment, config file, defaults.

`Settings` is that table. A setting `page_tokens` is the flag `--page-tokens`, the variable
`KVTIDE_PAGE_TOKENS` and the key `page_tokens` of a TOML file. A flag overrides a variable, and a
variable the file. Settings that cannot work are refused here, before anything is loaded.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

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
from kvtide.spec.residency import Residency
from kvtide.tiers import TierSize
from kvtide.transfer.backends import CELLS
from kvtide.transfer.peer.transport_registry import TRANSPORTS

PREFIX = "KVTIDE_"
CONFIG = "config"

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("fp32", "bf16", "fp16", "fp8")
BACKENDS = tuple(sorted({name for _, name in CELLS}))
NGRAM, EAGLE3, MTP, NO_SPECULATION = "ngram", "eagle3", "mtp", "none"
"""What drafts tokens: the values of `--speculate`."""

NO_STORAGE = "none"
_LOCAL = ("file:", "memory:")
_PATIENCE = FetchPatience()
_HANDOFF = HandoffSettings()
_MIN_LOCAL_TOKENS = 64
"""A lookup in a local store takes microseconds: a single page is worth it."""

ALTERNATIVES = (("device_tokens", "device_bytes"), ("host_tokens", "host_bytes", "host_ratio"))
"""Settings that exclude each other; a flag overrides all of its group in a weaker source."""

ALIASES = {
    "layout": "host_layout",
    "prefetch_most_seconds": "prefetch_max_seconds",
    "prefetch_least_tokens": "prefetch_min_tokens",
}
"""Other names of settings, for flags, variables and keys of the config file."""


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

    chunk_tokens: int | None = setting(
        None, count(), "the token budget of a step; 512, on a GPU 8192", "N"
    )
    max_running: int = setting(64, count(), "the largest number of running requests", "N")
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
        if self.ranks > 1 and self.device.startswith("cuda:"):
            raise SettingsError(
                f"--device {self.device} is one device, and {self.ranks} ranks have one each; use "
                "--device cuda"
            )
        if self.deterministic and self.tp > 2:
            raise SettingsError(
                f"--deterministic adds in one order, which {self.tp} tensor ranks do not keep; "
                "use --tp 2 with more --pp, or drop one of them"
            )

    def _only_one(self, *names: str) -> None:
        given = [flag(name) for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise SettingsError(f"{' and '.join(given)} size the same tier; keep one of them")

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
    def max_requests(self) -> int:
        """A full batch, and the queue of requests that wait to be admitted."""
        return min(self.max_running, self.step_tokens) + self.max_waiting

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
    def handoff(self) -> HandoffSettings:
        """Which side of handoffs this server is, and how it meets its peers."""
        return HandoffSettings(
            role=Role(self.role),
            prefill_from=tuple(self.prefill_from.split(",")) if self.prefill_from else (),
            host=self.handoff_host,
            port=self.handoff_port,
            transport=self.handoff_transport,
            min_tokens=self.handoff_min_tokens,
            timeout_s=self.handoff_timeout_seconds,
            secret_file=self.handoff_secret_file,
            bytes_per_s=self.handoff_bytes_per_second,
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


# -- reading ----------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for every setting. A flag that is not given is not in the namespace."""
    parser.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, help=_fields()["model"].metadata["help"]
    )
    parser.add_argument(
        flag(CONFIG), default=argparse.SUPPRESS, metavar="FILE", help="settings in TOML"
    )
    for name, row in _fields().items():
        text = row.metadata["help"] + (f" ({row.default})" if row.default else "")
        if row.metadata["parse"] is parse_flag:
            parser.add_argument(
                flag(name),
                action="store_const",
                const="true",
                default=argparse.SUPPRESS,
                help=text,
            )
            parser.add_argument(
                flag("no_" + name),
                dest=name,
                action="store_const",
                const="false",
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
        elif name != "model":
            parser.add_argument(
                flag(name),
                default=argparse.SUPPRESS,
                metavar=row.metadata["metavar"],
                help=text.replace("%", "%%"),
            )
    for alias in ALIASES:
        parser.add_argument(flag(alias), default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def variable(name: str) -> str:
    return PREFIX + name.upper()


def read(given: Mapping[str, str], environment: Mapping[str, str]) -> Settings:
    """The settings of flags, environment and config file together."""
    path = given.get(CONFIG, environment.get(variable(CONFIG)))
    in_file = {} if path is None else _file_values(Path(path))
    variables = _values(environment, variable, variable)
    flags = _values(given, str, flag)
    values: dict[str, tuple[str, str]] = {}
    for source in (in_file, variables, flags):
        overridden = {name for group in ALTERNATIVES if source.keys() & {*group} for name in group}
        values = {n: value for n, value in values.items() if n not in overridden} | source
    table = _fields()
    chosen = Settings(**{name: _parsed(table[name], *value) for name, value in values.items()})
    chosen.handoff.secret(environment)  # A secret that is missing is refused here too.
    return chosen


def _values(
    source: Mapping[str, str], key: Callable[[str], str], label: Callable[[str], str]
) -> dict[str, tuple[str, str]]:
    """Setting → the label for messages and the value, where the source has the key."""
    names = {**ALIASES, **{name: name for name in _fields()}}
    return {
        name: (label(alias), source[key(alias)])
        for alias, name in names.items()
        if key(alias) in source
    }


def _fields() -> dict[str, Field[Any]]:
    return {row.name: row for row in fields(Settings)}


def _parsed(row: Field[Any], source: str, value: str) -> Any:
    try:
        return row.metadata["parse"](value)
    except SettingsError as problem:
        raise SettingsError(f"{source} {problem}") from None


def _file_values(path: Path) -> dict[str, tuple[str, str]]:
    """Setting → the config file's key for messages, and its value as a flag would have it."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; pass a file with settings") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not TOML ({error}); write lines like port = 8000") from None
    values = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        name = ALIASES.get(name, name)
        if name not in _fields():
            near = difflib.get_close_matches(name, _fields(), 1)
            remedy = f"did you mean {near[0]}?" if near else f"use {', '.join(_fields())}"
            raise SettingsError(f"{path}: there is no setting '{key}'; {remedy}")
        if isinstance(value, dict | list):
            raise SettingsError(f"{path}: {key} is a table or list; write {key} = VALUE")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        values[name] = (f"{path}: {key}", text)
    return values
