"""An answer that exceeds a limit of its grammar has failed, in the words of every API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLParserLimits

from tests.deferred import Deferred
from tests.server.serving import InProcess
from tests.server.talking import Client, as_messages

anthropic = Deferred("anthropic")
openai = Deferred("openai")

MODEL = "tiny-0.1"
WORDS = "the answer exceeded a limit of its grammar"
FORM = {"regex": "[a-z]{1000}"}
"""Every letter is a state of the lexer."""


@pytest.fixture(autouse=True)
def _few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = LLParserLimits(
        max_grammar_size=200_000,
        initial_lexer_fuel=1_000_000,
        max_lexer_states=60,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        verbose_errors=False,
    )
    monkeypatch.setattr("kvtide.engine.grammar.grammar_compiler._LIMITS", limits)
    monkeypatch.setattr("kvtide.engine.grammar.grammar_compiler.CACHED_BYTES", 0)


def sent_events(client: Client, path: str, **body: Any) -> list[tuple[str, Any]]:
    """The names and the data of a stream's events."""
    reply = client.post(path, {**body, "stream": True})
    assert reply.status == 200, reply.body
    blocks = [block.split("\n") for block in reply.body.decode().split("\n\n") if block]
    return [(name[len("event: ") :], json.loads(data[len("data: ") :])) for name, data in blocks]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": as_messages("a")}),
    ],
)
def test_completions_and_chats_finish_with_an_error(client: Client, path: str, prompt: Any) -> None:
    body = {**prompt, **FORM, "max_tokens": 200}
    assert client.post(path, body).json()["choices"][0]["finish_reason"] == "error"
    last = client.stream(path, **body)[-1]
    assert last["choices"][0]["finish_reason"] == "error"


def test_a_message_is_an_error(server: InProcess, client: Client) -> None:
    body = {"messages": as_messages("a"), "max_tokens": 200}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as ai:
        asked = {"model": MODEL, **body, "extra_body": FORM}
        with pytest.raises(anthropic.InternalServerError, match=WORDS) as caught:
            ai.messages.create(**asked)
        assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]
        with pytest.raises(anthropic.APIStatusError, match=WORDS), ai.messages.stream(**asked) as s:
            s.until_done()
    events = sent_events(client, "/v1/messages", **body, **FORM)
    names = [name for name, _ in events]
    assert names[0] == "message_start" and names.count("error") == 1 and names[-1] == "error"
    assert not {"message_delta", "message_stop"} & {*names}


def test_a_response_has_failed_and_is_not_stored(server: InProcess, client: Client) -> None:
    body = {"input": "a", "max_output_tokens": 200}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:
        response = ai.responses.create(model=MODEL, **body, extra_body=FORM)
        assert response.status == "failed" and response.error is not None
        assert response.error.code == "server_error" and WORDS in response.error.message
        assert [item.status for item in response.output] == ["incomplete"]
        assert response.usage is not None and response.usage.output_tokens > 0
        with pytest.raises(openai.NotFoundError):
            ai.responses.retrieve(response.id)
    name, last = sent_events(client, "/v1/responses", **body, **FORM)[-1]
    assert (name, last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error" and not last["response"]["store"]
