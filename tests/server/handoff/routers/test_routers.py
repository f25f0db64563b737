"""Routers in front of a prefill and a decode server.

The quick run replays the bodies that real routers sent. Under `--all` the routers are installed and
started, and what they send is compared with the record.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.server.handoff.routers.real_routers import KINDS, MAX_S, Router, RouterKind, install
from tests.server.handoff.routers.recording import recording
from tests.server.handoff.routers.requests import (
    CASES,
    SIDES,
    Answer,
    Case,
    Replay,
    answer_of,
    ask,
    filled,
    recorded,
    rooms,
    start,
)
from tests.server.handoff.routers.routed_pair import NAMED, RoutedPair
from tests.server.handoff.server_pairs import ServerProcess
from tests.server.serving import InProcess
from tests.server.talking import Client, Json

BY_NAME = {case.name: case for case in CASES}
BOOTSTRAP = [kind for kind in KINDS if kind.bootstrap]
FIRST_TURNS = [BY_NAME[name] for name in ("chat", "completion-streamed")]

numbers = itertools.count(1)

routers = pytest.mark.parametrize("kind", KINDS, ids=str)
cases = pytest.mark.parametrize("case", CASES, ids=str)


def new_prompts() -> dict[str, str]:
    """Texts of some 20 pages that no server has seen, nor the beginning of them."""
    texts = (f"{next(numbers)} says: " + "the cat sat on the mat. " * 25 for _ in (1, 2))
    return {f"PROMPT {number}": text for number, text in enumerate(texts, 1)}


@pytest.fixture(scope="module")
def alone(model_folder: Path) -> Iterator[Client]:
    """One server by itself."""
    with closing(ServerProcess((str(model_folder), *NAMED), {})) as server:
        yield server.client


@pytest.fixture(scope="module")
def _pair(model_folder: Path) -> Iterator[RoutedPair]:
    with RoutedPair(model_folder) as opened:
        yield opened


@pytest.fixture
def pair(_pair: RoutedPair) -> Iterator[RoutedPair]:
    """After every test nothing may be going on in either server, and nothing may be missing."""
    yield _pair
    _pair.settled()


@pytest.fixture(scope="session")
def installed() -> Path:
    return install()


def new_states(pair: RoutedPair, ask_one: Callable[[], Answer]) -> tuple[Answer, Counter[str]]:
    """An answer, and how the handoffs of its request ended."""
    before = pair.ended()
    found = ask_one()
    pair.settled()
    return found, pair.ended() - before


def replay_of(kind: RouterKind, pair: RoutedPair) -> Replay:
    return Replay(kind, pair.prefill.client, pair.decode.client, pair.handoff_port)


# -- replays --------------------------------------------------------------------------------------


@pytest.mark.quick
@routers
@cases
def test_recorded_requests_give_the_answer_of_one_server(
    pair: RoutedPair, alone: Client, kind: RouterKind, case: Case
) -> None:
    prompts = new_prompts()
    replay = replay_of(kind, pair)
    found, states = new_states(pair, lambda: replay.ask(case, prompts))
    assert found == ask(alone, case, prompts)
    assert states == case.states(kind)


@pytest.mark.parametrize("kind", BOOTSTRAP, ids=str)
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_room_is_met_whichever_side_is_asked_first(
    pair: RoutedPair, alone: Client, kind: RouterKind, first: str
) -> None:
    case, prompts = BY_NAME["chat"], new_prompts()
    values = {**prompts, **rooms()}
    replay = replay_of(kind, pair)

    def one_after_the_other() -> Answer:
        sent = {first: replay.start(first, case, values)}
        if first == "prefill":
            assert answer_of(sent["prefill"], case).status == 200, "it waits for no other server"
            sent["decode"] = replay.start("decode", case, values)
        else:
            pair.decode.until_state("reserved")
            sent["prefill"] = replay.start("prefill", case, values)
            assert answer_of(sent["prefill"], case).status == 200
        return answer_of(sent["decode"], case)

    found, states = new_states(pair, one_after_the_other)
    assert found == ask(alone, case, prompts)
    assert states == {"decoding": 1}


MESSAGES = {"messages": [{"role": "user", "content": "PROMPT"}], "max_tokens": 6}
RESPONSES = {"input": "PROMPT", "max_output_tokens": 6, "store": False}


@pytest.mark.parametrize("convention", ["bootstrap", "kv_transfer_params"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", MESSAGES), ("/v1/responses", RESPONSES)],
    ids=["messages", "responses"],
)
def test_the_other_routes_take_the_same_fields(
    pair: RoutedPair, alone: Client, path: str, body: Json, convention: str
) -> None:
    prompt = new_prompts()["PROMPT 1"]
    asked = json.loads(json.dumps(body | {"temperature": 0}).replace("PROMPT", prompt))

    def by_both() -> Json:
        if convention == "bootstrap":
            place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.handoff_port}
            fields = {**asked, **place, "bootstrap_room": secrets.randbits(62)}
            assert pair.prefill.client.post(path, fields).status == 200
            return pair.decode.client.post(path, fields).json()
        remote = {"do_remote_decode": True, "do_remote_prefill": False}
        first = pair.prefill.client.post(path, {**asked, "kv_transfer_params": remote})
        given = first.json()["kv_transfer_params"]
        return pair.decode.client.post(path, {**asked, "kv_transfer_params": given}).json()

    before = pair.ended()
    found, wanted = by_both(), alone.post(path, asked).json()
    pair.settled()
    field = "content" if path == "/v1/messages" else "output"
    assert texts(found[field]) == texts(wanted[field]) != []
    assert pair.ended() - before == {"decoding": 1}


def texts(value: Json) -> list[str]:
    """All texts of an answer, however deep."""
    if isinstance(value, dict):
        inner = [value["text"]] if isinstance(value.get("text"), str) else []
        return inner + [text for each in value.values() for text in texts(each)]
    return [text for each in value for text in texts(each)] if isinstance(value, list) else []


@pytest.mark.parametrize("kind", BOOTSTRAP, ids=str)
def test_a_try_that_the_router_gives_up_leaves_nothing_behind(
    pair: RoutedPair, alone: Client, kind: RouterKind
) -> None:
    """The prefill side was not reached: the router hangs up, and tries again with a new room."""
    case, prompts = BY_NAME["completion"], new_prompts()
    replay = replay_of(kind, pair)
    before = pair.ended()
    for _ in range(3):
        given_up = replay.start("decode", case, {**prompts, **rooms()})
        pair.decode.until_state("reserved")
        given_up.leave()
        pair.settled()
    assert pair.ended() - before == {"aborted": 3}
    found, states = new_states(pair, lambda: replay.ask(case, prompts))
    assert found == ask(alone, case, prompts)
    assert states == {"decoding": 1}


@pytest.mark.full
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]], ids=str)
def test_a_room_that_no_decode_server_asks_for_is_closed_in_time(
    serve: Callable[..., InProcess], kind: RouterKind
) -> None:
    """The client has left meanwhile, or the decode side is down."""
    server = serve(role="prefill", name="tiny", handoff_timeout_seconds=1)
    case = BY_NAME["completion"]
    body = filled(
        recorded(kind, case, "prefill"), {"PORT": 9000, "PROMPT 1": "a prompt", **rooms()}
    )
    assert answer_of(start(server.client, case.path, body), case).status == 200
    assert server.client.get("/admin/cache").json()["handoff"]["outgoing"] == 1
    server.until(lambda report: report["handoff"]["outgoing"] == 0)
    server.settled()


# -- real routers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS, ids=str)
def divided(
    request: pytest.FixtureRequest,
    installed: Path,
    _pair: RoutedPair,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RouterKind, Client]]:
    """A router in front of the pair."""
    kind, logs = request.param, tmp_path_factory.mktemp("routers")
    with Router.divided(installed, kind, logs, *_pair.urls) as router:
        yield kind, router.client()


@pytest.mark.full
@cases
def test_a_router_gives_the_answer_of_one_server(
    divided: tuple[RouterKind, Client], pair: RoutedPair, alone: Client, case: Case
) -> None:
    (kind, client), prompts = divided, new_prompts()
    found, states = new_states(pair, lambda: ask(client, case, prompts))
    assert found == ask(alone, case, prompts)
    assert states == case.states(kind)
    assert "channel refused" not in pair.prefill.child.printed, (
        "smg checks whether the port is open"
    )


@pytest.mark.full
@routers
def test_routers_send_what_is_recorded(
    installed: Path, pair: RoutedPair, kind: RouterKind, tmp_path: Path
) -> None:
    with recording(installed, kind, tmp_path, pair) as record:
        for case in CASES:
            assert record(case) == {side: recorded(kind, case, side) for side in SIDES}, case


@pytest.mark.full
@routers
def test_plain_servers_take_turns_behind_a_router(
    installed: Path, model_folder: Path, alone: Client, kind: RouterKind, tmp_path: Path
) -> None:
    words = (str(model_folder), *NAMED)
    with closing(ServerProcess(words, {})) as one, closing(ServerProcess(words, {})) as other:
        both = (one, other)
        assert [server.client.get("/health").status for server in both] == [200, 200]
        with Router.plain(installed, kind, tmp_path, [one.url, other.url]) as router:
            client = router.client()
            assert [through(client, alone, case) for case in FIRST_TURNS * 2] == [200] * 4
        prompts = [server.settled()["tokens"]["prompt"] for server in both]
        assert all(prompts), "the router has asked both"


@pytest.mark.full
@routers
def test_decode_servers_that_ask_by_themselves_are_plain_servers_to_a_router(
    installed: Path, model_folder: Path, alone: Client, kind: RouterKind, tmp_path: Path
) -> None:
    """And answer without their prefill server."""
    with RoutedPair(model_folder) as pair:
        decode = pair.add_decode()
        with Router.plain(installed, kind, tmp_path, [decode.url]) as router:
            client = router.client()
            for _ in range(2):
                assert [through(client, alone, case) for case in FIRST_TURNS] == [200, 200]
                ended = decode.settled()["handoff"]["incoming_ended"]
                assert ended["decoding"] == len(FIRST_TURNS)
                pair.prefill.kill()


@pytest.mark.full
@routers
def test_a_prefill_server_that_dies_costs_no_more_than_a_clear_error(
    installed: Path, model_folder: Path, alone: Client, kind: RouterKind, tmp_path: Path
) -> None:
    """It dies with a request in it, is away, and comes back: then handoffs go on."""
    chat = BY_NAME["chat"]
    with (
        RoutedPair(model_folder) as pair,
        Router.divided(installed, kind, tmp_path, *pair.urls) as router,
    ):
        client = router.client()
        assert through(client, alone, chat) == 200
        pair.settled()
        pair.prefill.freeze()
        prompts = new_prompts()
        waiting = start(client, chat.path, filled(chat.body, prompts))
        if kind.bootstrap:
            pair.decode.until(lambda report: report["handoff"]["incoming"])
        pair.prefill.kill()
        check(answer_of(waiting, chat), ask(alone, chat, prompts))
        for case in FIRST_TURNS:
            through(client, alone, case)
        pair.decode.settled()
        prompts = new_prompts()
        assert ask(pair.decode.client, chat, prompts) == ask(alone, chat, prompts)
        pair.restart_prefill()
        deadline, before = time.monotonic() + 2 * MAX_S, pair.ended()["decoding"]
        while pair.ended()["decoding"] == before:
            through(client, alone, chat)
            assert time.monotonic() < deadline, router.printed
            time.sleep(0.1)
        pair.settled()


@pytest.mark.full
@routers
def test_another_prefill_server_takes_over_where_the_router_tries_again(
    installed: Path, model_folder: Path, alone: Client, kind: RouterKind, tmp_path: Path
) -> None:
    with RoutedPair(model_folder) as pair:
        prefill, decode = pair.urls
        prefill.append(pair.add_prefill())
        with Router.divided(installed, kind, tmp_path, prefill, decode) as router:
            client = router.client()
            assert [through(client, alone, case) for case in FIRST_TURNS] == [200, 200]
            pair.settled()
            pair.prefill.kill()
            statuses = [through(client, alone, case) for case in FIRST_TURNS * 2]
        # vllm-router tries once.
        assert statuses == [200] * 4 if kind.bootstrap else 200 in statuses, statuses
        pair.decode.settled()


def through(client: Client, alone: Client, case: Case) -> int:
    """Ask a router something new, whatever state its servers are in; the status of its answer."""
    prompts = new_prompts()
    found = ask(client, case, prompts)
    check(found, ask(alone, case, prompts))
    return found.status


def check(found: Answer, expected: Answer) -> None:
    """The client has the answer, or the router's error, which names the server or its role."""
    if found.status == 200:
        assert found == expected
    else:
        assert found.status in (500, 502, 503), found
        assert "prefill" in found.whole.lower() or "http://127.0.0.1:" in found.whole, found
