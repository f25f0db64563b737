"""What routers ask of a worker, and what they say of a request's handoff."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvtide import __version__
from kvtide.engine import RequestError
from kvtide.engine.handoff.handoff_source import HandoffSource, HandoffTarget
from kvtide.server.handoff.conventions import RouterConventions
from kvtide.server.handoff.handoff_fields import (
    Convention,
    HandoffAddress,
    HandoffFields,
    HandoffSide,
)
from kvtide.server.handoff.handoff_settings import HandoffSettings, Role
from kvtide.server.request_parsing import RequestFields, RequestParser
from tests.server.serving import PAGE, POSITIONS, InProcess
from tests.server.talking import Client, Json

HERE = HandoffAddress("127.0.0.1", 9000)
PREFILL = RouterConventions(HandoffSettings(role=Role.PREFILL), HERE)
DECODE = RouterConventions(HandoffSettings(role=Role.DECODE))
PLAIN = RouterConventions(HandoffSettings())
BOTH = RouterConventions(HandoffSettings(port=9000, prefill_from=("http://[::1]:1",)), HERE)
FIRST_ASKED: Json = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""As vllm-router sends it to the prefill side."""


def bootstrap(room: object = 7627304970034759073, port: object = 9000, **changed: Any) -> Json:
    """As smg and sglang-router send it to both sides."""
    fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
    return {**fields, **changed}


def transfer(**changed: Any) -> Json:
    """As vllm-router hands it to the decode side."""
    fields = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": "127.0.0.1",
        "remote_port": 9000,
        "remote_rooms": ["a"],
    }
    return {"kv_transfer_params": {**fields, **changed}}


# -- routes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_the_server_describes_itself(client: Client, path: str) -> None:
    found = client.get(path).json()
    assert found == {
        "served_model_name": "tiny-0.1",
        "model_type": "llama",
        "is_generation": True,
        "max_model_len": POSITIONS,
        "version": __version__,
        "role": "both",
        "disaggregation_mode": "null",
        "handoff": None,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "page_size": PAGE,
        "max_total_num_tokens": 16_384,
        "max_running_requests": 64,
    }


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_the_model_is_named_without_its_path(client: Client, path: str) -> None:
    found = client.get(path).json()
    assert found["served_model_name"] == "tiny-0.1" and found["is_generation"] is True
    assert "model_path" not in found and "tokenizer_path" not in found


def test_there_is_no_version_route(client: Client) -> None:
    """smg would take the server for vLLM's, and name no rooms."""
    assert client.get("/version").status == 404


def test_a_probe_for_grpc_gets_400_and_leaves_no_traceback(
    server: InProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """sglang-router begins with it: a preface of HTTP/2, and frames."""
    with socket.create_connection((server.address, server.port), timeout=60) as probe:
        probe.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        assert probe.recv(1024).split()[1] == b"400"
    assert server.client.get("/health").status == 200
    assert caplog.records == []


def test_roles_and_handoff_addresses_are_answered(serve: Callable[..., InProcess]) -> None:
    found = serve(role="prefill").client.get("/server_info").json()
    port = found["handoff"]["port"]
    assert (found["role"], found["disaggregation_mode"]) == ("prefill", "prefill")
    assert found["handoff"] == {
        "hands_over": True,
        "receives": False,
        "host": "127.0.0.1",
        "port": port,
        "transport": "shm",
    }
    socket.create_connection(("127.0.0.1", port), timeout=60).close()
    decode = serve(role="decode").client.get("/server_info").json()
    assert (decode["disaggregation_mode"], decode["handoff"]["receives"]) == ("decode", True)
    assert decode["handoff"]["port"] is None


def test_these_routes_need_no_key_but_those_below_v1(serve: Callable[..., InProcess]) -> None:
    server = serve(api_key="k")
    stranger = Client(server.address, server.port)
    paths = ("/server_info", "/model_info", "/loads?model=tiny-0.1", "/get_load")
    assert [stranger.get(path).status for path in paths] == [200] * 4
    assert stranger.get("/v1/loads").status == 401
    assert server.client.get("/v1/loads?include=core,disagg,queues,memory").status == 200


def test_loads_count_requests_and_their_tokens(serve: Callable[..., InProcess]) -> None:
    server = serve(max_running=2)
    idle = server.client.get("/loads").json()["loads"][0]
    assert (idle["num_total_reqs"], idle["num_used_tokens"], idle["token_usage"]) == (0, 0, 0.0)
    prompts = [[n] * 40 for n in range(5, 8)]
    body = {"max_tokens": 2000, "ignore_eos": True, "stream": True}
    opened = [server.client.start("/v1/completions", prompt=each, **body) for each in prompts]
    server.until(
        lambda report: report["requests"]["running"] == 2 and report["requests"]["waiting"] == 1
    )
    found = server.client.get("/loads").json()
    (load,) = found["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (2, 1)
    assert load["num_total_reqs"] == found["aggregate"]["total_reqs"] == 3
    assert load["num_waiting_uncached_tokens"] == 40
    assert 80 <= load["num_used_tokens"] <= load["max_total_num_tokens"] == 16_384
    assert load["utilization"] == 1.0 and 0 < load["token_usage"] <= 1
    (short,) = server.client.get("/get_load").json()
    assert (short["num_reqs"], short["num_waiting_reqs"]) == (3, 1)
    assert short["num_tokens"] >= 120, "as sglang-router adds them up"
    for request in opened:
        request.leave()
    server.settled()


def test_the_hit_rate_is_that_of_all_prompts(serve: Callable[..., InProcess]) -> None:
    server = serve()
    for _ in range(2):
        server.client.complete([9] * (4 * PAGE + 1), max_tokens=1)
    (load,) = server.client.get("/v1/loads").json()["loads"]
    assert load["cache_hit_rate"] == pytest.approx(4 * PAGE / (2 * (4 * PAGE + 1)), abs=1e-3)


# -- bootstrap fields -----------------------------------------------------------------------------


def read(conventions: RouterConventions, body: Json, prompts: int = 1, n: int = 1) -> list[Any]:
    return list(conventions.read(RequestFields(body), prompts, n))


@pytest.mark.parametrize(
    ("conventions", "side"), [(PREFILL, HandoffSide.PREFILL), (DECODE, HandoffSide.DECODE)]
)
def test_both_sides_read_the_same_room(conventions: RouterConventions, side: HandoffSide) -> None:
    room = "7627304970034759073"
    expected = HandoffFields(side, HERE, room, Convention.BOOTSTRAP)
    assert read(conventions, bootstrap()) == [expected]
    assert read(conventions, bootstrap("seven")) == [replace(expected, room="seven")]


@pytest.mark.parametrize("conventions", [PREFILL, DECODE])
def test_every_prompt_or_every_choice_has_a_room(conventions: RouterConventions) -> None:
    """As the routers send them: two prompts; one with two choices; two with two choices each."""
    two = bootstrap([1, 2], [9000, 9000], bootstrap_host=["127.0.0.1", "127.0.0.1"])
    assert [each.room for each in read(conventions, two, prompts=2)] == ["1", "2"]
    assert [each.room for each in read(conventions, two, n=2)] == ["1", "2"]
    both = read(conventions, two, prompts=2, n=2)
    assert [each and each.room for each in both] == ["1", None, "2", None]
    with pytest.raises(RequestError, match="2 values for 3 prompts with 1 choices each"):
        read(conventions, two, prompts=3)


def test_requests_without_fields_have_no_handoff() -> None:
    nothing = [{}, bootstrap(None, None, bootstrap_host=None), {"kv_transfer_params": None}]
    nothing += [{"kv_transfer_params": {}}, {"kv_transfer_params": {"do_remote_decode": False}}]
    for conventions in (PREFILL, DECODE, PLAIN):
        for body in nothing:
            assert read(conventions, body, 2, 2) == [None] * 4


# -- kv_transfer_params ---------------------------------------------------------------------------


def test_the_prefill_side_opens_rooms_that_the_decode_side_reads() -> None:
    """vllm-router hands the answer on as it is."""
    first = read(PREFILL, {"kv_transfer_params": FIRST_ASKED}, prompts=2, n=2)
    assert [each is None for each in first] == [False, True, False, True]
    answer = PREFILL.answer(first)
    assert answer is not None and answer["do_remote_prefill"] is True
    second = read(DECODE, {"kv_transfer_params": answer}, prompts=2, n=2)
    for opened, asked in zip(first, second, strict=True):
        if opened is None:
            assert asked is None
        else:
            assert asked == replace(opened, side=HandoffSide.DECODE)
    rooms = {each.room for each in first if each is not None}
    assert len(rooms) == 2 and all(len(room) == 32 for room in rooms), "they cannot be guessed"


def test_only_a_prefill_server_that_was_asked_first_answers_with_rooms() -> None:
    assert PREFILL.answer(read(PREFILL, bootstrap())) is None
    assert DECODE.answer(read(DECODE, transfer())) is None
    assert PLAIN.answer(()) is None and PLAIN.answer([None]) is None


def test_a_server_of_both_roles_takes_either_side() -> None:
    assert read(BOTH, {"kv_transfer_params": FIRST_ASKED})[0].side is HandoffSide.PREFILL
    assert read(BOTH, transfer())[0].side is HandoffSide.DECODE


def test_bootstrap_fields_tell_a_server_of_both_roles_its_side() -> None:
    """It prefills where they name its own address, and decodes where they name another one."""
    guarded = replace(BOTH, guarded=True)
    for own in ("127.0.0.1", "localhost"):
        (found,) = read(guarded, bootstrap(bootstrap_host=own))
        assert (found.side, found.peer) == (HandoffSide.PREFILL, HERE)
    for other in (bootstrap(port=9001), bootstrap(bootstrap_host="10.0.0.9")):
        (found,) = read(guarded, other)
        peer = HandoffAddress(other["bootstrap_host"], other["bootstrap_port"])
        assert (found.side, found.peer) == (HandoffSide.DECODE, peer)
    (found,) = read(guarded, bootstrap(port=9001, bootstrap_host="box"))
    assert found.side is HandoffSide.DECODE
    hands_over = RouterConventions(HandoffSettings(port=9000), HERE)
    assert read(hands_over, bootstrap())[0].side is HandoffSide.PREFILL


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conventions", "body", "words"),
    [
        (PLAIN, bootstrap(), "bootstrap_room names pages of another server, and this one receives"),
        (BOTH, bootstrap(bootstrap_host="box"), "may be this server or another one; give the"),
        (PLAIN, {"kv_transfer_params": FIRST_ASKED}, "hands no pages over; start it with --role"),
        (PLAIN, transfer(), "this one receives none; start it with --role decode"),
        (PREFILL, transfer(), "this one receives none"),
        (DECODE, {"kv_transfer_params": FIRST_ASKED}, "has the role decode; send it to a prefill"),
        (DECODE, bootstrap() | transfer(), "bootstrap_host and kv_transfer_params name two"),
        (DECODE, {"bootstrap_room": 5}, "bootstrap_host is None; send the prefill server's"),
        (DECODE, bootstrap(port=None), "bootstrap_port is None; give the router the prefill"),
        (DECODE, bootstrap(port=0), "bootstrap_port is 0"),
        (DECODE, bootstrap(port=70000), "bootstrap_port is 70000"),
        (DECODE, bootstrap(port=True), "bootstrap_port is True"),
        (DECODE, bootstrap(None), "bootstrap_room is None; send a number, or a text"),
        (DECODE, bootstrap(""), "bootstrap_room is ''"),
        (DECODE, bootstrap("x" * 129), "bootstrap_room is 'xxx"),
        (DECODE, bootstrap({"a": 1}), "bootstrap_room is {'a': 1}"),
        (PREFILL, bootstrap(1.5), "bootstrap_room is 1.5"),
        (DECODE, bootstrap([1, 2, 3]), "bootstrap_room has 3 values for 1 prompts"),
        (DECODE, bootstrap(bootstrap_host="10.0.0.9"), "another machine, and this server has no"),
        (DECODE, transfer(remote_host="box"), "remote_host is 'box', which is another machine"),
        (DECODE, transfer(remote_port=None), "remote_port is None"),
        (DECODE, transfer(remote_rooms=[]), "remote_rooms has 0 values"),
        (DECODE, transfer(do_remote_prefill="yes"), "do_remote_prefill is 'yes'; send true or"),
        (DECODE, {"kv_transfer_params": [1]}, "kv_transfer_params is not a JSON object"),
        (
            PREFILL,
            {"kv_transfer_params": FIRST_ASKED, "stream": True},
            "come back in a whole response; send do_remote_decode without stream",
        ),
    ],
)
def test_fields_that_do_not_fit_are_refused(
    conventions: RouterConventions, body: Json, words: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read(conventions, body)
    assert words in str(refused.value) and len(str(refused.value)) < 250


def test_a_secret_allows_peers_on_other_machines() -> None:
    guarded = replace(DECODE, guarded=True)
    for body in (bootstrap(bootstrap_host="10.0.0.9"), transfer(remote_host="10.0.0.9")):
        assert read(guarded, body)[0].peer == HandoffAddress("10.0.0.9", 9000)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_server_answers_400_to_the_wrong_side(serve: Callable[..., InProcess], role: str) -> None:
    wrong = {"kv_transfer_params": FIRST_ASKED} if role != "prefill" else transfer()
    server = serve(role=role)
    for path, prompt in (
        ("/v1/completions", {"prompt": [5, 6]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        reply = server.client.post(path, {**prompt, **wrong})
        assert reply.status == 400 and reply.json()["error"]["param"] == "kv_transfer_params"
    server.settled()


# -- what the engine is given ---------------------------------------------------------------------


def parsed(server: InProcess, conventions: RouterConventions, body: Json) -> Any:
    parser = RequestParser(server.engine, "tiny-0.1", seeded=True, handoffs=conventions.read)
    return parser.completion(RequestFields({"prompt": [5, 6, 7], "max_tokens": 9, **body}))


def test_the_prefill_side_computes_one_token_for_its_room(server: InProcess) -> None:
    for body in (bootstrap(4), {"kv_transfer_params": FIRST_ASKED}):
        request = parsed(server, PREFILL, body)
        (choice,) = request.choices
        assert choice.params.handoff_to == HandoffTarget(request.handoffs[0].room)
        assert choice.params.max_tokens == 1 and choice.params.handoff_from is None


def test_choices_without_a_room_are_prefilled_alike(server: InProcess) -> None:
    body = {"prompt": [[5], [6]], "n": 2, **bootstrap([1, 2], [9, 9], bootstrap_host=["a", "b"])}
    choices = parsed(server, PREFILL, body).choices
    assert [choice.params.max_tokens for choice in choices] == [1] * 4
    targets = [choice.params.handoff_to for choice in choices]
    assert targets == [HandoffTarget("1"), None, HandoffTarget("2"), None]


def test_the_decode_side_meets_the_peer_that_the_router_names(server: InProcess) -> None:
    for body in (bootstrap("a", bootstrap_host="::1"), transfer(remote_host="::1")):
        (choice,) = parsed(server, DECODE, body).choices
        assert choice.params.handoff_from == HandoffSource("[::1]:9000", "a", asks=False)
        assert choice.params.max_tokens == 9 and choice.params.handoff_to is None


def test_requests_without_fields_are_as_ever(server: InProcess) -> None:
    for conventions in (PREFILL, DECODE, PLAIN):
        request = parsed(server, conventions, {"n": 2})
        assert [choice.params.max_tokens for choice in request.choices] == [9, 9]
        assert all(choice.params.handoff_to is None for choice in request.choices)
        assert all(choice.params.handoff_from is None for choice in request.choices)
