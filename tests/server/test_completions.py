"""`/v1/completions`: prompts, choices, stops, seeds, logprobs, and what was cached."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from kvtide.server import app
from kvtide.server.settings import Settings
from tests.server.serving import END, PAGE, VOCABULARY, InProcess
from tests.server.talking import Client, Json, joined

PATH = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 24}
PROMPT = "the cat sat on the mat, and then — 世界 —"

_fresh = itertools.count(1)


def fresh_ids(pages: int, more: int = 3) -> list[int]:
    """Token ids that share no page with any before."""
    number = next(_fresh)
    ids = [(number * 37 + at * 11) % (VOCABULARY - 10) + 5 for at in range(pages * PAGE + more)]
    ids[0], ids[1] = number % 256 + 3, number // 256 + 3
    return ids


def only(answer: Json) -> Json:
    (choice,) = answer["choices"]
    return choice


@pytest.fixture(scope="module")
def _exact(model_folder: Path) -> Iterator[InProcess]:
    chosen = Settings(model=str(model_folder), port=0, page_tokens=PAGE, deterministic=True)
    server = InProcess(chosen)
    yield server
    server.close()


@pytest.fixture
def exact(_exact: InProcess) -> Iterator[Client]:
    """A server whose answers are the same to the last bit, whatever the batch."""
    yield _exact.client
    _exact.settled()


@pytest.fixture
def bare(serve: Any, bare_folder: Path) -> Client:
    """A model that came without a tokenizer."""
    return serve(model=str(bare_folder)).client


# -- answers --------------------------------------------------------------------------------------


def test_an_answer_has_the_shape_of_openais(client: Client) -> None:
    answer = client.complete(PROMPT, max_tokens=5, ignore_eos=True)
    assert answer.keys() == {"id", "created", "model", "object", "choices", "usage"}
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny-0.1", "a folder is called by all of its name"
    choice = only(answer)
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason"}
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


def test_sixteen_tokens_come_by_default(client: Client) -> None:
    assert client.complete([5, 6], ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_a_text_is_as_good_as_its_tokens(server: InProcess, client: Client) -> None:
    assert server.engine.tokenizer is not None
    ids = server.engine.tokenizer.encode(PROMPT)
    text = only(client.complete(PROMPT, **GREEDY))["text"]
    assert only(client.complete(ids, **GREEDY))["text"] == text
    assert client.complete(ids, **GREEDY)["usage"]["prompt_tokens"] == len(ids)


def test_a_completion_says_whether_special_tokens_frame_its_prompt(
    server: InProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = tokenizers.Tokenizer.from_str(server.engine.tokenizer._core.to_str())
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END} $0", special_tokens=[(END, core.token_to_id(END))]
    )
    monkeypatch.setattr(server.engine.tokenizer, "_core", core)
    framed, bare = (
        client.complete("the cat", max_tokens=1, add_special_tokens=added)["usage"]["prompt_tokens"]
        for added in (True, False)
    )
    assert framed == bare + 1 == client.complete("the cat", max_tokens=1)["usage"]["prompt_tokens"]
    reply = client.post("/v1/completions", {"prompt": "a", "add_special_tokens": "no"})
    assert reply.status == 400 and "true or false" in reply.problem


def test_several_prompts_are_answered_in_order(client: Client) -> None:
    prompts = ["the cat", "that is", "and then the hat"]
    alone = [only(client.complete(prompt, **GREEDY))["text"] for prompt in prompts]
    together = client.complete(prompts, **GREEDY)
    assert [choice["text"] for choice in together["choices"]] == alone
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    assert together["usage"]["prompt_tokens"] == sum(
        client.complete(prompt, **GREEDY)["usage"]["prompt_tokens"] for prompt in prompts
    )
    lists = [[7, 8, 9], [10, 11]]
    assert [c["text"] for c in client.complete(lists, **GREEDY)["choices"]] == [
        only(client.complete(ids, **GREEDY))["text"] for ids in lists
    ]
    mixed = client.complete([[7, 8, 9], "the cat"], **GREEDY)["choices"]
    assert mixed[1]["text"] == alone[0]


def test_choices_of_prompts_lie_next_to_each_other(client: Client) -> None:
    answer = client.complete(["the cat", "that is"], n=2, seed=5, max_tokens=12, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    alone = client.complete("that is", n=2, seed=5, max_tokens=12, ignore_eos=True)
    assert [c["text"] for c in alone["choices"]] == [c["text"] for c in answer["choices"][2:]]
    assert answer["usage"]["completion_tokens"] == 48
    once = client.complete(["the cat", "that is"], max_tokens=1)["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens"] == once


def test_token_ids_are_returned_when_asked_for(server: InProcess, client: Client) -> None:
    choice = only(client.complete([5, 6, 7], **GREEDY, return_token_ids=True))
    assert len(choice["token_ids"]) == 24
    assert server.engine.tokenizer is not None
    assert server.engine.tokenizer.decode(choice["token_ids"]) == choice["text"]
    echoed = only(client.complete([5, 6, 7], **GREEDY, return_token_ids=True, echo=True))
    assert echoed["token_ids"] == [5, 6, 7, *choice["token_ids"]]


def test_echo_puts_the_prompt_before_the_answer(client: Client) -> None:
    text = only(client.complete(PROMPT, **GREEDY))["text"]
    assert only(client.complete(PROMPT, **GREEDY, echo=True))["text"] == PROMPT + text
    assert only(client.complete(PROMPT, max_tokens=0, echo=True))["text"] == PROMPT
    chunks = client.stream(PATH, prompt=PROMPT, **GREEDY, echo=True)
    assert joined(chunks) == PROMPT + text


def test_no_tokens_may_be_asked_for(client: Client) -> None:
    answer = client.complete(PROMPT, max_tokens=0)
    assert (only(answer)["text"], only(answer)["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0


# -- how tokens are sampled -----------------------------------------------------------------------


def sampled(client: Client, **fields: Json) -> list[int]:
    asked = {"max_tokens": 24, "ignore_eos": True, **fields}
    return only(client.complete("that", **asked, return_token_ids=True))["token_ids"]


def test_a_seed_determines_the_sampled_tokens(client: Client) -> None:
    first = sampled(client, seed=1)
    assert sampled(client, seed=1) == first
    assert sampled(client, seed=2) != first
    assert sampled(client, seed=-(2**63)) == sampled(client, seed=-(2**63))
    assert sampled(client) != sampled(client), "each request without a seed has one of its own"


def test_choices_differ_unless_they_are_greedy(client: Client) -> None:
    def texts(**fields: Json) -> list[str]:
        answer = client.complete("that", n=4, max_tokens=12, ignore_eos=True, **fields)
        return [choice["text"] for choice in answer["choices"]]

    assert len({*texts(seed=3)}) == 4
    assert texts(seed=3) == texts(seed=3)
    assert len({*texts(temperature=0)}) == 1


def test_a_temperature_of_zero_ignores_seeds(client: Client) -> None:
    greedy = sampled(client, temperature=0)
    assert sampled(client, temperature=0, seed=4) == greedy
    assert sampled(client, temperature=0, seed=5, top_p=0.5, top_k=7) == greedy


@pytest.mark.parametrize("cold", [9e-4, 1e-4, 1e-40, 1e-320, 5e-324])
def test_hardly_any_temperature_is_greedy(client: Client, cold: float) -> None:
    assert sampled(client, temperature=cold) == sampled(client, temperature=0)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 0}, {"min_p": 1}, {"top_p": 1e-320}])
def test_the_narrowest_top_k_or_top_p_is_greedy(client: Client, narrow: Json) -> None:
    assert sampled(client, seed=1, **narrow) == sampled(client, temperature=0)


@pytest.mark.parametrize("wide", [{"top_k": 0}, {"top_k": -1}, {"top_k": 10**30}, {"top_p": 1.0}])
def test_the_widest_choice_leaves_all_tokens(client: Client, wide: Json) -> None:
    assert sampled(client, seed=1, **wide) == sampled(client, seed=1)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_keep_tokens_from_coming_again(client: Client, penalty: str) -> None:
    once = sampled(client, temperature=0, max_tokens=100, **{penalty: 100})
    assert len({*once}) == 100
    again = sampled(client, temperature=0, max_tokens=100)
    assert len({*again}) < 100, "the model repeats itself otherwise"


def test_a_repetition_penalty_counts_the_prompt(client: Client) -> None:
    eager = sampled(client, temperature=0, repetition_penalty=0.01)
    assert len({*eager}) == 1


# -- where answers end ----------------------------------------------------------------------------


def test_an_answer_ends_at_a_stop_id(client: Client) -> None:
    ids = sampled(client, temperature=0)
    asked = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    choice = only(client.complete("that", **asked, stop_token_ids=[ids[7], 100_000, -1]))
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == ids[: ids.index(ids[7]) + 1]
    before = only(client.complete("that", **{**asked, "max_tokens": ids.index(ids[7])}))
    assert choice["text"] == before["text"], "the token that ends it is no text"


def test_an_answer_ends_where_the_model_ends_it(client: Client) -> None:
    def answer(seed: int, **fields: Json) -> Json:
        asked = {"temperature": 1.5, "max_tokens": 200, "return_token_ids": True}
        return only(client.complete("that", **asked, seed=seed, **fields))

    # The first ends soon. Should its tokens be others somewhere, one of the rest will do.
    tried = ((seed, answer(seed, ignore_eos=True)) for seed in (17, *range(17)))
    seed, on = next((seed, choice) for seed, choice in tried if 0 in choice["token_ids"])
    ended = answer(seed)
    assert ended["token_ids"] == on["token_ids"][: on["token_ids"].index(0) + 1]
    assert (ended["finish_reason"], on["finish_reason"]) == ("stop", "length")


def stop_strings(text: str) -> Iterator[list[str]]:
    yield [text[5:7]]
    yield [text[0]]
    yield [text[6:11], text[5:8]]
    yield [text[4:9] + "nothing like this", text[8:10]]
    yield [text[-3:] + "x"]
    yield ["\x00never\x00"]


def test_an_answer_ends_before_a_stop_string(client: Client) -> None:
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    whole = only(client.complete(**asked))["text"]
    for stops in stop_strings(whole):
        found = [whole.index(stop) for stop in stops if stop in whole]
        choice = only(client.complete(**asked, stop=stops))
        assert choice["text"] == (whole[: min(found)] if found else whole), stops
        assert choice["finish_reason"] == ("stop" if found else "length")
        chunks = client.stream(PATH, **asked, stop=stops)
        assert joined(chunks) == choice["text"]
        assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert only(client.complete(**asked, stop=whole[5:7]))["text"] == whole[:5].split(whole[5:7])[0]


# -- streams --------------------------------------------------------------------------------------


def test_a_stream_says_what_a_whole_answer_says(client: Client) -> None:
    asked = {"prompt": ["the cat", [9, 9, 9]], "n": 2, "seed": 7, "max_tokens": 40}
    whole = client.complete(**asked, return_token_ids=True, logprobs=2)
    chunks = client.stream(PATH, **asked, return_token_ids=True, logprobs=2)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert [i for c in mine for i in c["token_ids"]] == choice["token_ids"]
        for name, values in choice["logprobs"].items():
            assert [v for c in mine for v in c["logprobs"][name]] == values


def test_a_stream_has_comments_that_keep_its_connection_open(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "KEEP_ALIVE_S", 0.001)
    asked = {"prompt": PROMPT, "stream": True, **GREEDY, "ignore_eos": True}
    events = client.post(PATH, asked).body.decode().split("\n\n")
    comments = [event for event in events if event.startswith(":")]
    assert set(comments) == {": keep-alive"}
    data = [event for event in events if event and not event.startswith(":")]
    assert all(event.startswith("data: ") for event in data) and data[-1] == "data: [DONE]"
    monkeypatch.undo()
    pieces = [json.loads(event.removeprefix("data: ")) for event in data[:-1]]
    assert joined(pieces) == only(client.complete(PROMPT, **GREEDY, ignore_eos=True))["text"]


def test_a_stream_ends_with_what_was_used_if_asked_to(client: Client) -> None:
    asked = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    *chunks, last = client.stream(PATH, **asked, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None] * 4
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 4)
    last = client.stream(PATH, **asked, return_cached_tokens_details=True)[-1]
    assert "cached_tokens_details" in last["usage"]


# -- logprobs -------------------------------------------------------------------------------------


def test_logprobs_come_with_the_top_others(client: Client) -> None:
    choice = only(client.complete(PROMPT, **GREEDY, logprobs=3, ignore_eos=True))
    logprobs = choice["logprobs"]
    assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert [len(values) for values in logprobs.values()] == [24] * 4
    for token, logprob, top in zip(*list(logprobs.values())[:3], strict=True):
        assert len(top) == 3, "no two tokens have the same name"
        assert top[token] == logprob == max(top.values()) < 0
    none = only(client.complete(PROMPT, **GREEDY, logprobs=0, ignore_eos=True))["logprobs"]
    assert none["top_logprobs"] == [{}] * 24
    assert none["token_logprobs"] == logprobs["token_logprobs"]


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_say_where_tokens_begin(client: Client, echo: bool) -> None:
    asked = {"prompt": "<|user|>" + PROMPT, "seed": 3, "max_tokens": 60, "ignore_eos": True}
    choice = only(client.complete(**asked, echo=echo, logprobs=0))
    logprobs, text = choice["logprobs"], choice["text"]
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0
    named = 0
    for token, begin, end in zip(
        logprobs["tokens"], offsets, [*offsets[1:], len(text)], strict=True
    ):
        if token in text and token.isascii():
            # Bytes that are no character are known as such only when the next token is there.
            assert text[begin:end].lstrip("\ufffd") == token
            named += 1
    assert named > 10
    if echo:
        assert logprobs["tokens"][0] == "<|user|>"
        assert offsets[:2] == [0, 0], "a token that is no text takes no room"
    chunks = client.stream(PATH, **asked, echo=echo, logprobs=0)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [at for c in choices for at in c["logprobs"]["text_offset"]] == offsets


def test_echo_scores_the_prompt_as_generating_it_would(exact: Client) -> None:
    """Bit for bit: what was generated one by one is scored in one go."""
    prompt = fresh_ids(2)
    answer = only(
        exact.complete(prompt, max_tokens=50, seed=1, logprobs=2, ignore_eos=True,
                       return_token_ids=True)
    )  # fmt: skip
    whole = [*prompt, *answer["token_ids"]]
    scored = only(exact.complete(whole, max_tokens=0, echo=True, logprobs=2))["logprobs"]
    assert scored["token_logprobs"][0] is None and scored["top_logprobs"][0] is None
    assert len(scored["tokens"]) == len(whole)
    for name in ("token_logprobs", "top_logprobs", "tokens"):
        assert scored[name][len(prompt) :] == answer["logprobs"][name]
    longer = only(exact.complete(whole, max_tokens=3, echo=True, logprobs=2, temperature=0))
    assert longer["logprobs"]["token_logprobs"][: len(whole)] == scored["token_logprobs"]
    assert len(longer["logprobs"]["tokens"]) == len(whole) + 3


def test_prompts_are_scored_alike_in_steps_of_any_size(serve: Any, exact: Client) -> None:
    one = serve(deterministic=True, chunk_tokens=1).client
    asked = {"prompt": fresh_ids(3), "max_tokens": 0, "echo": True, "logprobs": 1}
    assert only(one.complete(**asked)) == only(exact.complete(**asked))


def test_scoring_a_prompt_reuses_nothing_and_leaves_nothing(client: Client) -> None:
    prompt = fresh_ids(4)
    asked = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1}
    for _ in range(2):
        assert client.complete(**asked)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cached(client, prompt) == 0, "nothing was left behind"
    assert cached(client, prompt) == 4 * PAGE
    assert client.complete(**asked)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


# -- what was cached ------------------------------------------------------------------------------


def cached(client: Client, prompt: Json, **fields: Json) -> int:
    usage = client.complete(prompt, max_tokens=1, **fields)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_a_prefix_is_found_again_and_usage_says_where(server: InProcess, client: Client) -> None:
    prompt = fresh_ids(4)

    def usage() -> Json:
        return client.complete(prompt, max_tokens=1, return_cached_tokens_details=True)["usage"]

    first = usage()
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert first["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 0}
    assert first["miss_reasons"] == [
        {"pool": "kv", "at": 0, "reason": "no prompt with these tokens was kept"}
    ]
    assert usage()["cached_tokens_details"] == {"device": 4 * PAGE, "host": 0, "storage": 0}
    server.settled()
    assert client.post("/admin/flush?tier=device").status == 200
    again = usage()
    assert again["cached_tokens_details"] == {"device": 0, "host": 4 * PAGE, "storage": 0}
    assert again["prompt_tokens_details"] == {"cached_tokens": 4 * PAGE}
    assert "cached_tokens_details" not in client.complete(prompt, max_tokens=1)["usage"]


def test_the_same_answer_comes_from_any_tier(server: InProcess, client: Client) -> None:
    prompt = fresh_ids(3)
    fresh = only(client.complete(prompt, **GREEDY))["text"]
    assert only(client.complete(prompt, **GREEDY))["text"] == fresh
    server.settled()
    client.post("/admin/flush?tier=device")
    assert only(client.complete(prompt, **GREEDY))["text"] == fresh
    client.post("/admin/flush?tier=all")
    assert only(client.complete(prompt, **GREEDY))["text"] == fresh


def test_two_salts_never_share(client: Client) -> None:
    prompt = fresh_ids(3)
    assert cached(client, prompt) == 0
    assert cached(client, prompt, cache_salt="a") == 0
    assert cached(client, prompt, cache_salt="b") == 0
    assert cached(client, prompt, cache_salt="a") == 3 * PAGE
    assert cached(client, prompt, cache_salt="") == 3 * PAGE
    assert cached(client, prompt, cache_salt="世界 ä") == 0


def test_recomputing_finds_nothing_and_says_the_same(exact: Client) -> None:
    prompt = fresh_ids(3)
    kept = only(exact.complete(prompt, **GREEDY, logprobs=1))
    assert only(exact.complete(prompt, **GREEDY, logprobs=1, recompute=True)) == kept
    assert cached(exact, prompt, recompute=True) == 0
    assert cached(exact, prompt) == 3 * PAGE


def test_sessions_and_priorities_are_taken(server: InProcess, client: Client) -> None:
    prompt = fresh_ids(3)
    before = server.settled()["sessions"]
    assert cached(client, prompt, session_id="me", priority=7) == 0
    assert cached(client, prompt, session_id="me", priority=-7) == 3 * PAGE
    assert server.settled()["sessions"] == before + 1


# -- without a tokenizer --------------------------------------------------------------------------


def test_token_ids_are_served_without_a_tokenizer(bare: Client) -> None:
    asked = {"max_tokens": 6, "temperature": 0, "return_token_ids": True, "logprobs": 2}
    choice = only(bare.complete([5, 6, 7], **asked))
    assert (choice["text"], len(choice["token_ids"])) == ("", 6)
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert choice["logprobs"]["text_offset"] == [0] * 6
    echoed = only(bare.complete([5, 6, 7], **asked, echo=True))
    assert echoed["token_ids"] == [5, 6, 7, *choice["token_ids"]]
    assert echoed["logprobs"]["tokens"][:3] == ["token_id:5", "token_id:6", "token_id:7"]
    chunks = bare.stream(PATH, prompt=[5, 6, 7], **asked)
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == choice["token_ids"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "a text"}),
        (PATH, {"prompt": [[5], "a text"]}),
        (PATH, {"prompt": [5], "stop": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_what_needs_a_tokenizer_is_refused_without_one(bare: Client, path: str, body: Json) -> None:
    reply = bare.post(path, body)
    assert reply.status == 400
    assert "tokenizer" in reply.problem and "; " in reply.problem
