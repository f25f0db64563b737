"""What clients may not do: every refusal is a sentence, and the server goes on."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest

from kvtide.server.error_responses import MAX_BODY_BYTES
from tests.server.serving import POSITIONS, VOCABULARY, InProcess
from tests.server.talking import Client, Json

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
DEEP = b"[" * 100_000


def refused(client: Client, body: Json, status: int = 400) -> str:
    reply = client.post(PATH, {"prompt": [5, 6], **body})
    assert reply.status == status, reply.body
    assert len(reply.problem) < 250
    return reply.problem


# -- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"prompt=hello", "not JSON"),
        (b'{"prompt": "a",}', "not JSON"),
        (b"[]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"temperature": NaN}', "NaN is not a number"),
        (b'{"temperature": -Infinity}', "-Infinity is not a number"),
        (b'{"user": [Infinity]}', "Infinity is not a number"),
        (b'{"prompt": "\\ud800"}', "halves of characters"),
        (b'{"cache_salt": "a\\udfff"}', "halves of characters"),
        (b'{"x": {"\\ud83d": 1}}', "halves of characters"),
        (b'{"prompt": "\xed\xa0\x80"}', "halves of characters"),
        (b'{"prompt": "\xff"}', "halves of characters"),
        (DEEP, "nested too deeply"),
        (b'{"a":' * 50_000, "nested too deeply"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_a_body_that_is_no_json_is_refused(
    client: Client, path: str, raw: bytes, words: str
) -> None:
    reply = client.send("POST", path, raw)
    assert reply.status == 400
    assert words in reply.problem and "; " in reply.problem


@pytest.mark.parametrize("depth", [300, 700, 900, 940, 960, 980, 1000])
@pytest.mark.parametrize("field", ["recompute", "stop", "chat_template_kwargs", "prompt"])
def test_depth_breaks_nothing(client: Client, field: str, depth: int) -> None:
    """Whatever is done with a value that could just be read: shown, copied, or thrown away."""
    nested = b"[" * depth + b"]" * depth
    message = b'"messages": [{"role": "user", "content": "a"}], "max_tokens": 1'
    for path in (PATH, CHAT):
        body = b'{%s, "%s": {"a": %s}}' % (message, field.encode(), nested)
        assert client.send("POST", path, body).status in (200, 400)


def test_whole_characters_pass_however_they_are_written(client: Client) -> None:
    raw = b'{"prompt": "\\ud83d\\ude00\xc3\xa4", "max_tokens": 0, "echo": true}'
    assert client.send("POST", PATH, raw).json()["choices"][0]["text"] == "😀ä"


def test_a_body_that_is_no_gzip_is_refused(client: Client) -> None:
    reply = client.send("POST", PATH, b"no gzip", **{"Content-Encoding": "gzip"})
    assert reply.status == 400
    assert "could not be read" in reply.problem


def test_a_body_that_is_too_large_is_refused(client: Client) -> None:
    reply = client.send("POST", PATH, b'{"prompt": "%s"}' % (b"a" * MAX_BODY_BYTES))
    assert reply.status == 413
    assert reply.problem == "the body has more than 64 MiB; send a smaller one"


# -- routes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v1", 404, "there is no /v1 here"),
        ("POST", "/", 405, "use GET"),
        ("POST", "/v1/embeddings", 404, "/v1/embeddings"),
        ("GET", "/v1/completions/", 404, "/v1/completions/"),
        ("GET", PATH, 405, "use POST"),
        ("PUT", CHAT, 405, "use POST"),
        ("POST", "/v1/models", 405, "use GET"),
        ("DELETE", "/health", 405, "use GET"),
        ("GET", "/admin/flush", 405, "use POST"),
        ("PATCH", PATH, 405, "does not take PATCH"),
    ],
)
def test_routes_and_methods_that_are_none_are_refused(
    client: Client, method: str, path: str, status: int, words: str
) -> None:
    reply = client.send(method, path)
    assert reply.status == status
    assert words in reply.problem
    assert ("allow" in reply.headers) == (status == 405)


def test_what_is_no_http_is_refused_and_the_server_goes_on(client: Client) -> None:
    for nonsense in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n"):
        with socket.create_connection((client.address, client.port), timeout=10) as raw:
            raw.sendall(nonsense + b"\r\n\r\n")
            assert b" 400 " in raw.recv(4096)
    assert client.get("/health").status == 200


# -- fields ---------------------------------------------------------------------------------------

FLAGS = ("stream", "echo", "ignore_eos", "recompute", "return_token_ids",
         "return_cached_tokens_details")  # fmt: skip
WHOLE = ("max_tokens", "n", "logprobs", "seed", "top_k", "priority")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
           "repetition_penalty")  # fmt: skip
TEXTS = ("cache_salt", "session_id", "model")


@pytest.mark.parametrize("value", [1, 0, "true", "", [], {}, 0.5])
@pytest.mark.parametrize("name", FLAGS)
def test_what_is_not_true_or_false_is_refused(client: Client, name: str, value: Json) -> None:
    assert f"{name} is {value!r}; send true or false" == refused(client, {name: value})


@pytest.mark.parametrize("value", [True, 1.0, 1.5, "1", [1], {}])
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_whole_number_is_refused(client: Client, name: str, value: Json) -> None:
    assert f"{name} is {value!r}; send a whole number" in refused(client, {name: value})


@pytest.mark.parametrize("value", [True, "1", [1], {}, 10**400])
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_is_refused(client: Client, name: str, value: Json) -> None:
    assert f"{name} is " in refused(client, {name: value})


@pytest.mark.parametrize("value", [True, 1, 1.5, ["a"], {}])
@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_text_is_refused(client: Client, name: str, value: Json) -> None:
    assert f"{name} is {value!r}; send a text" == refused(client, {name: value})


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -0.1},
        {"temperature": 101},
        {"top_p": 1.1},
        {"top_p": -1},
        {"min_p": 2},
        {"top_k": -2},
        {"presence_penalty": 101},
        {"frequency_penalty": -101},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1},
        {"max_tokens": -1},
        {"n": 0},
        {"n": -1},
        {"n": 129},
        {"n": 10**12},
        {"logprobs": -1},
        {"logprobs": 21},
        {"priority": 10**7},
        {"seed": 10**30},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [5]},
        {"stop": 5},
        {"stop": ["a"] * 17},
        {"stop_token_ids": 5},
        {"stop_token_ids": ["5"]},
        {"stop_token_ids": [True]},
        {"stream_options": []},
        {"stream_options": True},
        {"best_of": 2},
        {"suffix": "x"},
        {"logit_bias": {"5": 101}},
        {"response_format": "json"},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(client: Client, field: Json) -> None:
    (name,) = field
    problem = refused(client, field)
    assert problem.startswith(name)


def test_options_of_streams_have_types_too(client: Client) -> None:
    problem = refused(client, {"stream": True, "stream_options": {"include_usage": 1}})
    assert problem == "include_usage is 1; send true or false"


def test_another_model_is_not_found(client: Client) -> None:
    problem = refused(client, {"model": "gpt-5"}, 404)
    assert problem == "there is no model 'gpt-5' here; use 'tiny-0.1'"
    assert client.post(CHAT, {"model": "gpt-5"}).status == 404
    assert client.complete([5], model="tiny-0.1", max_tokens=1)
    assert client.complete([5], model=None, max_tokens=1, stop=None, n=None, temperature=None)


@pytest.mark.parametrize(
    "prompt",
    [None, [], "", [[]], [""], [5, "a"], [5, 6.0], [5, True], [5, None], 5, 5.5, True, {}, [{}],
     [["a"]], [[[5]]], [[5], []], [-1], [5, VOCABULARY], [2**31], [2**63], [10**30]],
    ids=str,
)  # fmt: skip
def test_prompts_that_are_none_are_refused(client: Client, prompt: Json) -> None:
    problem = refused(client, {"prompt": prompt})
    assert "; send" in problem or "token ids must lie in" in problem


def test_all_ids_of_the_vocabulary_are_served(client: Client) -> None:
    assert client.complete([0, VOCABULARY - 1], max_tokens=1, echo=True)


def test_all_prompts_are_served_or_none(server: InProcess, client: Client) -> None:
    before = server.settled()["tokens"]["prompt"]
    refused(client, {"prompt": [[5] * 40, [6], [VOCABULARY]]})
    assert server.settled()["tokens"]["prompt"] == before
    refused(client, {"prompt": [[5]] * 129})
    refused(client, {"prompt": [[5]] * 65, "n": 2})


def test_what_is_too_long_is_refused_with_what_fits(client: Client) -> None:
    problem = refused(client, {"prompt": [5] * 100, "max_tokens": POSITIONS - 99})
    assert f"{POSITIONS + 1}; this engine serves {POSITIONS}" in problem
    refused(client, {"prompt": [5] * (POSITIONS + 1), "max_tokens": 0})
    refused(client, {"prompt": [5] * 2_000_000})
    refused(client, {"prompt": "the cat " * POSITIONS})
    refused(client, {"max_tokens": 10**30})
    assert client.complete([5] * POSITIONS, max_tokens=0)


# -- OpenAI's codes -------------------------------------------------------------------------------

INVALID = "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        (PATH, {"model": "gpt-5"}, 404, None, "model_not_found"),
        (CHAT, {"model": "gpt-5"}, 404, None, "model_not_found"),
        (PATH, {"prompt": [5] * (POSITIONS + 1)}, 400, None, "context_length_exceeded"),
        (PATH, {"prompt": [VOCABULARY]}, 400, "prompt", "invalid_value"),
        (PATH, {"prompt": None}, 400, "prompt", "missing_required_parameter"),
        (PATH, {"prompt": 5}, 400, "prompt", "invalid_type"),
        (CHAT, {}, 400, "messages", "missing_required_parameter"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "invalid_type"),
        (PATH, {"temperature": "1"}, 400, "temperature", "invalid_type"),
        (PATH, {"temperature": 10**400}, 400, "temperature", "decimal_above_max_value"),
        (PATH, {"stream": 1}, 400, "stream", "invalid_type"),
        (PATH, {"n": 0}, 400, "n", "integer_below_min_value"),
        (PATH, {"n": 129}, 400, "n", "integer_above_max_value"),
        (PATH, {"logit_bias": {"5": 101}}, 400, "logit_bias", "invalid_value"),
        (PATH, {"response_format": "json"}, 400, "response_format", "invalid_value"),
        (
            PATH,
            {"guided_json": None, "guided_regex": "a"},
            400,
            "guided_regex",
            "unsupported_parameter",
        ),
        (PATH, {"stop": ""}, 400, "stop", "invalid_value"),
        ("/v1/embeddings", {}, 404, None, "unknown_url"),
        ("/v1/models", {}, 405, None, "method_not_supported"),
        ("/admin/flush?tier=disk", {}, 400, "tier", "invalid_value"),
    ],
    ids=str,
)
def test_errors_carry_the_codes_of_openai(
    client: Client, path: str, body: Json, status: int, param: str | None, code: str
) -> None:
    reply = client.post(path, {"prompt": [5, 6], **body} if path == PATH else body)
    error = reply.json()["error"]
    assert (reply.status, error["type"]) == (status, INVALID)
    assert (error["param"], error["code"]) == (param, code)


def test_a_body_that_is_no_json_has_no_code(client: Client) -> None:
    error = client.send("POST", PATH, b"{").json()["error"]
    assert (error["type"], error["param"], error["code"]) == (INVALID, None, None)


def test_a_wrong_key_has_its_code(serve: Any) -> None:
    server = serve(api_key="knock")
    reply = Client(server.address, server.port, "wrong").get("/v1/models")
    assert reply.status == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"


# -- keys -----------------------------------------------------------------------------------------


def status(client: Client, path: str, authorization: bytes | None) -> int:
    connection = http.client.HTTPConnection(client.address, client.port, timeout=10)
    headers = {} if authorization is None else {"Authorization": authorization}
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status != 401 or json.loads(body)["error"]["message"].startswith("this needs the")
    return answer.status


def test_keys_open_what_they_are_for(serve: Any) -> None:
    client = serve(api_key="knock", admin_key="grüße").client
    open_to_all = {path: [200] * 3 for path in ("/health", "/metrics")}
    for path, expected in {
        "/v1/models": [401, 200, 401],
        "/v1/nothing": [401, 404, 401],
        "/admin/cache": [401, 401, 200],
        "/%61dmin/cache": [401, 401, 200],
        **open_to_all,
    }.items():
        keys = (None, b"Bearer knock", "Bearer grüße".encode())
        assert [status(client, path, key) for key in keys] == expected, path


def test_a_web_page_does_not_reach_the_admin_routes_of_a_server_without_keys(serve: Any) -> None:
    client = serve().client
    for headers, expected in (({}, 200), ({"Origin": "http://example.com"}, 403)):
        connection = http.client.HTTPConnection(client.address, client.port, timeout=10)
        connection.request("POST", "/admin/flush", body="{}", headers=headers)
        assert connection.getresponse().status == expected
        connection.close()


@pytest.mark.parametrize(
    "wrong",
    [b"", b"knock", b"Basic knock", b"Bearer", b"Bearer ", b"Bearer knoc", b"Bearer knockk",
     b"Bearer Knock", b"Bearer \xff\xfe", "Bearer é".encode()],
)  # fmt: skip
def test_wrong_keys_open_nothing(serve: Any, wrong: bytes) -> None:
    client = serve(api_key="knock").client
    assert status(client, "/v1/models", wrong) == 401
    assert status(client, "/admin/cache", wrong) == 401, "else the API key guards admin routes"
    for right in (b"Bearer knock", b"bearer knock", b"BEARER  knock "):
        assert status(client, "/v1/models", right) == 200
        assert status(client, "/admin/cache", right) == 200
