"""What `kvtide serve` can be told, in one table: flags, environment, config file, defaults.

`Settings` is that table. A setting `page_tokens` is the flag `--page-tokens`, the variable
`KVTIDE_PAGE_TOKENS` and the key `page_tokens` of a TOML file; a flag goes before a variable, and
that before the file. Whatever cannot work is refused here, before anything is loaded.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvtide.byte_sizes import parse_bytes
from kvtide.cache import Bytes, FetchPatience, Layout, Ratio, Tokens
from kvtide.cache.cache_config import PATIENCE
from kvtide.cache.write_policies import POLICIES
from kvtide.index import DEFAULT_POLICY
from kvtide.index import POLICIES as EVICTIONS
from kvtide.tiers import TierSize
from kvtide.transfer.backends import CELLS

PREFIX = "KVTIDE_"
CONFIG = "config"

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("fp32", "bf16", "fp16", "fp8")
BACKENDS = tuple(sorted({name for _, name in CELLS}))

NO_STORAGE = "none"
_HERE = ("file:", "memory:")
_USUAL = FetchPatience()
_MIN_HERE = 64
"""A store on this machine is asked in no time: what is a page of most models is worth it."""

ALTERNATIVES = (("device_tokens", "device_bytes"), ("host_tokens", "host_bytes", "host_ratio"))
"""Settings of which only one is given; a flag replaces any of its group in a weaker source."""


class SettingsError(Exception):
    """Settings that cannot be served, in a sentence that names the remedy."""


# -- how values are written -------------------------------------------------------------------


def _text(value: str) -> str:
    if not value:
        raise SettingsError("is empty")
    return value


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in choices:
            raise SettingsError(f"is '{value}'; use {', '.join(choices)}")
        return value

    return parse


def _number(least: float, most: float, kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(value: str) -> float:
        try:
            number = kind(value)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise SettingsError(f"is '{value}'; use {wanted}") from None
        if not least <= number <= most:
            raise SettingsError(f"is {number}; use {least:,} to {most:,}")
        return number

    return parse


def _count(least: int = 1, most: int = 1 << 40) -> Callable[[str], float]:
    return _number(least, most, int)


def _seconds(most: float = 86400.0) -> Callable[[str], float]:
    return _number(0, most, float)


def _share(most: float = 1.0) -> Callable[[str], float]:
    return _number(0.0, most, float)


def _size(value: str) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise SettingsError(f"is no size: {error}") from None


def _flag(value: str) -> bool:
    named = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if value.lower() not in named:
        raise SettingsError(f"is '{value}'; use true or false")
    return named[value.lower()]


def setting(default: Any, parse: Callable[[str], Any], words: str, shown: str = "X") -> Any:
    """A row of the table; `shown` stands for the value in the help."""
    return field(default=default, metadata={"parse": parse, "help": words, "shown": shown})


# -- the table --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    model: str | None = setting(None, _text, "folder or .gguf file; SmolLM2-135M-Instruct if none")
    name: str | None = setting(None, _text, "what clients call the model", "NAME")
    address: str = setting("127.0.0.1", _text, "where to listen", "IP")
    port: int = setting(8000, _count(0, 65535), "0 for any that is free", "P")
    api_key: str | None = setting(None, _text, "clients must send it as a bearer token", "KEY")
    admin_key: str | None = setting(None, _text, "admin routes need it", "KEY")

    device: str = setting("cpu", _text, "cpu, cuda or cuda:N", "D")
    tp: int = setting(1, _count(1, 64), "tensor ranks: processes that divide every layer", "N")
    pp: int = setting(1, _count(1, 64), "pipeline stages: each has a part of the layers", "N")
    dtype: str | None = setting(
        None, _one_of(*DTYPES), "what is computed in; float32 on a CPU, else bfloat16", "T"
    )
    kv_dtype: str | None = setting(
        None, _one_of(*KV_DTYPES), "what is kept; as computed if not given", "T"
    )
    deterministic: bool = setting(
        False, _flag, "answers do not depend on batches, chunks or tiers, to the last bit"
    )

    page_tokens: int | None = setting(None, _count(), "tokens per page; the family's own", "N")
    checkpoint_tokens: int | None = setting(
        None, _count(), "where recurrent states may be kept; every page if not given", "N"
    )
    tokens_per_checkpoint: int = setting(
        1024, _count(), "windows and states get slots for one checkpoint per so many tokens", "N"
    )
    device_tokens: int | None = setting(None, _count(), "size of the device tier", "N")
    device_bytes: int | None = setting(None, _size, "the same in bytes: 60GB", "X")
    host_tokens: int | None = setting(None, _count(), "size of the host tier", "N")
    host_bytes: int | None = setting(None, _size, "the same in bytes: 200GB", "X")
    host_ratio: float | None = setting(
        None,
        _share(1e6),
        "the same in device tiers; 0 for no host tier; 2 if not given, or half of the free memory "
        "beside a GPU",
        "R",
    )
    layout: str = setting(
        Layout.PAGE_FIRST_DIRECT.value,
        _one_of(*(one.value for one in Layout)),
        "how pages lie on the host",
        "L",
    )
    io_backend: str | None = setting(None, _one_of(*BACKENDS), "how pages are copied", "B")
    write_policy: str = setting(
        "write_through",
        _one_of(*(name for name in POLICIES if name != "none")),
        "when pages go to the host",
        "W",
    )
    eviction: str = setting(
        DEFAULT_POLICY, _one_of(*EVICTIONS), "what a full tier gives up first", "E"
    )
    verify_restores: float = setting(
        0.0, _share(), "recompute this share of restored prefixes and compare", "P"
    )

    storage: str | None = setting(
        None,
        _text,
        "where pages outlive the server: file:///path?cap=200GB, redis://…, none; "
        "a folder in your cache directory if not given",
        "URL",
    )
    prefetch_policy: str = setting(
        _USUAL.policy, _one_of(*PATIENCE), "whether requests wait for storage", "P"
    )
    prefetch_base_seconds: float = setting(
        _USUAL.base_s, _seconds(), "how long they wait with timeout, whatever they are", "S"
    )
    prefetch_per_1k_seconds: float = setting(
        _USUAL.per_1k_s, _seconds(), "and how much longer for every 1,000 tokens", "S"
    )
    prefetch_most_seconds: float | None = setting(
        None,
        _seconds(),
        f"but not longer than this; {_USUAL.max_s:g}, {_USUAL.complete_s:g} with wait_complete",
        "S",
    )
    prefetch_least_tokens: int | None = setting(
        None,
        _count(),
        f"storage is not asked for less; {_MIN_HERE} on this machine, else {_USUAL.min_tokens}",
        "N",
    )

    chunk_tokens: int | None = setting(
        None, _count(), "the most tokens of one step; 512, on a GPU 8192", "N"
    )
    max_running: int = setting(64, _count(), "the largest batch", "N")
    max_waiting: int = setting(
        256, _count(0), "when so many wait beside a full batch, clients are told to come later", "N"
    )
    drain_seconds: float = setting(
        30.0, _seconds(), "how long requests and storage may go on after SIGTERM", "S"
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
    def loopback(self) -> bool:
        if self.address == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.address).is_loopback
        except ValueError:
            return False

    @property
    def max_requests(self) -> int:
        """A full batch, and those that wait for a topology in it."""
        return min(self.max_running, self.step_tokens) + self.max_waiting

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def step_tokens(self) -> int:
        """The most of one step: enough to keep the device at work."""
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
    def patience(self) -> FetchPatience:
        """How long requests wait for storage, and for how little they do not ask."""
        most, least = self.prefetch_most_seconds, self.prefetch_least_tokens
        here = self.storage is None or self.storage.startswith(_HERE)
        usual = _MIN_HERE if here else _USUAL.min_tokens
        return FetchPatience(
            policy=self.prefetch_policy,
            base_s=self.prefetch_base_seconds,
            per_1k_s=self.prefetch_per_1k_seconds,
            max_s=_USUAL.max_s if most is None else most,
            complete_s=_USUAL.complete_s if most is None else most,
            min_tokens=usual if least is None else least,
        )


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# -- reading it -------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One for every setting. What is not given is not in the namespace."""
    parser.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, help=_fields()["model"].metadata["help"]
    )
    parser.add_argument(
        flag(CONFIG), default=argparse.SUPPRESS, metavar="FILE", help="settings in TOML"
    )
    for name, row in _fields().items():
        shown = row.metadata["shown"]
        words = row.metadata["help"] + (f" ({row.default})" if row.default else "")
        if row.metadata["parse"] is _flag:
            parser.add_argument(
                flag(name),
                action="store_const",
                const="true",
                default=argparse.SUPPRESS,
                help=words,
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
                flag(name), default=argparse.SUPPRESS, metavar=shown, help=words.replace("%", "%%")
            )


def read(given: Mapping[str, str], environment: Mapping[str, str]) -> Settings:
    """The settings that flags, environment and config file say together."""
    table = _fields()
    flags = {name: (flag(name), given[name]) for name in table if name in given}
    variables = {
        name: (PREFIX + name.upper(), environment[PREFIX + name.upper()])
        for name in table
        if PREFIX + name.upper() in environment
    }
    path = given.get(CONFIG, environment.get(PREFIX + CONFIG.upper()))
    said: dict[str, tuple[str, str]] = {}
    for source in ({} if path is None else _written(Path(path)), variables, flags):
        replaced = {name for group in ALTERNATIVES if source.keys() & set(group) for name in group}
        said = {name: value for name, value in said.items() if name not in replaced} | source
    return Settings(**{name: _parsed(table[name], *value) for name, value in said.items()})


def _fields() -> dict[str, Field[Any]]:
    return {row.name: row for row in fields(Settings)}


def _parsed(row: Field[Any], source: str, value: str) -> Any:
    try:
        return row.metadata["parse"](value)
    except SettingsError as problem:
        raise SettingsError(f"{source} {problem}") from None


def _written(path: Path) -> dict[str, tuple[str, str]]:
    """What a config file says: the key for messages, and the value as a flag would have it."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; pass a file with settings") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not TOML ({error}); write lines like port = 8000") from None
    written = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in _fields():
            near = difflib.get_close_matches(name, _fields(), 1)
            remedy = f"did you mean {near[0]}?" if near else f"use {', '.join(_fields())}"
            raise SettingsError(f"{path}: there is no setting '{key}'; {remedy}")
        if isinstance(value, dict | list):
            raise SettingsError(f"{path}: {key} is a table or list; write {key} = VALUE")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        written[name] = (f"{path}: {key}", text)
    return written
