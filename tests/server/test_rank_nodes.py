"""Ranks on several nodes: they meet at a port of node 0, prove a secret, and end together."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import Store

from kvtide.cli.main import main
from kvtide.engine import RankTopology
from kvtide.server.ranks import rank_group
from kvtide.server.ranks.network_interfaces import interface_of, local_address
from kvtide.server.ranks.rank_nodes import (
    LOOPBACK,
    SECRET_VARIABLE,
    RankNodes,
    difference,
    parse_place,
    shared_settings,
)
from kvtide.server.setting_values import SettingsError
from kvtide.server.settings import Settings
from tests.processes import free_port
from tests.server.namespaces import NodeChild, two_namespaces
from tests.server.serving import Child, ForkedChild
from tests.server.test_ranks import FLAGS, PROMPTS, ask, expected, texts_of

__all__ = ["expected"]

SECRET, OTHER_SECRET = {SECRET_VARIABLE: "of both nodes, long"}, {SECRET_VARIABLE: "a" * 16}
SILENCE_S = 3
WITHIN_S = 60.0


def flags(node: int, place: str, *shape: str) -> tuple[str, ...]:
    timeout = ("--rank-timeout-seconds", str(SILENCE_S))
    where = ("--nodes", "2", "--node", str(node), "--rendezvous", place)
    return (*FLAGS, *(shape or ("--tp", "2")), "--storage", "none", *timeout, *where)


def until(wanted: Callable[[], object], child: Child) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not wanted():
        assert time.monotonic() < deadline, child.printed
        time.sleep(0.01)


# -- two machines --------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.quick(shape=[("--tp", "2")])
@pytest.mark.parametrize("shape", [("--tp", "2"), ("--pp", "2")], ids=["tp", "pp"])
def test_ranks_of_two_machines_answer_as_one(
    shape: tuple[str, ...], model_folder: Path, expected: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("of both nodes, long\n")
    secret = ("--rank-secret-file", str(tmp_path / "secret"))
    with two_namespaces() as (first, second):
        place = f"{first.address}:29500"
        words = [(str(model_folder), *flags(node, place, *shape), *secret) for node in (0, 1)]
        with (
            NodeChild(words[0], namespace=first) as leader,
            NodeChild(words[1], namespace=second) as node,
        ):
            client = leader.client()
            for prompt, wanted in zip(PROMPTS, expected[: len(PROMPTS)], strict=True):
                assert texts_of(first.inside(lambda prompt=prompt: ask(client, prompt))) == wanted
            leader.terminate()
            assert leader.exit_code() == 0, leader.printed
            assert node.exit_code() == 0, node.printed
        assert (
            "of each of 2 ranks" in leader.printed
            and "Traceback" not in leader.printed + node.printed
        )


@pytest.mark.full
def test_a_cable_that_is_pulled_ends_both_nodes(model_folder: Path) -> None:
    with two_namespaces() as (first, second):
        place = f"{first.address}:29500"
        words = [(str(model_folder), *flags(node, place)) for node in (0, 1)]
        with (
            NodeChild(words[0], SECRET, namespace=first) as leader,
            NodeChild(words[1], SECRET, namespace=second) as node,
        ):
            leader.client()
            second.pull_the_cable()
            assert leader.exit_code() == 1, leader.printed
            assert node.exit_code() == 1, node.printed
        silence = f"no sign of life for {SILENCE_S} s"
        assert f"rank 1: {silence}; all ranks end with it" in leader.printed
        assert f"rank 1 ended with 3: the leader: {silence}" in node.printed


# -- two nodes of one machine --------------------------------------------------------------------


@pytest.mark.full
def test_only_a_node_that_knows_the_secret_and_the_settings_is_taken(
    model_folder: Path, expected: list[list[str]]
) -> None:
    place = f"{LOOPBACK}:{free_port()}"
    mine, others = ((str(model_folder), *flags(node, place)) for node in (0, 1))
    with ForkedChild(mine, SECRET) as leader:
        until(lambda: f"waiting for rank 1 at {place}" in leader.printed, leader)
        with ForkedChild(others, OTHER_SECRET) as stranger:
            assert stranger.exit_code() == 1
            assert "the secrets differ; start both ends with the same one" in stranger.printed
        with ForkedChild((*others, "--page-tokens", "32"), SECRET) as another:
            assert another.exit_code() == 1
            wanted = "--page-tokens is 32 there and 16 here; start all nodes with the same settings"
            assert wanted in another.printed
        assert leader.process.poll() is None, leader.printed
        with ForkedChild(others, SECRET) as node:
            client = leader.client()
            assert texts_of(ask(client, PROMPTS[0])) == expected[0]
            # A signal to any node drains all.
            node.terminate()
            assert leader.exit_code() == 0, leader.printed
            assert node.exit_code() == 0, node.printed


def kill_the_node(leader: Child, node: Child) -> tuple[str, str]:
    node.process.kill()
    return r"rank 1: .*; all ranks end with it", ""


def kill_the_leader(leader: Child, node: Child) -> tuple[str, str]:
    leader.process.kill()
    return "", r"kvtide serve: rank 1 ended with 3: the leader: "


def stop_the_leader(leader: Child, node: Child) -> tuple[str, str]:
    leader.process.send_signal(signal.SIGSTOP)
    silence = rf"the leader: no sign of life for {SILENCE_S} s"
    return "", rf"kvtide serve: rank 1 ended with 3: {silence}"


@pytest.mark.full
@pytest.mark.parametrize("end", [kill_the_node, kill_the_leader, stop_the_leader])
def test_nodes_end_together(
    end: Callable[[Child, Child], tuple[str, str]], model_folder: Path
) -> None:
    place = f"{LOOPBACK}:{free_port()}"
    mine, others = ((str(model_folder), *flags(node, place)) for node in (0, 1))
    with ForkedChild(others) as node, ForkedChild(mine) as leader:  # The node waits for the leader.
        leader.client()
        for child, wanted in zip((leader, node), end(leader, node), strict=True):
            if wanted:
                assert child.exit_code() == 1, child.printed
                assert re.search(wanted, child.printed), child.printed


@pytest.mark.full
def test_nodes_with_other_weights_are_refused(model_folder: Path, tmp_path: Path) -> None:
    from tests.server.serving import save_model, save_tokenizer

    other = save_tokenizer(save_model(tmp_path / "other", rope_theta=12345.0))
    place = f"{LOOPBACK}:{free_port()}"
    with (
        ForkedChild((str(model_folder), *flags(0, place))) as leader,
        ForkedChild((str(other), *flags(1, place))) as node,
    ):
        assert leader.exit_code() != 0 and node.exit_code() != 0
        wanted = "the nodes have different weights, dtypes or versions of torch"
        assert wanted in leader.printed and wanted in node.printed


# -- settings ------------------------------------------------------------------------------------


NODES = Settings(tp=2, pp=2, nodes=2, rendezvous="10.0.0.1:29500")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rendezvous": None}, "2 nodes meet somewhere; give all of them --rendezvous HOST:PORT"),
        ({"nodes": 1}, "--rendezvous is where several nodes meet; give --nodes, or drop it"),
        ({"node": 2}, "--node 2 is none of 2 nodes; use 0 to 1"),
        ({"nodes": 3}, "4 ranks do not divide over 3 nodes"),
        ({"rendezvous": "10.0.0.1"}, "--rendezvous is '10.0.0.1'; use HOST:PORT"),
        ({"rendezvous": ":29500"}, "use HOST:PORT"),
        ({"rendezvous": "10.0.0.1:0"}, "use HOST:PORT"),
        ({"rendezvous": "0.0.0.0:29500"}, "names no machine; use the address by which the other"),
        ({"rendezvous": "[::]:29500"}, "names no machine"),
        ({"rank_secret_file": "/nowhere/x"}, "--rank-secret-file /nowhere/x: No such file"),
        ({"role": "prefill"}, "--handoff-host 127.0.0.1 is reached from its own node alone"),
        ({}, "leave this machine, and there is no secret; give all nodes the same --rank-secret"),
        ({"rendezvous": "somewhere.example:29500"}, "there is no secret"),
    ],
)
def test_nodes_that_cannot_meet_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(says)):
        RankNodes.of(replace(NODES, **changes), {})


def test_ranks_of_a_machine_take_its_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("join_ranks", "_choose_interface"):
        monkeypatch.setattr(rank_group, name, lambda *_: None)
    monkeypatch.setattr(RankTopology, "joined", lambda *_: RankTopology())
    settings = Settings(tp=2, pp=2, device="cuda")
    joined = [rank_group.join_group(rank, settings, Store(), "", 0)[0] for rank in range(4)]
    assert [each.device for each in joined] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert chosen == [0, 1, 0, 1]


def test_secrets_come_from_a_file_or_the_environment_and_are_long(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("sixteen bytes, or more\n")
    in_file = replace(NODES, rank_secret_file=str(file))
    assert RankNodes.of(in_file, {}).place.secret == b"sixteen bytes, or more"
    assert RankNodes.of(NODES, SECRET).place.secret == b"of both nodes, long"
    with pytest.raises(SettingsError, match="are both given; keep one of them"):
        RankNodes.of(in_file, SECRET)
    with pytest.raises(SettingsError, match="has 5 bytes, which can be guessed; use at least 16"):
        RankNodes.of(NODES, {SECRET_VARIABLE: "short"})


def test_a_node_has_its_own_part_of_the_ranks() -> None:
    for node in (0, 1):
        found = RankNodes.of(replace(NODES, node=node), SECRET)
        assert found.ranks == range(2 * node, 2 * node + 2) and found.node == node
        assert (found.place.host, found.place.port) == ("10.0.0.1", 29500)
    alone = RankNodes.of(Settings(tp=2), {})
    assert alone.ranks == range(2) and alone.place.host == LOOPBACK and not alone.place.port
    assert alone.place.secret != RankNodes.of(Settings(tp=2), {}).place.secret


def test_settings_of_a_node_that_need_not_agree_are_not_sent() -> None:
    ours = shared_settings(replace(NODES, api_key="k", storage="redis://:password@host"))
    assert not ours.keys() & {"api_key", "admin_key", "storage", "model", "node"}
    assert difference(ours, shared_settings(replace(NODES, node=1, model="/elsewhere"))) is None
    sentence = difference(ours, shared_settings(replace(NODES, tp=1, nodes=1)))
    assert sentence is not None and sentence.startswith("--tp is 1 there and 2 here;")


def test_an_address_has_an_interface() -> None:
    assert local_address(LOOPBACK, 1) == LOOPBACK
    assert interface_of(LOOPBACK) == interface_of("127.3.2.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert parse_place("[fe80::1]:29500") == ("fe80::1", 29500)


def test_a_rendezvous_that_is_taken_is_refused(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import socket

    with socket.create_server((LOOPBACK, 0)) as taken:
        place = f"{LOOPBACK}:{taken.getsockname()[1]}"
        assert main(["serve", str(model_folder), *flags(0, place)]) == 2
    assert f"ranks cannot meet at {place}" in capsys.readouterr().err
