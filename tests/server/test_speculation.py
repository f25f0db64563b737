"""Speculation over HTTP: flags, what is found beside the weights, the text, and what is counted."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from kvtide.engine.speculation.accept_length_stats import PrefixOrigin
from kvtide.models.model_errors import CheckpointError
from kvtide.server import setting_sources
from kvtide.server.setting_values import SettingsError
from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import open_engine
from tests.grids import everything
from tests.models import tiny_mtp
from tests.models.tiny import VOCABULARY
from tests.models.tiny_eagle3 import tiny_eagle3
from tests.server.serving import PAGE, ForkedChild, InProcess
from tests.server.talking import Client, joined

Serve = Callable[..., InProcess]
REPETITIVE = "the cat sat on the mat and then the hat, the cat sat on the mat"
"""Longer than a page, and answered with runs of commas."""
ANSWER = 48
BODIES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "max_tokens": 7},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 0.4, "seed": 5, "logprobs": 2},
    {"temperature": 1.0, "seed": 6, "n": 3, "presence_penalty": 0.5},
    {"temperature": 0, "stop": ["333"]},
    {"temperature": 0, "stop": [",,,,,"]},
    {"temperature": 0, "stop_token_ids": [64]},
)


def ask(client: Client, body: dict[str, Any], **fields: Any) -> Any:
    return client.complete(REPETITIVE, **{"max_tokens": ANSWER, **body, **fields})


def choices_of(answer: Any) -> Any:
    """All that a client may not be able to tell apart."""
    return answer["choices"], answer["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def draft(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_draft(model_folder, tmp_path_factory.mktemp("draft"))


def save_draft(model: Path, folder: Path) -> Path:
    """One that knows every token of the target, so that it is right now and then."""
    config = json.loads((model / "config.json").read_text())
    return tiny_eagle3(config, folder, captures=(0, 1, 2), draft_vocabulary=None)


@pytest.fixture(scope="module")
def plain(model_folder: Path) -> Iterator[list[Any]]:
    """The answers of a server that does not speculate."""
    chosen = Settings(
        model=str(model_folder), port=0, page_tokens=PAGE, storage="none", deterministic=True
    )
    server = InProcess(chosen)
    yield [ask(server.client, body) for body in BODIES]
    server.close()


# -- the text ---------------------------------------------------------------------------------


@pytest.mark.quick(drafts=[1, 16])
@pytest.mark.parametrize("drafts", [1, 3, 16])
def test_ngram_changes_no_answer(serve: Serve, plain: list[Any], drafts: int) -> None:
    server = serve(speculate="ngram", draft_tokens=drafts, deterministic=True)
    for body, expected in zip(BODIES, plain, strict=True):
        assert choices_of(ask(server.client, body)) == choices_of(expected)
    lengths = server.engine.accept_length_stats
    assert lengths is not None and lengths.accepted and lengths.rejected
    server.settled()


@pytest.mark.quick(drafts=[5])
@pytest.mark.parametrize("drafts", [1, 5])
def test_a_draft_model_changes_no_answer(
    serve: Serve, plain: list[Any], draft: Path, drafts: int
) -> None:
    server = serve(draft=str(draft), draft_tokens=drafts, deterministic=True)
    assert "draft" in server.engine.cache.memory.draft_sidecars[0]
    for _ in range(2):  # The second time from cached pages.
        for body, expected in zip(BODIES, plain, strict=True):
            assert choices_of(ask(server.client, body)) == choices_of(expected)
    lengths = server.engine.accept_length_stats
    assert lengths is not None and lengths.rejected
    server.settled()


def test_a_run_ends_within_its_drafts(serve: Serve) -> None:
    """At its stop string or longest, with the tokens behind neither sent nor counted."""
    server = serve(speculate="ngram", draft_tokens=16)
    whole = ask(server.client, {"temperature": 0})["choices"][0]["text"]
    assert ",,,,," in whole
    for tokens in range(1, ANSWER, 1 if everything() else 5):
        cut = ask(server.client, {"temperature": 0, "max_tokens": tokens})
        assert cut["usage"]["completion_tokens"] == tokens
        assert cut["choices"][0]["finish_reason"] == "length"
    stopped = ask(server.client, {"temperature": 0, "stop": ",,,"})
    assert stopped["choices"][0]["text"] == whole.split(",,,")[0]
    assert stopped["choices"][0]["finish_reason"] == "stop"


def test_streams_are_the_same_text(serve: Serve, plain: list[Any]) -> None:
    server = serve(speculate="ngram")
    chunks = server.client.stream(
        "/v1/completions",
        prompt=REPETITIVE,
        max_tokens=ANSWER,
        temperature=0,
        stream_options={"include_usage": True},
    )
    assert joined(chunks) == plain[0]["choices"][0]["text"]
    counted = chunks[-1]["usage"]["completion_tokens_details"]
    assert counted["accepted_prediction_tokens"] > 0


# -- per request, and what is counted ---------------------------------------------------------


def test_usage_counts_drafts_where_a_server_speculates(serve: Serve, client: Client) -> None:
    server = serve(speculate="ngram")
    details = ask(server.client, {"temperature": 0}, return_cached_tokens_details=True)["usage"]
    counted = details["completion_tokens_details"]
    lengths = server.engine.accept_length_stats
    assert lengths is not None
    assert counted == {
        "accepted_prediction_tokens": lengths.accepted,
        "rejected_prediction_tokens": lengths.rejected,
    }
    steps = details["speculation"]["verify_steps"]
    assert 0 < steps < ANSWER
    assert details["speculation"]["accept_length"] == round(1 + lengths.accepted / steps, 3)
    chat = server.client.chat("the cat the cat", max_tokens=8)["usage"]
    assert "completion_tokens_details" in chat and "speculation" not in chat
    assert "completion_tokens_details" not in ask(client, {})["usage"]


def test_other_apis_count_drafts_too(serve: Serve, client: Client) -> None:
    server, text, more = serve(speculate="ngram"), REPETITIVE, {"temperature": 0}
    chat = [{"role": "user", "content": text}]
    for path, body in (
        ("/v1/responses", {"input": text, "max_output_tokens": ANSWER, **more}),
        ("/v1/messages", {"messages": chat, "max_tokens": ANSWER, **more}),
    ):
        lengths = server.engine.accept_length_stats
        assert lengths is not None
        accepted, rejected = lengths.accepted, lengths.rejected
        counted = server.client.post(path, body).json()["usage"]["output_tokens_details"]
        assert counted["accepted_prediction_tokens"] == lengths.accepted - accepted
        assert counted["rejected_prediction_tokens"] == lengths.rejected - rejected
        assert lengths.accepted + lengths.rejected > accepted + rejected
        plain = client.post(path, body).json()["usage"].get("output_tokens_details", {})
        assert not {*plain} & {"accepted_prediction_tokens", "rejected_prediction_tokens"}


def test_a_request_may_do_without(serve: Serve) -> None:
    server = serve(speculate="ngram")
    body = {"temperature": 0, "return_cached_tokens_details": True}
    usage = ask(server.client, body, speculate=False)["usage"]
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    assert usage["speculation"] == {"verify_steps": 0, "accept_length": None}
    server.client.chat("the cat the cat", max_tokens=8, speculate=False)
    lengths = server.engine.accept_length_stats
    assert lengths is not None and lengths.accepted + lengths.rejected == 0
    ask(server.client, body, speculate=True)
    assert lengths.accepted > 0


@pytest.mark.parametrize("value", [0, "false", [], {}])
def test_speculate_is_true_or_false(client: Client, value: Any) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        messages = [{"role": "user", "content": "hi"}]
        reply = client.post(path, {"prompt": "hi", "messages": messages, "speculate": value})
        assert reply.status == 400 and reply.json()["error"]["param"] == "speculate"
        assert reply.problem.endswith("send true or false")


def test_metrics_count_verify_steps_by_origin(serve: Serve, draft: Path, client: Client) -> None:
    server = serve(draft=str(draft))
    for _ in range(2):
        ask(server.client, {"temperature": 0})
    found = metrics(server.client)
    lengths = server.engine.accept_length_stats
    assert lengths is not None
    for origin, steps in lengths.steps.items():
        label = f'{{origin="{origin.value}"}}'
        assert found[f"kvtide_accept_length_count{label}"] == steps.total()
        given = sum(length * count for length, count in steps.items())
        assert found[f"kvtide_accept_length_sum{label}"] == given
        inside = found[f'kvtide_accept_length_bucket{{le="2.0",origin="{origin.value}"}}']
        assert inside == steps[1] + steps[2]
    assert found['kvtide_accept_length_count{origin="computed"}'] > 0
    assert found['kvtide_accept_length_count{origin="device"}'] > 0
    assert found['kvtide_draft_tokens_total{verdict="accepted"}'] == lengths.accepted
    assert found['kvtide_draft_tokens_total{verdict="rejected"}'] == lengths.rejected
    assert found['kvtide_accept_length_alarms_total{origin="storage"}'] == 0
    assert not [name for name in metrics(client) if "accept" in name or "draft" in name]


def test_drafts_of_pages_that_are_held_without_them_come_from_the_store(
    serve: Serve, draft: Path
) -> None:
    """A request without drafts computed the pages; then a store is attached that has drafts."""
    url = f"memory:drafts-{time.monotonic_ns()}"
    first = serve(draft=str(draft), storage=url)
    body = {"temperature": 0}
    expected = ask(first.client, body)
    first.settled()
    stored = metrics(first.client)
    assert stored['kvtide_supplemented_pages_total{source="storage"}'] == 0
    second = serve(draft=str(draft))
    assert choices_of(ask(second.client, body, speculate=False)) == choices_of(expected)
    second.settled()
    attached = second.client.send("PUT", "/admin/storage", json.dumps({"url": url}).encode())
    assert attached.status == 200
    assert choices_of(ask(second.client, body)) == choices_of(expected)
    second.settled()
    pages = len(first.engine.tokenizer.encode(REPETITIVE)) // PAGE
    found = metrics(second.client)
    assert found['kvtide_supplemented_pages_total{source="storage"}'] >= pages > 0
    assert choices_of(ask(second.client, body)) == choices_of(expected)
    second.settled()
    found = metrics(second.client)
    assert found['kvtide_supplemented_pages_total{source="host"}'] >= pages


def metrics(client: Client) -> dict[str, float]:
    lines = client.get("/metrics").body.decode().splitlines()
    return {m[1]: float(m[2]) for m in (re.match(r"([^#].*) (\S+)$", line) for line in lines) if m}


# -- a checkpoint's own next-token layer ------------------------------------------------------


ADDS = re.compile(r"(o_proj|out_proj|down_proj|wo_b|w2)(\.weight)?$")
"""Projections into the residual stream."""


ORIGINS = [origin.value for origin in PrefixOrigin]


def save_mtp(name: str, folder: Path) -> Path:
    """A checkpoint with such a layer, and a tokenizer whose tokens are characters.

    What layers add is so little that a token mostly decides the next one, and the next-token layer
    passes the token's embedding on: target and draft agree now and then.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_mtp.config(name)))
    tensors = {
        one: (tensor * 0.3 if ADDS.search(one) else tensor).clone(
            memory_format=torch.contiguous_format
        )
        for one, tensor in tiny_mtp.weights(name).items()
    }
    of_tokens = "mtp.0.e_proj.weight"
    if name in tiny_mtp.PROJECTED:
        of_tokens = tiny_mtp.PROJECTED[name].projection
    else:
        tensors["mtp.0.h_proj.weight"].zero_()
    tensors[of_tokens].copy_(torch.eye(*tensors[of_tokens].shape))
    save_file(tensors, folder / "model.safetensors")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
    vocabulary = {letter: n for n, letter in enumerate([*letters[: VOCABULARY - 1], "\u0120"])}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.quick(name=["deepseek_v3-mtp"])
@pytest.mark.parametrize("name", tiny_mtp.NAMES)
def test_a_checkpoint_with_a_next_token_layer_drafts_without_flags(
    name: str, tmp_path: Path
) -> None:
    """The text is that without drafts, from computed pages and from cached ones."""
    model = save_mtp(name, tmp_path / "model")
    with ForkedChild((str(model), "--deterministic", "--port", "0"), patience_s=120) as server:
        client = server.client()
        assert "\nspeculation: mtp, up to 3 drafts" in server.printed
        counted = []
        for body in BODIES[:5]:
            asked = {"max_tokens": ANSWER if everything() else ANSWER // 2, **body}
            first, again, off = (
                client.complete(5 * REPETITIVE, **asked, speculate=on) for on in (True, True, False)
            )
            assert choices_of(off) == choices_of(first) == choices_of(again)
            assert drafts_of(off) == (0, 0)
            counted += [drafts_of(first), drafts_of(again)]
        accepted, rejected = (sum(each) for each in zip(*counted, strict=True))
        assert accepted > 0 < rejected
        found = metrics(client)
        assert found['kvtide_draft_tokens_total{verdict="accepted"}'] == accepted
        assert found['kvtide_draft_tokens_total{verdict="rejected"}'] == rejected
        steps = [found[f'kvtide_accept_length_count{{origin="{o}"}}'] for o in ORIGINS]
        given = sum(found[f'kvtide_accept_length_sum{{origin="{o}"}}'] for o in ORIGINS)
        assert given == sum(steps) + accepted and steps[0] > 0 < steps[1]
        assert found['kvtide_accept_length_alarms_total{origin="device"}'] == 0


@pytest.mark.parametrize("flags", [{}, {"speculate": "mtp"}])
@pytest.mark.parametrize("shares", [True, False, None])
def test_an_index_that_should_be_shared_by_drafts_is_named_at_the_start(
    speculation: Callable[..., str], tmp_path: Path, shares: bool | None, flags: dict[str, str]
) -> None:
    model = save_mtp("glm_moe_dsa-mtp", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["index_share_for_mtp_iteration"] = shares
    (model / "config.json").write_text(json.dumps(config))
    remark = "; index_share_for_mtp_iteration is not followed: every draft selects its tokens anew"
    expected = "speculation: mtp, up to 3 drafts" + (remark if shares else "")
    assert speculation(model=str(model), **flags) == expected


def drafts_of(answer: Any) -> tuple[int, int]:
    """How many were accepted and rejected."""
    counted = answer["usage"]["completion_tokens_details"]
    return counted["accepted_prediction_tokens"], counted["rejected_prediction_tokens"]


# -- flags ------------------------------------------------------------------------------------


@pytest.fixture
def speculation(model_folder: Path) -> Callable[..., str]:
    """The line about speculation of a server with these settings."""

    def opened(**chosen: Any) -> str:
        serving = open_engine(Settings(**{"model": str(model_folder), "storage": "none", **chosen}))
        serving.engine.cache.close()
        return serving.speculation

    return opened


def test_the_line_names_what_drafts(speculation: Callable[..., str], draft: Path) -> None:
    assert speculation() == "speculation: none"
    assert speculation(speculate="none", draft=str(draft)) == "speculation: none"
    assert speculation(speculate="ngram") == "speculation: ngram, up to 7 drafts"
    assert speculation(draft=str(draft), draft_tokens=7) == (
        f"speculation: eagle3 of {draft}, up to 7 drafts"
    )
    assert speculation(draft=str(draft), speculate="eagle3").startswith("speculation: eagle3 of")


def test_a_draft_beside_the_weights_is_found(
    speculation: Callable[..., str], model_folder: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(model_folder, tmp_path / "model")
    place = model / "draft"
    with pytest.raises(SettingsError, match=r"needs a draft, and there is none at .*; name its"):
        speculation(model=str(model), speculate="eagle3")
    save_draft(model, place)
    found = f"speculation: eagle3 of {place}, up to 3 drafts"
    assert speculation(model=str(model)) == found
    assert speculation(model=str(model), speculate="eagle3") == found
    assert speculation(model=str(model), speculate="none") == "speculation: none"
    assert speculation(model=str(model), speculate="ngram").startswith("speculation: ngram")
    shutil.copy(model / "model.safetensors", place / "model.safetensors")
    sentence = speculation(model=str(model))
    assert sentence.startswith("speculation: none; the draft beside the weights is not used: ")
    assert "fc.weight" in sentence


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        ({"draft": "d", "speculate": "ngram"}, "--speculate ngram drafts without one; drop one"),
        ({"draft": "d", "speculate": "mtp"}, "--speculate mtp drafts without one; drop one"),
    ],
)
def test_contradictions_are_refused(chosen: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        Settings(**chosen)


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        (("draft_tokens", "0"), "--draft-tokens is 0; use 1 to 16"),
        (("draft_tokens", "17"), "--draft-tokens is 17; use 1 to 16"),
        (("speculate", "medusa"), "--speculate is 'medusa'; use ngram, eagle3, mtp, none"),
        (("draft", ""), "--draft is empty"),
    ],
)
def test_values_out_of_range_are_refused(flag: tuple[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        setting_sources.read(dict([flag]), {})
    assert str(refusal.value) == sentence


def test_what_the_model_does_not_have_is_refused(
    speculation: Callable[..., str], draft: Path, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match="has no layer for multi-token prediction"):
        speculation(speculate="mtp")
    with pytest.raises(CheckpointError, match="no such file or folder"):
        speculation(draft=str(tmp_path / "nowhere"))
    config = json.loads((draft / "config.json").read_text())
    other = tiny_eagle3({**config, "hidden_size": 48}, tmp_path / "other")
    with pytest.raises(Exception, match=r"hidden size 48, and .* has 32; use a draft that was"):
        speculation(draft=str(other))


def test_a_server_says_at_its_start_what_drafts(model_folder: Path) -> None:
    arguments = (str(model_folder), "--speculate", "ngram", "--draft-tokens", "5", "--port", "0")
    with ForkedChild((*arguments, "--storage", "none")) as server:
        server.client()
        assert "\nspeculation: ngram, up to 5 drafts\n" in server.printed


@pytest.mark.full
@pytest.mark.parametrize("split", ["--tp", "--pp"])
@pytest.mark.parametrize("drafts", ["ngram", "eagle3"])
def test_ranks_draft(
    model_folder: Path, draft: Path, plain: list[Any], drafts: str, split: str
) -> None:
    arguments = (str(model_folder), split, "2", "--speculate", drafts, "--port", "0")
    if drafts == "eagle3":
        arguments += ("--draft", str(draft))
    with ForkedChild((*arguments, "--storage", "none", "--page-tokens", str(PAGE))) as server:
        client = server.client()
        assert f"speculation: {drafts}" in server.printed
        answer = ask(client, {"temperature": 0})
        assert choices_of(answer) == choices_of(plain[0])
        counted = answer["usage"]["completion_tokens_details"]
        assert sum(counted.values()) > 0


@pytest.mark.full
def test_four_ranks_draft_with_the_models_own_layer(tmp_path: Path) -> None:
    """The draft runs on both ranks of the last of two stages."""
    model = save_mtp("deepseek_v3-mtp", tmp_path / "model")
    arguments = (str(model), "--tp", "2", "--pp", "2", "--deterministic", "--port", "0")
    with ForkedChild((*arguments, "--storage", "none"), patience_s=240) as server:
        client = server.client()
        assert "\nspeculation: mtp, up to 3 drafts" in server.printed
        drafted, plain = (
            client.complete(5 * REPETITIVE, max_tokens=ANSWER, temperature=0, speculate=speculate)
            for speculate in (True, False)
        )
        assert choices_of(drafted) == choices_of(plain)
        assert sum(drafts_of(drafted)) > 0 == sum(drafts_of(plain))
