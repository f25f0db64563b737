"""Structured output over HTTP: what is asked for is what comes, and nothing else suffers.

The tiny model says anything, so a valid answer is the grammar's doing alone. The default model has
a vocabulary of 49,152 tokens and a draft.
"""

from __future__ import annotations

import json
import re
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from kvtide.models import default_model
from kvtide.server.settings import Settings
from kvtide.server.tools.parser_registry import ChatFormats
from tests.deferred import Deferred
from tests.server.serving import InProcess
from tests.server.talking import Client, Json, as_messages, joined

openai = Deferred("openai")

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}

NAMED = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema_format(schema: Json, **more: Json) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


def check(text: str, schema: Json) -> None:
    jsonschema.validate(json.loads(text), schema)


# -- a model that says anything --------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WAYS = {"plain": ("hermes", "none"), "think": ("hermes", "think"), "harmony": ("harmony", None)}
WAYS["with tools"] = WAYS["plain"]
"""What stands around an answer: how the model writes calls and reasoning."""


@pytest.fixture(params=WAYS)
def around(
    request: pytest.FixtureRequest, server: InProcess, monkeypatch: pytest.MonkeyPatch
) -> Json:
    """Fields of a chat whose answer has a form of its own. The model hardly ever begins a marker or
    an analysis, which it would not find the end of."""
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    tool_parser, reasoning = WAYS[request.param]
    formats = ChatFormats(tokenizer, "", tool_parser, reasoning)
    monkeypatch.setattr(server.app._parser, "_formats", formats)
    words = ((token, tokenizer.token_bytes(token)) for token in range(server.engine.vocabulary))
    begun = [token for token, word in words if word.startswith((b"<", b"a"))]
    tools = {"tools": [TOOL]} if request.param == "with tools" else {}
    return {**tools, "logit_bias": {str(token): -100 for token in begun}}


def content(choice: Json) -> str:
    assert choice["message"].keys() == {"role", "content"}
    return str(choice["message"]["content"])


def test_a_chat_answers_by_its_schema(client: Client, around: Json) -> None:
    form = schema_format(PERSON, strict=True)
    answer = client.chat("who?", response_format=form, max_tokens=400, n=2, seed=3, **around)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
    for choice in answer["choices"]:
        check(content(choice), PERSON)
    assert answer["choices"][0]["message"] != answer["choices"][1]["message"]


def test_a_completion_answers_by_its_schema_and_streams_the_same(client: Client) -> None:
    fields = {"response_format": schema_format(NAMED), "max_tokens": 120, "seed": 5}
    whole = client.complete("who?", **fields)["choices"][0]["text"]
    check(whole, NAMED)
    chunks = client.stream(PATH, prompt="who?", **fields)
    assert joined(chunks) == whole and len(chunks) > 10


@pytest.mark.parametrize(
    "regex", ["[0-9]{3}-[0-9]{4}", r"(yes|no), (\w| ){1,9}\.", "é世?/\n[a-z]", r"\d+€"]
)
def test_an_answer_matches_its_regex(client: Client, regex: str) -> None:
    for seed in range(2):
        answer = client.complete("call", regex=regex, max_tokens=60, seed=seed)["choices"][0]
        if answer["finish_reason"] == "stop":
            assert re.fullmatch(regex, answer["text"]), answer["text"]
        else:
            assert regex == r"\d+€" and answer["text"].isdigit()


@pytest.mark.parametrize("regex", [r"\d{3}\/[^/]{1,3}\/", "é世?/\n[b-z]"])
def test_a_chat_matches_its_regex_whatever_stands_around(
    client: Client, around: Json, regex: str
) -> None:
    answer = client.chat("call", regex=regex, max_tokens=80, **around)["choices"][0]
    assert answer["finish_reason"] == "stop" and re.fullmatch(regex, content(answer), re.ASCII)


def test_an_answer_is_one_of_its_choices(client: Client, around: Json) -> None:
    texts = ["yes", 'no "really"', "maybe\n", "世界", "ye", "5"]
    fields = {"choice": texts, "temperature": 2.0, **around}
    answers = {content(client.chat("?", seed=seed, **fields)["choices"][0]) for seed in range(12)}
    assert answers <= {*texts} and len(answers) > 2


def test_json_objects_and_plain_text(client: Client) -> None:
    fields = {"max_tokens": 30, "seed": 7}
    answer = client.chat("?", response_format={"type": "json_object"}, **fields)["choices"][0]
    text = answer["message"]["content"]
    assert text.startswith("{")
    if answer["finish_reason"] == "stop":
        check(text, {"type": "object"})
    plain = client.chat("?", response_format={"type": "text"}, **fields)
    assert plain["choices"][0] == client.chat("?", **fields)["choices"][0]


def test_logprobs_are_the_models_own(client: Client) -> None:
    fields = {"max_tokens": 1, "temperature": 0, "logprobs": 5}
    free = client.complete("call", **fields)["choices"][0]["logprobs"]
    bound = client.complete("call", regex="[0-9]", **fields)["choices"][0]["logprobs"]
    shared = free["top_logprobs"][0]
    assert {token: bound["top_logprobs"][0][token] for token in shared} == shared
    assert bound["token_logprobs"][0] < free["token_logprobs"][0]


def test_metrics_count_steps_and_the_time_of_masks(client: Client) -> None:
    def counted() -> dict[str, float]:
        lines = client.get("/metrics").body.decode().splitlines()
        found = [line.split() for line in lines if line.startswith("kvtide_grammar_")]
        return {name.removeprefix("kvtide_grammar_"): float(value) for name, value in found}

    before = counted()
    client.complete("call", max_tokens=4, ignore_eos=True)
    assert counted() == before
    client.complete("call", regex="abcdefgh", max_tokens=4)
    after = counted()
    assert after["steps_total"] - before["steps_total"] in range(1, 5)
    assert after["mask_seconds_total"] > before["mask_seconds_total"]


def test_an_answer_without_stop_ids_ends_with_its_grammar(client: Client) -> None:
    answer = client.complete("call", regex="ab?c", ignore_eos=True, max_tokens=9)["choices"][0]
    assert answer["text"] in {"abc", "ac"} and answer["finish_reason"] == "stop"
    short = client.complete("call", regex="abcdefgh", max_tokens=2)["choices"][0]
    assert "abcdefgh".startswith(short["text"]) and short["finish_reason"] == "length"


def test_biases_force_and_ban_tokens(client: Client) -> None:
    fields = {"prompt": "the cat", "max_tokens": 3, "return_token_ids": True}
    usual = client.complete(**fields, temperature=0)["choices"][0]["token_ids"]
    forced = client.complete(**fields, logit_bias={"70": 100})["choices"][0]["token_ids"]
    assert forced == [70] * 3
    banned = client.complete(**fields, temperature=0, logit_bias={str(usual[0]): -100})
    assert usual[0] not in banned["choices"][0]["token_ids"]
    reply = client.post(PATH, {**fields, "logit_bias": {"320": 1}})
    assert reply.status == 400 and "0..319" in reply.problem


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"regex": "a", "choice": ["a"]}, "regex and choice exclude each other"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"guided_json": {"type": "object"}}, "use response_format of type json_schema"),
        ({"guided_choice": ["a"]}, "use choice"),
        ({"structured_outputs": {"regex": "a"}}, "use response_format, regex or choice"),
        ({"regex": 5}, "send a regular expression"),
        ({"regex": "("}, "unclosed group"),
        ({"choice": "a"}, "no list of 1 to 10000 texts"),
        ({"choice": []}, "no list of"),
        ({"choice": ["a", ""]}, "no list of"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ({"response_format": schema_format([])}, "json_schema.schema"),
        ({"response_format": {"type": "structural_tag"}}, "text, json_object or json_schema"),
        (
            {"response_format": schema_format({"type": "integer", "minimum": 2, "maximum": 1})},
            "Uns",
        ),
        ({"response_format": schema_format({"not": {}})}, "Unimplemented keys"),
        ({"logit_bias": {"5": "x"}}, "token id"),
        ({"logit_bias": {"-5": 1}}, "token id"),
        ({"logit_bias": {"5": True}}, "token id"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "token id"),
        ({"logit_bias": [[5, 1]]}, "token id"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [PATH, CHAT])
def test_what_cannot_be_is_refused_in_a_sentence(
    client: Client, path: str, fields: Json, words: str
) -> None:
    given = {"prompt": "a"} if path == PATH else {"messages": as_messages("a")}
    reply = client.post(path, {**given, **fields})
    assert reply.status == 400 and words in reply.problem and "; " in reply.problem


OVERLAPPING = [{"required": ["a"]}, {"required": ["b"]}]
UNENFORCEABLE = {
    "response_format": [
        (schema_format({"properties": {"a": {}, "b": {}}, "oneOf": OVERLAPPING}), "oneOf"),
        (schema_format({"not": {}}), "Unimplemented keys"),
        (schema_format({"type": "object", "minProperties": 2}), "minProperties is 2"),
    ],
    "regex": [("(?=a)b", "look-around"), ("a" * 300_000, "262144 are the most")],
    "choice": [(["a" * 300_000], "262144 are the most")],
}


@pytest.mark.parametrize("param", UNENFORCEABLE)
def test_a_form_is_refused_in_the_same_words_whatever_stands_around(
    client: Client, around: Json, param: str
) -> None:
    for value, words in UNENFORCEABLE[param]:
        asked = {"messages": as_messages("a"), param: value}
        plain = client.post(PATH, {"prompt": "a", param: value})
        reply = client.post(CHAT, {**asked, **around})
        assert reply.status == 400 and words in reply.problem
        assert reply.json() == plain.json() and reply.json()["error"]["param"] == param


def test_a_model_without_a_tokenizer_has_no_grammars(serve: Any, bare_folder: Any) -> None:
    bare = serve(model=str(bare_folder))
    reply = bare.client.post(PATH, {"prompt": [5, 6], "regex": "a"})
    assert reply.status == 400 and "needs a tokenizer" in reply.problem
    assert bare.client.complete([5, 6], logit_bias={"7": 100}, max_tokens=1)["choices"]


# -- schemas that explode --------------------------------------------------------------------------


def nested(depth: int) -> Json:
    schema: Json = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(depth: int) -> Json:
    """Every level is the product of the two alternatives of all before."""
    levels = {
        f"d{n}": {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"{c}{n}": {}}} for c in "ab"]},
                {"$ref": f"#/$defs/d{n + 1}"},
            ]
        }
        for n in range(depth)
    }
    return {"$defs": {**levels, f"d{depth}": {"type": "object"}}, "$ref": "#/$defs/d0"}


RECURSIVE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "boolean"},
                "next": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
MANY = {"enum": [f"value {n * 7919 % 100003}" for n in range(10_000)]}
OPTIONAL = {"type": "object", "properties": {str(n): {} for n in range(2000)}}
EXPLOSIONS: dict[str, tuple[Json, bool]] = {
    "recursive": ({"response_format": schema_format(RECURSIVE)}, True),
    "10,000 enums": ({"response_format": schema_format(MANY)}, True),
    "10,000 choices": ({"choice": MANY["enum"]}, True),
    "200,000 enums": ({"response_format": schema_format({"enum": [*range(200_000)]})}, False),
    "deep": ({"response_format": schema_format(nested(400))}, False),
    "doubling": ({"response_format": schema_format(doubling(22))}, False),
    "2,000 optional": (
        {
            "response_format": schema_format(
                {"type": "object", "properties": {str(n): {} for n in range(2000)}}
            )
        },
        False,
    ),
    "long regex": ({"regex": "|".join(f"{n * 7919 % 100003}x" for n in range(10_000))}, True),
    "too long regex": ({"regex": "a|" * 200_000 + "a"}, False),
    "nested regex": ({"regex": "(" * 1000 + "a" + ")" * 1000}, False),
    "counted regex": ({"regex": "((a|b){1,1000}){1,1000}"}, True),
    "exponential regex": ({"regex": "(a|b)*a(a|b){25}"}, True),
}


@pytest.mark.parametrize("name", EXPLOSIONS)
def test_a_schema_that_explodes_takes_bounded_time_and_memory(client: Client, name: str) -> None:
    """It is served or refused; a request beside it goes on."""
    fields, served = EXPLOSIONS[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(client.complete, "the cat", max_tokens=40, temperature=0)
        started = time.monotonic()
        reply = client.post(PATH, {"prompt": "a", "max_tokens": 20, "seed": 1, **fields})
        took_s = time.monotonic() - started
        assert beside.result()["choices"][0]["finish_reason"] in ("length", "stop")
    assert reply.status == (200 if served else 400), reply.body[:300]
    if served:
        assert reply.json()["choices"][0]["finish_reason"] in ("stop", "length")
    else:
        assert "cannot be enforced" in reply.problem and len(reply.problem) < 500
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert took_s < 20 and grown < 300_000, f"{took_s:.1f} s, {grown} KB"


def test_a_recursive_schema_is_obeyed(client: Client) -> None:
    form = schema_format(RECURSIVE)
    answer = client.complete("a", response_format=form, max_tokens=120, n=4, seed=1)
    ended = [one["text"] for one in answer["choices"] if one["finish_reason"] == "stop"]
    for text in ended:
        check(text, RECURSIVE)
    assert ended


def test_many_grammars_at_once_are_each_obeyed(client: Client) -> None:
    """Beside requests without one, which are answered as if alone."""
    free = client.complete("the hat", max_tokens=30, temperature=0)["choices"][0]["text"]

    def ask(number: int) -> Json:
        if number % 3 == 0:
            return client.complete("the hat", max_tokens=30, temperature=0)
        return client.complete("the hat", regex=f"[0-9]{{{number}}}x", max_tokens=60, seed=number)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    for number, answer in enumerate(answers):
        text = answer["choices"][0]["text"]
        assert text == free if number % 3 == 0 else re.fullmatch(f"[0-9]{{{number}}}x", text)


# -- the default model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Iterator[InProcess]:
    server = InProcess(
        Settings(
            model=str(default_model.default_model()),
            port=0,
            storage="none",
            device_tokens=4096,
            deterministic=True,
        )
    )
    yield server
    server.settled()
    server.close()


QUESTION = "Alice is 31 years old and lives in 10115 Berlin. Answer in JSON: who is Alice?"


@pytest.mark.full
def test_the_default_model_answers_by_a_schema_with_and_without_drafts(smollm2: InProcess) -> None:
    fields = {"response_format": schema_format(NAMED), "max_tokens": 60, "temperature": 0}
    lengths = smollm2.engine.accept_length_stats
    assert lengths is not None
    # The first steps of a batch size are plain, and timed: drafts follow where they pay.
    smollm2.client.chat("Count to forty.", max_tokens=96, ignore_eos=True, temperature=0)
    before = lengths.accepted
    drafted = smollm2.client.chat(QUESTION, **fields)["choices"][0]
    assert drafted["finish_reason"] == "stop"
    check(drafted["message"]["content"], NAMED)
    assert lengths.accepted > before
    plain = smollm2.client.chat(QUESTION, **fields, speculate=False)["choices"][0]
    assert plain["message"] == drafted["message"]


@pytest.mark.full
def test_the_default_model_streams_several_constrained_answers(smollm2: InProcess) -> None:
    fields = {"response_format": schema_format(NAMED), "max_tokens": 60, "n": 2, "seed": 4}
    whole = smollm2.client.chat(QUESTION, **fields)
    chunks = smollm2.client.stream(CHAT, messages=as_messages(QUESTION), **fields)
    for number, choice in enumerate(whole["choices"]):
        assert joined(chunks, number) == choice["message"]["content"]
        check(choice["message"]["content"], NAMED)
    assert smollm2.client.chat("Is the sky blue?", choice=["yes", "no"], temperature=0)["choices"][
        0
    ]["message"]["content"] in {"yes", "no"}
    date = r"(19|20)\d\d-(0\d|1[0-2])-[0-3]\d"
    text = smollm2.client.complete("Today is ", regex=date, temperature=0)["choices"][0]["text"]
    assert re.fullmatch(date, text)


@pytest.mark.full
def test_openais_client_parses_what_the_default_model_says(smollm2: InProcess) -> None:
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0) as ai:
        answer = ai.chat.completions.create(
            model=smollm2.app._parser._name,
            messages=[{"role": "user", "content": QUESTION}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "it", "schema": NAMED},
            },
            max_tokens=60,
            logit_bias={"0": -100},
        )
    check(answer.choices[0].message.content or "", NAMED)


@pytest.mark.full
def test_constrained_requests_beside_free_ones_say_what_they_say_alone(smollm2: InProcess) -> None:
    client = smollm2.client
    bodies: list[Json] = [
        {"response_format": schema_format(NAMED), "seed": 1},
        {},
        {"regex": "[A-Z][a-z]{2,9}( [a-z]{2,9}){2,5}\\.", "seed": 2},
        {"temperature": 0},
        {"response_format": {"type": "json_object"}, "temperature": 0},
    ]

    def ask(body: Json) -> Json:
        choice = client.chat(QUESTION, max_tokens=60, **{"seed": 9, **body})["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]

    alone = [ask(body) for body in bodies]
    found: dict[int, Json] = {}

    def keep(number: int) -> None:
        found[number] = ask(bodies[number])

    threads = [threading.Thread(target=keep, args=(n,)) for n in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(len(bodies))] == alone
