"""A server's settings, and what it refuses before it serves."""

from __future__ import annotations

import argparse
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from kvtide.cache import Bytes, FetchPatience, Ratio, StorageStats, TieredCache, Tokens
from kvtide.cli import main
from kvtide.engine import Engine, Finish, RequestParams
from kvtide.server import setting_sources
from kvtide.server.handoff.handoff_settings import SECRET_VARIABLE, Role
from kvtide.server.setting_sources import read
from kvtide.server.setting_values import SettingsError
from kvtide.server.settings import Settings, flag
from kvtide.server.setup.engine_setup import REFUSALS, gpu_sizes, open_engine
from kvtide.server.setup.store_setup import default_url
from kvtide.spec.residency import Residency
from kvtide.storage import StoreError
from kvtide.tiers import MachineMemory
from tests.models.tiny import oracle

GB = 10**9
SECRET = "at least sixteen letters"

Refuse = Callable[..., str]
Stored = Callable[..., tuple[str, StorageStats | None]]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in fields(Settings):
        monkeypatch.delenv(setting_sources.PREFIX + row.name.upper(), raising=False)
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.fixture
def refuse(capfd: pytest.CaptureFixture[str], model_folder: Path) -> Refuse:
    """What `kvtide serve` says when it refuses."""

    def run(*flags: str, model: Path | str = model_folder) -> str:
        capfd.readouterr()
        assert main.main(["serve", str(model), *flags]) == 2
        out, err = capfd.readouterr()
        *before, last = err.splitlines()
        assert out == "" and "Traceback" not in err
        usual = ("ready after", "pages are ", "speculation: none", "knows no tools", "run at once")
        assert all(any(words in line for words in usual) for line in before), err
        assert last.startswith("kvtide serve: ")
        return last.removeprefix("kvtide serve: ")

    return run


@pytest.fixture
def variant(model_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """The tiny model with other fields in its config, or with other files."""

    def made(files: dict[str, str] | None = None, **config: object) -> Path:
        folder = tmp_path / "variant"
        shutil.copytree(model_folder, folder)
        config_json = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config_json, **config}))
        for name, text in (files or {}).items():
            (folder / name).write_text(text)
        return folder

    return made


# -- where settings come from ---------------------------------------------------------------------

SAMPLES: dict[str, tuple[str, object]] = {
    "model": ("folder", "folder"),
    "name": ("n", "n"),
    "address": ("::1", "::1"),
    "port": ("0", 0),
    "api_key": ("a", "a"),
    "admin_key": ("b", "b"),
    "show_text": ("true", True),
    "device": ("cuda:1", "cuda:1"),
    "tp": ("2", 2),
    "pp": ("3", 3),
    "dtype": ("bfloat16", "bfloat16"),
    "kv_dtype": ("fp16", "fp16"),
    "deterministic": ("true", True),
    "speculate": ("ngram", "ngram"),
    "draft": ("folder", "folder"),
    "draft_tokens": ("16", 16),
    "page_tokens": ("32", 32),
    "checkpoint_tokens": ("64", 64),
    "tokens_per_checkpoint": ("256", 256),
    "resident": ("hot:4096", "hot:4096"),
    "device_tokens": ("4096", 4096),
    "device_bytes": ("1.5GB", 1_500_000_000),
    "host_tokens": ("8192", 8192),
    "host_bytes": ("2GiB", 2 << 30),
    "host_ratio": ("0.5", 0.5),
    "host_layout": ("page_first", "page_first"),
    "io_backend": ("direct", "direct"),
    "write_policy": ("write_back", "write_back"),
    "eviction": ("lru", "lru"),
    "verify_restores": ("0.25", 0.25),
    "storage": ("redis://:secret@host", "redis://:secret@host"),
    "prefetch_policy": ("best_effort", "best_effort"),
    "prefetch_base_seconds": ("0.5", 0.5),
    "prefetch_per_1k_seconds": ("0", 0.0),
    "prefetch_max_seconds": ("2.5", 2.5),
    "prefetch_min_tokens": ("1000", 1000),
    "role": ("prefill", "prefill"),
    "prefill_from": ("http://a:1/, https://b", "http://a:1,https://b"),
    "handoff_host": ("127.0.0.2", "127.0.0.2"),
    "handoff_port": ("0", 0),
    "handoff_transport": ("nixl", "nixl"),
    "handoff_protocol": ("rdma", "rdma"),
    "handoff_devices": ("mlx5_0,mlx5_1", "mlx5_0,mlx5_1"),
    "handoff_min_tokens": ("0", 0),
    "handoff_timeout_seconds": ("2.5", 2.5),
    "handoff_bytes_per_second": ("2GB", 2 * GB),
    "handoff_secret_file": (__file__, __file__),
    "kv_events": ("tcp://*:5557", "tcp://*:5557"),
    "kv_events_replay": ("tcp://[::1]:0", "tcp://[::1]:0"),
    "kv_events_topic": ("kv@one", "kv@one"),
    "kv_events_names": ("page_keys", "page_keys"),
    "kv_events_batches": ("100", 100),
    "chunk_tokens": ("128", 128),
    "max_running": ("3", 3),
    "session_ttl_seconds": ("60", 60.0),
    "session_fraction": ("0.25", 0.25),
    "session_share": ("1", 1.0),
    "stable_prefix": ("billing-header,dates,regex:^cc=.*", "billing-header,dates,regex:^cc=.*"),
    "max_waiting": ("0", 0),
    "drain_seconds": ("1.5", 1.5),
    "rank_backend": ("gloo", "gloo"),
    "chat_template": ("chat.jinja", "chat.jinja"),
    "tool_parser": ("qwen3_coder", "qwen3_coder"),
    "reasoning_parser": ("think", "think"),
    "nodes": ("2", 2),
    "node": ("1", 1),
    "rendezvous": ("10.0.0.1:29500", "10.0.0.1:29500"),
    "rank_secret_file": ("/run/secret", "/run/secret"),
    "rank_timeout_seconds": ("7", 7.0),
    "step_timeout_seconds": ("90.5", 90.5),
}
BESIDE = {
    "prefill_from": {SECRET_VARIABLE: SECRET},
    "handoff_protocol": {"KVTIDE_HANDOFF_TRANSPORT": "mooncake"},
    "handoff_devices": {"KVTIDE_HANDOFF_TRANSPORT": "nixl"},
    "kv_events_replay": {"KVTIDE_KV_EVENTS": "tcp://*:5557"},
}
"""What a setting needs in the environment to be accepted."""


def parsed(*argv: str) -> dict[str, str]:
    """What the command line's flags hand on."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    setting_sources.add_flags(parser)
    return vars(parser.parse_args(argv))


@pytest.mark.parametrize("name", [row.name for row in fields(Settings)])
def test_every_setting_is_a_flag_a_variable_and_a_key(name: str, tmp_path: Path) -> None:
    text, value = SAMPLES[name]
    given = [flag(name), text]
    switches = {switch: [flag(switch)] for switch in ("deterministic", "show_text")}
    given = {"model": [text], **switches}.get(name, given)
    file = tmp_path / "kvtide.toml"
    file.write_text(f"{name} = {json.dumps(text)}\n")
    beside = BESIDE.get(name, {})
    assert getattr(read(parsed(*given), beside), name) == value
    assert getattr(read({}, {f"KVTIDE_{name.upper()}": text, **beside}), name) == value
    assert getattr(read({"config": str(file)}, beside), name) == value
    assert getattr(read({}, {"KVTIDE_CONFIG": str(file), **beside}), name) == value


@pytest.mark.parametrize("alias", setting_sources.ALIASES)
def test_an_alias_is_a_flag_a_variable_and_a_key_too(alias: str, tmp_path: Path) -> None:
    name = setting_sources.ALIASES[alias]
    text, value = SAMPLES[name]
    file = tmp_path / "kvtide.toml"
    file.write_text(f"{alias} = {json.dumps(text)}\n")
    assert getattr(read(parsed(flag(alias), text), {}), name) == value
    assert getattr(read({}, {f"KVTIDE_{alias.upper()}": text}), name) == value
    assert getattr(read({"config": str(file)}, {}), name) == value
    both = {f"KVTIDE_{alias.upper()}": "unread", f"KVTIDE_{name.upper()}": text}
    assert getattr(read({}, both), name) == value


def test_a_flag_goes_before_a_variable_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvtide.toml"
    file.write_text("port = 1\npage-tokens = 16\ndeterministic = true\nhost_ratio = 1.5\n")
    environment = {"KVTIDE_CONFIG": str(file), "KVTIDE_PORT": "2", "KVTIDE_DETERMINISTIC": "no"}
    assert read({}, {"KVTIDE_CONFIG": str(file)}).port == 1
    assert read({}, environment).port == 2
    chosen = read(parsed("--port", "3"), environment)
    assert (chosen.port, chosen.page_tokens, chosen.host_ratio) == (3, 16, 1.5)
    assert not chosen.deterministic
    assert read(parsed("--deterministic"), environment).deterministic
    assert not read(parsed("--no-deterministic"), {"KVTIDE_DETERMINISTIC": "1"}).deterministic
    other = tmp_path / "other.toml"
    other.write_text("port = 4\n")
    assert read(parsed("--config", str(other)), {"KVTIDE_CONFIG": str(file)}).port == 4


def test_only_this_machine_is_served_by_default() -> None:
    chosen = read({}, {})
    assert (chosen.address, chosen.port, chosen.device) == ("127.0.0.1", 8000, "cpu")
    for address in ("localhost", "::1", "127.1.2.3"):
        assert Settings(address=address).loopback


# -- refused by its settings ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device-tokens=64", "--device-bytes=1MB"], "--device-tokens and --device-bytes size"),
        (["--host-tokens=64", "--host-bytes=1MB"], "--host-tokens and --host-bytes size the same"),
        (["--host-ratio=2", "--host-bytes=1MB"], "--host-bytes and --host-ratio size the same"),
        (["--device-tokens=1"], "less than a page; use at least 64 tokens"),
        (
            ["--device-bytes=10"],
            "10 bytes do not hold a page and what one request needs to run; use at least",
        ),
        (["--device-bytes=0"], "use at least"),
        (["--device-bytes=100PB"], "device memory: 100000000.0 GB wanted"),
        (["--device-tokens=0"], "--device-tokens is 0; use 1 to"),
        (["--device-bytes=lots"], "--device-bytes is no size: 'lots' is not a size; write it like"),
        (["--host-tokens=1"], "less than a page"),
        (["--host-ratio=1e-9"], "use a ratio of at least"),
        (["--host-ratio=-1"], "--host-ratio is -1"),
        (["--host-ratio=nan"], "--host-ratio is nan"),
        (["--host-ratio=inf"], "--host-ratio is inf"),
        (["--page-tokens=0"], "--page-tokens is 0; use 1 to"),
        (["--page-tokens=16.5"], "--page-tokens is '16.5'; use a whole number"),
        (["--device=cuda"], "--device cuda: torch finds 0 such devices here; use cpu"),
        (["--device=cuda:7"], "--device cuda:7: torch finds"),
        (["--device=gpu"], "--device gpu is not known; use cpu, cuda or cuda:N"),
        (["--device=meta"], "--device meta: nothing is computed there"),
        (["--io-backend=kernel"], "backend kernel with host layout page_first_direct does not"),
        (["--io-backend=fast"], "--io-backend is 'fast'; use"),
        (["--host-layout=mine"], "--host-layout is 'mine'; use layer_first"),
        (["--layout=mine"], "--layout is 'mine'; use layer_first"),
        (["--dtype=int8"], "--dtype is 'int8'; use float32"),
        (["--eviction=random"], "--eviction is 'random'; use lru"),
        (["--write-policy=never"], "--write-policy is 'never'; use write_through"),
        (["--write-policy=write_back", "--host-ratio=0"], "drop one of them"),
        (["--resident=hot"], "--resident is 'hot'; use all, auto, or hot:B, like hot:4096"),
        (["--resident=hot:0"], "--resident is 'hot:0'; use all"),
        (
            ["--resident=hot:64", "--host-ratio=0"],
            "on the host, and --host-ratio 0 leaves it out; give the host a size, or use "
            "--resident all",
        ),
        (["--tool-parser=mine"], "--tool-parser is 'mine'; use deepseek_v3"),
        (["--reasoning-parser=mine"], "--reasoning-parser is 'mine'; use none, think, harmony"),
        (["--tool-parser=harmony", "--reasoning-parser=think"], "reads calls and reasoning tog"),
        (["--verify-restores=2"], "--verify-restores is 2"),
        (["--storage=file:///tmp/x", "--host-ratio=0"], "reached through a host tier, and"),
        (["--storage="], "--storage is empty"),
        (["--storage=nonsense"], "storage nonsense: no such store; use file:, mooncake:, redis:"),
        (["--storage=file:here"], "give the whole path of a folder, like file:///var/kvtide"),
        (["--storage=file:///dev/null/x"], "storage file:///dev/null/x: cannot be used (Not a"),
        (["--storage=file:///tmp/x?size=1"], "no setting size; it knows cap, floor"),
        (["--storage=no.such.package:Store"], "cannot be imported (No module named 'no')"),
        (
            ["--storage=tests.server.stores:Refusing"],
            "storage tests.server.stores:Refusing: cannot be opened (ValueError: not today)",
        ),
        (["--role=server"], "--role is 'server'; use prefill, decode, both"),
        (["--role=prefill", "--prefill-from=http://a:1"], "computed elsewhere; drop one of them"),
        (["--role=decode", "--host-ratio=0"], "written to the host tier, and --host-ratio 0"),
        (["--prefill-from=http://localhost:1", "--host-ratio=0"], "give the host a size"),
        (["--role=decode", "--handoff-port=9000"], "--role decode connects to one; drop one"),
        (["--prefill-from=localhost:8000"], "'localhost:8000', which is no server; use http://"),
        (["--prefill-from=http://a:1,"], "--prefill-from has '', which is no server"),
        (["--prefill-from=http://a:1/v1"], "which is more than a server"),
        (["--prefill-from=http://a:x"], "--prefill-from has 'http://a:x' (Port could not be"),
        (["--prefill-from=http://[::1"], "--prefill-from has 'http://[::1' (Invalid IPv6 URL)"),
        (["--role=prefill", "--handoff-host=0.0.0.0"], "--handoff-host 0.0.0.0 names no machine"),
        (["--role=prefill", "--handoff-host=::"], "--handoff-host :: names no machine"),
        (
            ["--role=prefill", "--handoff-host=10.0.0.1"],
            "handoffs with 10.0.0.1 leave this machine",
        ),
        (
            ["--role=decode", "--handoff-host=box"],
            "handoffs with box leave this machine, and there",
        ),
        (
            ["--prefill-from=http://box:1"],
            "both sides the same --handoff-secret-file, or set KVTIDE",
        ),
        (["--handoff-secret-file=/no/such"], "--handoff-secret-file /no/such: No such file"),
        (["--handoff-secret-file=/dev/null"], "has 0 bytes, which can be guessed; use at least 16"),
        (["--handoff-transport=rdma"], "--handoff-transport is 'rdma'; use shm, mooncake, nixl"),
        (["--handoff-protocol=udp"], "--handoff-protocol is 'udp'; use tcp, rdma"),
        (["--handoff-protocol=rdma"], "transport is shm; use --handoff-transport mooncake"),
        (
            ["--handoff-protocol=rdma", "--handoff-transport=nixl"],
            "--handoff-protocol rdma is for Mooncake, and the transport is nixl",
        ),
        (["--handoff-devices=mlx5_0"], "--handoff-devices mlx5_0 is for a network, and the"),
        (["--handoff-timeout-seconds=-1"], "--handoff-timeout-seconds is -1"),
        (["--prefetch-policy=wait"], "--prefetch-policy is 'wait'; use best_effort, timeout, wait"),
        (["--prefetch-base-seconds=-1"], "--prefetch-base-seconds is -1"),
        (["--prefetch-max-seconds=inf"], "--prefetch-max-seconds is inf"),
        (["--prefetch-min-tokens=0"], "--prefetch-min-tokens is 0"),
        (["--port=65536"], "--port is 65536; use 0 to 65,535"),
        (["--port=http"], "--port is 'http'; use a whole number"),
        (["--port="], "--port is ''; use a whole number"),
        (["--max-running=0"], "--max-running is 0; use 1 to"),
        (["--max-running=513"], "--max-running 513 is more than the 512 tokens of a step"),
        (["--max-running=9", "--chunk-tokens=8"], "use fewer, or more --chunk-tokens"),
        (["--api-key="], "--api-key is empty"),
        (["--drain-seconds=-1"], "--drain-seconds is -1"),
        (["--address=0.0.0.0"], "opens the admin routes to the network; set --admin-key"),
        (["--address=::", "--api-key=a"], "opens the admin routes to the network"),
        (["--address=10.0.0.1"], "opens the admin routes to the network"),
        (["--address=no.such.host.invalid", "--admin-key=a"], "cannot listen on no.such.host"),
        (["--config=/no/such/file"], "/no/such/file: No such file"),
        (["--config=/"], "/: Is a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_flags_are_refused_with_the_remedy(
    refuse: Refuse, flags: list[str], words: str
) -> None:
    assert words in refuse(*flags)


def test_flags_that_are_none_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for unknown in ("--ports", "--por=1"):
        with pytest.raises(SystemExit) as ended:
            main.main(["serve", "model", unknown])
        assert ended.value.code == 2
    assert "unrecognized arguments: --ports" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("prot = 8000", "there is no setting 'prot'; did you mean port?"),
        ("zzz = 1", "there is no setting 'zzz'; use model, name"),
        ("[serve]\nport = 1", "there is no setting 'serve'"),
        ("config = 'x'", "there is no setting 'config'"),
        ("port = [1]", "port is a table or list; write port = VALUE"),
        ("port = {a = 1}", "port is a table or list"),
        ("port = true", "port is 'true'; use a whole number"),
        ("port = 8000.5", "port is '8000.5'; use a whole number"),
        ("port = 'x'", "port is 'x'; use a whole number"),
        ("deterministic = 2", "deterministic is '2'; use true or false"),
        ("deterministic = 'maybe'", "deterministic is 'maybe'; use true or false"),
        ("host_ratio = nan", "host_ratio is nan"),
        ("device_bytes = -5", "device_bytes is no size"),
        ("host_layout = 3", "host_layout is '3'; use"),
        ("layout = 3", "layout is '3'; use"),
        ("port 8000", "not TOML"),
        ("port = 1\nport = 2", "not TOML"),
        ("\x00", "not TOML"),
    ],
)
def test_bad_files_are_refused_with_the_remedy(
    refuse: Refuse, tmp_path: Path, written: str, words: str
) -> None:
    file = tmp_path / "kvtide.toml"
    file.write_text(written)
    problem = refuse("--config", str(file))
    assert problem.startswith(str(file)) and words in problem


def test_bad_variables_are_refused_by_their_names(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_PORT", "99999")
    assert refuse() == "KVTIDE_PORT is 99999; use 0 to 65,535"
    monkeypatch.setenv("KVTIDE_PORT", "0")
    monkeypatch.setenv("KVTIDE_DEVICE_TOKENS", "64")
    monkeypatch.setenv("KVTIDE_DEVICE_BYTES", "1MB")
    assert "size the same tier" in refuse(), "wherever they come from"


def test_a_flag_replaces_its_alternatives_in_weaker_sources(tmp_path: Path) -> None:
    file = tmp_path / "kvtide.toml"
    file.write_text("host_ratio = 3\ndevice_tokens = 64\n")
    environment = {"KVTIDE_DEVICE_TOKENS": "128", "KVTIDE_HOST_TOKENS": "512"}
    chosen = setting_sources.read({"config": str(file), "device_bytes": "1MB"}, environment)
    assert (chosen.device_bytes, chosen.device_tokens) == (10**6, None)
    assert (chosen.host_tokens, chosen.host_ratio) == (512, None)


# -- handoffs -------------------------------------------------------------------------------------


def test_a_server_takes_part_in_handoffs_as_its_role_says() -> None:
    sides = [
        (Settings().handoff, False, False),
        (Settings(role="prefill").handoff, True, False),
        (Settings(role="decode").handoff, False, True),
        (Settings(handoff_port=0).handoff, True, False),
        (Settings(prefill_from="http://[::1]:1").handoff, False, True),
    ]
    for handoff, listens, receives in sides:
        assert (handoff.listens, handoff.receives) == (listens, receives), handoff
        assert handoff.secret({}) is None, "all of these stay on this machine"
    several = Settings(role="decode", prefill_from="http://a:1,https://b").handoff
    assert several.role is Role.DECODE and several.prefill_from == ("http://a:1", "https://b")
    assert several.remote == ("a", "b")
    assert Settings(handoff_host="10.0.0.1").handoff.secret({}) is None, "it takes no part"


def test_the_secret_is_in_a_file_or_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    distant = Settings(role="prefill", handoff_host="10.0.0.1")
    assert distant.handoff.secret({SECRET_VARIABLE: SECRET}) == SECRET.encode()
    filed = replace(distant, handoff_secret_file=str(file))
    assert filed.handoff.secret({}) == SECRET.encode(), "without the end of its line"
    with pytest.raises(SettingsError, match="both given; keep one of them"):
        filed.handoff.secret({SECRET_VARIABLE: SECRET})
    with pytest.raises(SettingsError, match="KVTIDE_HANDOFF_SECRET has 5 bytes"):
        distant.handoff.secret({SECRET_VARIABLE: "short"})


def test_no_flag_takes_the_secret(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["serve", "model", "--handoff-secret", SECRET])
    assert "unrecognized arguments" in capfd.readouterr().err


def test_a_port_in_use_is_refused(refuse: Refuse) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problem = refuse("--port", str(port))
    assert problem.startswith(f"cannot listen on 127.0.0.1:{port}")
    assert problem.endswith("choose another --port, or 0 for any")


# -- refused by what the model is -----------------------------------------------------------------


def test_what_is_no_model_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    assert "no such file or folder; pass a folder" in refuse(model=tmp_path / "nothing")
    assert "no config.json here" in refuse(model=tmp_path)
    file = tmp_path / "file"
    file.write_text("hello")
    assert "not a GGUF file" in refuse(model=file)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "neither model.safetensors nor" in refuse(model=tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "not readable as JSON" in refuse(model=tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantised (awq)"),
        ({"model_type": "gpt2"}, "'gpt2' has no forward pass here; use one of"),
        ({"model_type": None}, "has no forward pass here"),
        ({"num_hidden_layers": 3}, "there is no tensor model.layers.2."),
        ({"num_hidden_layers": 0}, "use a whole number of at least 1"),
        ({"head_dim": 12}, "the weights are not those that the config describes"),
    ],
)
def test_models_that_cannot_be_served_are_refused(
    refuse: Refuse, variant: Callable[..., Path], config: dict[str, object], words: str
) -> None:
    assert words in refuse(model=variant(**config))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", "{}", "not readable as a tokenizer"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("chat_template.jinja", "{% if %}", "the chat template does not parse"),
        ("model.safetensors", "hello", "not readable as safetensors"),
    ],
)
def test_files_that_cannot_be_read_are_refused(
    refuse: Refuse, variant: Callable[..., Path], name: str, text: str, words: str
) -> None:
    assert words in refuse(model=variant({name: text}))


@pytest.mark.parametrize("family", ["gemma3", "falcon_h1"])
def test_the_smallest_device_tier_that_is_taken_serves_what_it_says(
    tmp_path: Path, family: str
) -> None:
    oracle(family).save_pretrained(tmp_path)
    chosen = Settings(model=str(tmp_path), page_tokens=16, host_ratio=0, device_tokens=1024)
    engine = open_engine(chosen).engine
    request = engine.submit(RequestParams(tuple(range(3, 203)) * 3, 20))
    for _ in range(100):
        engine.step()
    assert request.finish is Finish.LENGTH
    engine.cache.close()


def test_a_page_that_the_family_refuses_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    oracle("falcon_h1").save_pretrained(tmp_path)
    problem = refuse("--page-tokens=16", "--checkpoint-tokens=24", model=tmp_path)
    assert problem.endswith("never meet the ends of pages of 16; make one a multiple of the other")


# -- what is opened -------------------------------------------------------------------------------


def test_sizes_layouts_and_names_reach_the_cache(model_folder: Path) -> None:
    chosen = Settings(
        model=str(model_folder),
        device_tokens=256,
        host_tokens=512,
        page_tokens=32,
        host_layout="layer_first",
        write_policy="write_back",
        eviction="lru",
        dtype="bfloat16",
        chunk_tokens=48,
    )
    serving = open_engine(chosen)
    config, memory = serving.engine.cache.config, serving.engine.cache.memory
    assert (memory.page_tokens, serving.engine.max_sequence_tokens, serving.name) == (
        32,
        256,
        "tiny-0.1",
    )
    assert (config.host_layout.value, config.write_policy, config.eviction) == (
        "layer_first",
        "write_back",
        "lru",
    )
    assert serving.engine.scheduler.chunk_tokens == 48
    assert memory.pools[0].entry.fields[0].dtype.value[0] == "bf16"
    serving.engine.cache.close()


def test_a_host_tier_can_be_left_out(model_folder: Path) -> None:
    serving = open_engine(Settings(model=str(model_folder), host_ratio=0, name="mine"))
    pages = serving.engine.cache.stats().pages.items()
    assert {tier.name: count.capacity > 0 for (tier, _), count in pages} == {
        "DEVICE": True,
        "HOST": False,
    }
    assert serving.name == "mine"
    serving.engine.cache.close()


def test_settings_made_in_code_are_checked_too() -> None:
    with pytest.raises(SettingsError, match="size the same tier"):
        Settings(device_tokens=64, device_bytes=100)
    with pytest.raises(SettingsError, match="admin routes"):
        Settings(address="192.168.0.1")
    assert not Settings(address="192.168.0.1", admin_key="a").loopback
    with pytest.raises(SettingsError, match="use all, auto, or hot:B"):
        Settings(resident="cold")


def test_all_pages_are_on_the_device_unless_asked_otherwise() -> None:
    assert Settings().residency == Residency()
    assert Settings(resident="hot:512").residency == Residency(512)
    assert Settings(resident="auto", host_ratio=0).residency == Residency(auto=True)


# -- where pages are stored -----------------------------------------------------------------------


@pytest.fixture
def stored(model_folder: Path) -> Iterator[Stored]:
    """What a server says of its storage, and what it has attached."""
    caches: list[TieredCache] = []

    def attached(**chosen: object) -> tuple[str, StorageStats | None]:
        serving = open_engine(Settings(model=str(model_folder), **chosen))
        caches.append(serving.engine.cache)
        return serving.storage, caches[-1].storage.stats()

    yield attached
    assert all(cache.close() for cache in caches)


def test_pages_are_stored_in_the_cache_directory_by_default(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache?"))
    sentence, stats = stored()
    folder = tmp_path / "a cache?" / "kvtide" / "pages"
    assert sentence == f"pages are stored in file://{folder}, up to 20GB; --storage changes that"
    assert stats is not None and stats.state == "attached"
    assert folder.stat().st_mode & 0o777 == 0o700, "others have no business there"
    assert stored(storage="none") == ("pages are not stored", None)
    assert stored(host_ratio=0) == ("pages are not stored: there is no host tier", None)
    assert stored(host_ratio=0, storage="none") == ("pages are not stored", None)
    assert stored(storage="memory:here")[0] == "pages are stored in memory:here"


def test_a_cache_directory_is_found_without_being_named(tmp_path: Path) -> None:
    wanted = f"file://{tmp_path}/.cache/kvtide/pages?cap=20GB"
    assert default_url({"HOME": str(tmp_path)}) == wanted
    assert default_url({"HOME": str(tmp_path), "XDG_CACHE_HOME": "not/absolute"}) == wanted
    with pytest.raises(StoreError, match="there is no home directory; name a folder with"):
        default_url({})


@pytest.mark.parametrize("place", ["/dev/null", "/proc/none"])
def test_without_its_usual_folder_a_server_serves_on(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    sentence, stats = stored()
    assert sentence.startswith(f"pages are not stored: {place}/kvtide/pages cannot be made (")
    assert sentence.endswith("; name another folder with --storage")
    assert stats is None


def test_a_store_that_refuses_to_open_keeps_its_password(model_folder: Path) -> None:
    chosen = Settings(model=str(model_folder), storage="x.y://me:hidden@there/tests?z=hidden")
    with pytest.raises(SettingsError) as refusal:
        open_engine(chosen)
    assert "hidden" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, r"chat.jinja cannot be read \(.*; give a file with a template in Jinja"),
        (b"\xff", r"chat.jinja cannot be read \("),
        (b" \n", "chat.jinja is empty; give a file"),
        (b"{% if %}", "the chat template does not parse"),
    ],
)
def test_a_chat_template_that_is_none_is_refused(
    model_folder: Path, tmp_path: Path, text: bytes | None, sentence: str
) -> None:
    file = tmp_path / "chat.jinja"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(REFUSALS, match=sentence):
        open_engine(Settings(model=str(model_folder), chat_template=str(file)))


def test_a_chat_template_needs_a_tokenizer(bare_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    with pytest.raises(SettingsError, match="came without a tokenizer; add its"):
        open_engine(Settings(model=str(bare_folder), chat_template=str(tmp_path / "chat.jinja")))


def test_a_gpu_without_room_for_steps_is_not_reported_as_a_fault(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(engine: Engine) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    closed, close = [], TieredCache.close

    def noted(cache: TieredCache) -> None:
        closed.append(cache)
        close(cache)

    monkeypatch.setattr(Engine, "warm_up", full)
    monkeypatch.setattr(TieredCache, "close", noted)
    with pytest.raises(SettingsError, match=r"no room left for steps .* smaller --device-tokens"):
        open_engine(Settings(model=str(model_folder)))
    assert len(closed) == 1


def test_patience_follows_the_settings() -> None:
    usual = Settings().patience
    assert (usual.policy, usual.max_s, usual.complete_s) == ("timeout", 10.0, 60.0)
    assert (usual.base_s, usual.per_1k_s, usual.min_tokens) == (1.0, 0.25, 64)
    assert Settings(storage="redis://there").patience.min_tokens == 256, "asking takes longer"
    patience = Settings(
        storage="redis://there",
        prefetch_policy="wait_complete",
        prefetch_base_seconds=0.5,
        prefetch_per_1k_seconds=0.0,
        prefetch_max_seconds=2.0,
        prefetch_min_tokens=7,
    ).patience
    assert patience == FetchPatience("wait_complete", 0.5, 0.0, 2.0, 2.0, 7)


def test_pages_computed_another_way_are_kept_apart(model_folder: Path) -> None:
    ways: list[dict[str, object]] = [{}, {"dtype": "bfloat16"}, {"deterministic": True}]
    spaces = set()
    for way in ways:
        chosen = {"kv_dtype": "bf16", "storage": "none", **way}
        cache = open_engine(Settings(model=str(model_folder), **chosen)).engine.cache
        spaces.add(cache.storage.space)
        cache.close()
    assert len(spaces) == len(ways)


def test_deterministic_servers_read_pages_of_as_many_tensor_ranks_only(model_folder: Path) -> None:
    """Others differ in their last bits."""
    for deterministic in (False, True):
        settings = Settings(model=str(model_folder), storage="none", deterministic=deterministic)
        cache = open_engine(settings).engine.cache
        assert cache.config.any_tensor_ranks is not deterministic
        cache.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_beside_a_gpu_tiers_take_what_is_free_and_never_more_than_they_may(ranks):
    gpu, machine = MachineMemory(80 * GB, 60 * GB), MachineMemory(400 * GB, 300 * GB)
    given = Settings(device="cuda", tp=ranks)
    assert gpu_sizes(given, gpu, machine) == (Bytes(48 * GB), Bytes(150 * GB // ranks))
    full = MachineMemory(80 * GB, 14 * GB)
    assert gpu_sizes(given, full, machine)[0] == Bytes(full.max_bytes) != Bytes(int(11.2 * GB))
    explicit = replace(given, device_tokens=1000, host_ratio=3.0)
    assert gpu_sizes(explicit, gpu, machine) == (Tokens(1000), Ratio(3.0))


def test_ranks_that_share_a_gpu_divide_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, machine = MachineMemory(80 * GB, 60 * GB), MachineMemory(400 * GB, 300 * GB)
    given = Settings(device="cuda", tp=2, pp=2, rank_backend="gloo")
    for gpus, sharing in ((1, 4), (2, 2), (3, 2), (4, 1), (8, 1)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert gpu_sizes(given, gpu, machine)[0] == Bytes(48 * GB // sharing)


def test_an_address_for_kv_events_that_is_in_use_is_refused(refuse: Refuse) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        problem = refuse("--port", "0", "--kv-events", endpoint)
    assert problem.startswith(f"--kv-events cannot listen on {endpoint}")
    assert problem.endswith("choose another address or port")
