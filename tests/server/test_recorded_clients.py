"""What Claude Code and Codex send: two turns of each, the second with a tool's result.

Recorded from `claude -p "say hi"` (2.1.325) and `codex exec "say hi"` (0.166.0). Long texts are
cut, ids and paths are replaced. The second turn is the first with the fields that it changes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvtide.server.anthropic.messages_request import chat_body
from kvtide.server.chat.chat_turns import common_fields
from kvtide.server.request_parsing import RequestFields
from kvtide.server.responses.responses_request import read_request
from kvtide.server.sessions.stable_prefix import parse_rules, stabilized
from kvtide.server.tools.parser_registry import ChatFormats
from tests.server.serving import PAGE, save_model, save_tokenizer
from tests.server.talking import Client

UUID = "00000000-0000-4000-8000-000000000000"
RECORDED = Path(__file__).parent / "recorded"
AGENTS = Path(__file__).parents[2] / "docs/AGENTS.md"
PATHS = {"claude_code": "/v1/messages?beta=true", "codex": "/v1/responses"}
TOKENS = 32_768
LAST = {"claude_code": "message_delta", "codex": "response.incomplete"}

Json = dict[str, Any]


def turns(client: str) -> list[Json]:
    recorded = json.loads((RECORDED / f"{client}.json").read_text("utf-8"))
    first, changed = recorded["first"], recorded["second"]
    limit = "max_tokens" if client == "claude_code" else "max_output_tokens"
    return [{**body, limit: 4, "temperature": 0} for body in (first, {**first, **changed})]


def streamed(client: Client, path: str, body: Json) -> list[Json]:
    reply = client.post(path, body)
    assert reply.status == 200, reply.body
    lines = reply.body.decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@pytest.fixture(scope="module")
def roomy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for long prompts: a token is a byte."""
    folder = tmp_path_factory.mktemp("models") / "tiny-0.1"
    return save_tokenizer(save_model(folder, max_position_embeddings=TOKENS), merges=0)


@pytest.mark.parametrize("name", PATHS)
def test_recorded_turns_are_answered_and_share_their_prefix(
    serve: Any, roomy_folder: Path, name: str
) -> None:
    server = serve(model=str(roomy_folder), device_tokens=TOKENS)
    first, second = (streamed(server.client, PATHS[name], body) for body in turns(name))
    read, prompt = [], []
    for events in (first, second):
        assert LAST[name] in [event["type"] for event in events]
        (usage,) = (
            event["usage"] if "usage" in event else event["response"]["usage"]
            for event in events
            if event["type"] == LAST[name]
        )
        details = usage.get("input_tokens_details", usage)
        read.append(details.get("cached_tokens", details.get("cache_read_input_tokens")))
        extra = sum(usage.get(f"cache_{kind}_input_tokens", 0) for kind in ("read", "creation"))
        prompt.append(usage["input_tokens"] + extra)
    assert prompt[1] > prompt[0] > 10 * PAGE
    # All but what asks the assistant to speak.
    assert read[1] >= (prompt[0] - PAGE) // PAGE * PAGE
    sessions = server.client.get("/admin/sessions").json()["sessions"]
    assert [one["id"] for one in sessions] == [UUID]


THINKING = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}'
    "\n</tool_call>{% endfor %}<|end|>{% endfor %}<|assistant|>"
)
LOOK = {
    "type": "function",
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"where": {"enum": ["here", "there"]}},
        "required": ["where"],
        "additionalProperties": False,
    },
}


def test_codex_gives_back_thoughts_and_finds_its_prefix_behind_the_call(
    serve: Any, roomy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stores nothing and sends no text of reasoning, but what it asked for by `include`."""
    # A thought is any text before what a grammar asks for. Here the grammar has the thought.
    monkeypatch.setattr(
        ChatFormats, "_thought", lambda *_: '"<think>Where is it, here or there?</think>"'
    )
    (tmp_path / "chat.jinja").write_text(THINKING)
    template = {"chat_template": str(tmp_path / "chat.jinja"), "reasoning_parser": "think"}
    server = serve(model=str(roomy_folder), device_tokens=TOKENS, **template)
    first, _ = turns("codex")
    assert first["include"] == ["reasoning.encrypted_content"] and not first["store"]
    choice = {"type": "function", "name": "look"}
    first |= {"tools": [*first["tools"], LOOK], "tool_choice": choice, "max_output_tokens": 200}
    path = PATHS["codex"]
    events = streamed(server.client, path, first)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "function_call"]
    thought, call = done
    kept = {key: thought[key] for key in ("type", "summary", "encrypted_content")}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "There."}
    spoken = events[-1]["response"]["usage"]["total_tokens"]
    reads = []
    for items in ([kept, call, result], [call, result]):
        turn = {**first, "input": [*first["input"], *items]}
        usage = streamed(server.client, path, turn)[-1]["response"]["usage"]
        reads.append(usage["input_tokens_details"]["cached_tokens"])
    with_thought, without = reads
    assert with_thought >= (spoken - PAGE) // PAGE * PAGE > without


def test_the_documented_rule_makes_codex_days_one() -> None:
    documented = re.search(r"--stable-prefix '(regex:[^']+)'", AGENTS.read_text("utf-8"))
    assert documented is not None
    first, _ = turns("codex")
    days = [
        json.loads(json.dumps(first).replace("2026-01-01", day))
        for day in ("2026-01-01", "2026-01-02")
    ]
    assert days[0] != days[1]
    chats = [read_request(RequestFields(day), lambda _: None).chat["messages"] for day in days]
    kept = [stabilized(chat, parse_rules(documented[1])) for chat in chats]
    assert chats[0] != chats[1] and kept[0] == kept[1]
    text = str(kept[0][1]["content"])
    assert "<cwd>/project</cwd>" in text and "<timezone>" in text and "current_date" not in text


@pytest.mark.parametrize("name", ["mine", "", 7, None, "0" * 36])
def test_only_a_name_that_cannot_be_guessed_becomes_a_session(name: object) -> None:
    assert common_fields({}, name) == {}
    assert common_fields({"session_id": "own"}, UUID) == {"session_id": "own"}
    assert common_fields({}, UUID) == {"session_id": UUID}


@pytest.mark.parametrize("user", ["", "me", "[1]", "{", '{"session_id": "x"}', "[" * 5000])
def test_other_names_of_users_are_no_sessions(user: str) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    assert "session_id" not in chat_body(RequestFields({**body, "metadata": {"user_id": user}}))


def test_recordings_have_no_paths_and_no_names_of_machines() -> None:
    for path in RECORDED.iterdir():
        text = path.read_text("utf-8")
        assert len(text) < 40_000
        for word in ("/work/", "/root/", "/home/", "Bearer", "sk-", "@users"):
            assert word not in text.replace("/home/user/.codex", ""), (path.name, word)
