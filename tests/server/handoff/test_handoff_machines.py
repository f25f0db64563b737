"""Handoffs between two machines: network namespaces with a cable between them.

A machine reaches the other one by its address alone, so every server has to name its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtide.transfer.peer.transport_registry import TRANSPORTS
from tests.server.handoff.server_pairs import (
    COMMON,
    PATIENCE_S,
    Json,
    answer,
    ask,
    assert_close,
    handoff_of,
)
from tests.server.handoff.test_prefill_and_decode import PROMPT
from tests.server.namespaces import Namespace, NodeChild, two_namespaces
from tests.server.serving import PAGE, Child, ForkedChild
from tests.server.talking import Client
from tests.transfer.peer.libraries import needs

GUIDE = Path(__file__).parents[3] / "docs/HANDOFF.md"
SECRETS = {
    "KVTIDE_RANK_SECRET": "of both nodes, long enough",
    "KVTIDE_HANDOFF_SECRET": "of both sides, long enough",
    "KVTIDE_ADMIN_KEY": "of the tests, and long enough too",
}
FEW = ("--handoff-min-tokens", "16")
PROMPTS = (PROMPT[: 3 * PAGE + 5], PROMPT[: 13 * PAGE], PROMPT[::-1])
OVER_A_NETWORK = [name for name in TRANSPORTS if name != "shm"]


@pytest.fixture
def machines() -> Iterator[tuple[Namespace, Namespace]]:
    with two_namespaces() as pair:
        yield pair


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> list[Json]:
    """The answers of one server."""
    with ForkedChild((str(model_folder), *COMMON, "--port", "0")) as alone:
        return [ask(alone.client(), prompt) for prompt in PROMPTS]


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Start a server on a machine, with the secrets in its environment or without."""
    with ExitStack() as started:

        def one(machine: Namespace, *words: str, secrets: bool = False) -> Child:
            environment = SECRETS if secrets else {"KVTIDE_ADMIN_KEY": SECRETS["KVTIDE_ADMIN_KEY"]}
            child = NodeChild(words, environment, "", PATIENCE_S, namespace=machine)
            return started.enter_context(child)

        yield one


def asked(machine: Namespace, client: Client) -> list[Json]:
    """The answers to all prompts, asked on the server's machine; all are handed over."""
    found = machine.inside(lambda: [ask(client, prompt) for prompt in PROMPTS])
    for each in found:
        assert handoff_of(each).get("state") == "decoding", handoff_of(each)
    return found


def documented(role: str) -> list[str]:
    """The words of the guide's command for a role on one of two machines."""
    section = GUIDE.read_text().partition("On two machines")[2].replace("\\\n", " ")
    found = re.search(rf"^ +kvtide serve MODEL (.*--role {role} .*)$", section, re.M)
    assert found is not None
    return shlex.split(found[1])


@pytest.mark.full
@pytest.mark.parametrize("transport", OVER_A_NETWORK)
def test_the_commands_of_the_guide_hand_prompts_over(
    transport: str,
    machines: tuple[Namespace, Namespace],
    start: Callable[..., Child],
    model_folder: Path,
    expected: list[Json],
    tmp_path: Path,
) -> None:
    """As they are written, but for what is named differently here."""
    needs(transport)
    secret = tmp_path / "handoff.secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    names = {"handoff.secret": str(secret), "mooncake": transport}
    addresses = {"10.0.0.1": machines[0].address, "10.0.0.2": machines[1].address}

    def words(role: str) -> list[str]:
        given = [names.get(word, word) for word in documented(role)]
        for theirs, ours in addresses.items():
            given = [word.replace(theirs, ours) for word in given]
        return [str(model_folder), *COMMON, *given]

    prefill = start(machines[0], *words("prefill"))
    decode = start(machines[1], *words("decode"), *FEW)
    machines[0].inside(prefill.client)
    found = asked(machines[1], decode.client())
    assert [answer(each) for each in found] == [answer(each) for each in expected]
    assert "Traceback" not in prefill.printed + decode.printed


def node(number: int, machines: tuple[Namespace, Namespace], *shape: str) -> tuple[str, ...]:
    place = ("--rendezvous", f"{machines[0].address}:29500")
    return ("--nodes", "2", "--node", str(number), *place, *shape)


@pytest.mark.full
@pytest.mark.parametrize(
    ("divided", "shape"),
    [("prefill", ("--tp", "2")), ("decode", ("--pp", "2"))],
    ids=["prefill-tp", "decode-pp"],
)
def test_ranks_of_one_server_may_be_on_two_machines(
    divided: str,
    shape: tuple[str, ...],
    machines: tuple[Namespace, Namespace],
    start: Callable[..., Child],
    model_folder: Path,
    expected: list[Json],
) -> None:
    """Each names the address of its own machine, and meets the leader at that one's."""

    def words(role: str, machine: int) -> list[str]:
        at = ("--handoff-host", machines[machine].address, "--handoff-transport", "mooncake")
        peers = ("--prefill-from", f"http://{machines[0].address}:8001", *FEW)
        ports = (
            "--address",
            machines[0].address,
            "--port",
            "8001" if role == "prefill" else "8000",
        )
        both = (*ports, *(peers if role == "decode" else ()))
        return [str(model_folder), *COMMON, "--role", role, *at, *both]

    needs("mooncake")
    other = "decode" if divided == "prefill" else "prefill"
    servers = {
        divided: start(machines[0], *words(divided, 0), *node(0, machines, *shape), secrets=True),
        other: start(machines[0], *words(other, 0), secrets=True),
    }
    start(machines[1], *words(divided, 1), *node(1, machines, *shape), secrets=True)
    clients = {
        role: Client(machines[0].address, server.client().port, SECRETS["KVTIDE_ADMIN_KEY"])
        for role, server in servers.items()
    }
    for ours, theirs in zip(asked(machines[0], clients["decode"]), expected, strict=True):
        assert_close(ours, theirs)
    for client in clients.values():
        report = machines[0].inside(lambda client=client: client.get("/admin/cache").json())
        assert report["violations"] == []
