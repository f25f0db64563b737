"""Random bodies: answered or refused, and never the end of anything."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.talking import Client, Json

NAMES = (
    "prompt", "messages", "model", "max_tokens", "max_completion_tokens", "n", "stream", "echo",
    "stream_options", "logprobs", "top_logprobs", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids",
    "ignore_eos", "cache_salt", "session_id", "session_ttl_seconds", "priority", "return_token_ids",
    "best_of", "timeout_seconds", "return_cached_tokens_details", "chat_template_kwargs",
    "response_format", "regex", "choice", "logit_bias", "structured_outputs",
)  # fmt: skip

PREFETCH = "/v1/prefetch"
PATHS = ("/v1/completions", "/v1/chat/completions", PREFETCH)

numbers = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 1e-320, 1e308, 1e400, -0.0]),
    st.floats(-2, 2, allow_nan=False),
)
texts = st.one_of(
    st.text(max_size=12), st.sampled_from(["the cat", "<|end|>", "\0", "世", "tiny-0.1"])
)
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner, max_size=3),
    ),
    max_leaves=8,
)
roles = st.one_of(texts, st.sampled_from(["system", "developer", "user", "assistant"]))
messages = st.lists(st.fixed_dictionaries({"role": roles, "content": texts}), max_size=3)
prompts = st.one_of(texts, st.lists(st.integers(-1, 321), max_size=20), st.lists(texts, max_size=3))
bodies = st.builds(
    lambda some, prompt, spoken: {"prompt": prompt, "messages": spoken, "max_tokens": 3, **some},
    st.dictionaries(st.sampled_from(NAMES), values, max_size=4),
    prompts,
    messages,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(body=bodies, path=st.sampled_from(PATHS), either=st.sampled_from(["prompt", "messages"]))
def test_any_body_is_answered_or_refused(
    client: Client, body: Json, path: str, either: str
) -> None:
    if path == PREFETCH:
        body = {name: value for name, value in body.items() if name != either}
    raw = json.dumps(body).replace("Infinity", "1e999").encode()
    reply = client.send("POST", path, raw)
    if reply.status == 404 and reply.json()["error"]["code"] == "session_not_found":
        assert path == PREFETCH and body["session_id"]
    elif reply.status == 404:
        assert "model" in body and reply.json()["error"]["code"] == "model_not_found"
    elif reply.status == 400:
        assert reply.problem
    elif path == PREFETCH:
        assert reply.status == 200 and reply.json()["outcome"] in ("loaded", "ended"), reply.body
    else:
        assert reply.status == 200, reply.body
        streamed = reply.headers["content-type"].startswith("text/event-stream")
        assert reply.body.endswith(b"data: [DONE]\n\n") if streamed else reply.json()["choices"]
