"""Tokenizers: ids as a naive encoder finds them, text that survives, streams that never break."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.models.chat import ChatTemplate, Conversation
from kvtide.models.checkpoint import Checkpoint, open_checkpoint
from kvtide.models.gguf import Metadata
from kvtide.models.gguf.vocabulary import Vocabulary, build
from kvtide.models.model_errors import CheckpointError, TemplateError
from kvtide.models.token_bytes import byte_level, piece
from kvtide.models.tokenizer import Tokenizer, load_tokenizer
from tests.models.gguf_files import f32, write

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   three \n\n newlines\t\ttabs\r\n and the end   ",
    "It's what we'll've done; they'd say 'tis fine.",
    'def f(x: int) -> str:\n    return f"{x:>10}"  # comment\n\n\nclass A:\n\tpass\n',
    "1234567890 3.14159 1,000,000 2²=4 ½ ٣٤٥",
    "naïve café Ünïcödé Straße œuvre",
    "你好，世界。こんにちは 안녕하세요 שלום مرحبا नमस्ते",
    "😀👨‍👩‍👧‍👦🇩🇪 flags & families ❤️",
    "e\u0301 combining, \u200d joiner, \u00a0 no-break, \ufeff mark, \x00 nul",
    '{"key": [1, 2, {"nested": null}]} <div class="x">&amp;</div> ```sh\n$ ls -la | grep x\n```',
    "a" * 300 + " " * 70 + "!" * 40,
]


@pytest.fixture(scope="module")
def smol(smollm2: Checkpoint) -> Tokenizer:
    loaded = load_tokenizer(smollm2)
    assert loaded is not None
    return loaded


# -- byte-level, the default model -----------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_survives(smol: Tokenizer, text: str) -> None:
    assert smol.decode(smol.encode(text)) == text


# SmolLM2 has no tokens for six control characters nor for planes 4 to 11, and drops them. Special
# tokens, which all begin with "<", are no text.
encodable = st.characters(
    max_codepoint=0x3FFFF,
    exclude_categories=["Cs"],
    exclude_characters="<\x04\x06\x13\x14\x16\x1d",
)


@settings(max_examples=100, deadline=None)
@given(text=st.text(encodable))
def test_any_text_survives(smol: Tokenizer, text: str) -> None:
    assert smol.decode(smol.encode(text, add_special=False)) == text


class NaiveBPE:
    """Words by GPT-2's rule with digits apart, then the first-listed merge again and again."""

    WORDS = regex.compile(
        r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def __init__(self, metadata: Metadata) -> None:
        merges = metadata.texts("tokenizer.ggml.merges")
        self.rank = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        self.ids = {token: i for i, token in enumerate(metadata.texts("tokenizer.ggml.tokens"))}
        self.letters = {byte_level(token): token for token in self.ids if len(token) == 1}

    def encode(self, text: str) -> list[int]:
        # A digit ends the word before it, so blanks before one are a word of their own.
        runs = regex.split(r"(\p{N})", text)
        words = [word for run in runs for word in self.WORDS.findall(run)]
        return [self.ids[part] for word in words for part in self._word(word)]

    def _word(self, word: str) -> list[str]:
        parts = [self.letters[bytes([byte])] for byte in word.encode()]
        while pairs := [pair for pair in itertools.pairwise(parts) if pair in self.rank]:
            first = min(pairs, key=self.rank.__getitem__)
            at = next(i for i in range(len(parts)) if tuple(parts[i : i + 2]) == first)
            parts[at : at + 2] = ["".join(first)]
        return parts


def _scrambled(order: random.Random) -> str:
    words = [word for text in TEXTS[:-1] for word in regex.findall(r"\s+|\S+", text)]
    return "".join(order.choice(words) for _ in range(order.randrange(12)))


def test_ids_are_those_of_a_naive_encoder(smol: Tokenizer, smollm2: Checkpoint) -> None:
    assert smollm2.gguf is not None
    naive, order = NaiveBPE(smollm2.gguf.metadata), random.Random(1)
    for text in TEXTS[:-1] + [_scrambled(order) for _ in range(200)]:
        assert smol.encode(text) == naive.encode(text), text


def test_special_tokens_are_single_ids_and_no_text(smol: Tokenizer) -> None:
    assert smol.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert smol.decode([1, 4093, 198, 6004, 2]) == "user\nhi"
    assert smol.token_bytes(1) == b"<|im_start|>"
    assert (smol.special.bos_id, smol.special.eos_id) == (1, 2)
    assert smol.special.stop_ids == {0, 2}
    assert smol.size == 49_152


def test_halves_of_characters_are_joined_or_marked(smol: Tokenizer) -> None:
    text = json.loads(r'"\ud83d\ude00 \ud83d!"')
    assert smol.decode(smol.encode(text)) == "😀 \ufffd!"
    lone = [{"role": "user", "content": "a\ud83d\ude00b\udc00"}]
    assert "a😀b\ufffd" in smol.decode(smol.encode_chat(Conversation(lone)))


def test_ids_outside_the_vocabulary_are_no_text(smol: Tokenizer) -> None:
    assert smol.decode([49_152, 6004, 10**9]) == "hi"


def test_any_ids_decode_as_the_package_decodes_them(smol: Tokenizer) -> None:
    order = random.Random(2)
    for _ in range(500):
        ids = [order.randrange(smol.size) for _ in range(order.randrange(1, 30))]
        assert smol.decode(ids) == smol._core.decode(ids, skip_special_tokens=True)


# -- streams ---------------------------------------------------------------------------------------


def _cut(ids: list[int], order: random.Random) -> Iterator[list[int]]:
    while ids:
        count = order.randrange(4)
        yield ids[:count]
        ids = ids[count:]


def _streamed(tokenizer: Tokenizer, ids: list[int], seed: int) -> list[str]:
    stream = tokenizer.detokenizer()
    texts = [stream.feed(part) for part in _cut(ids, random.Random(seed))]
    return [*texts, stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_is_the_text_and_each_part_is_whole(smol: Tokenizer, text: str) -> None:
    ids = smol.encode(text)
    for seed in range(8):
        parts = _streamed(smol, ids, seed)
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


def test_a_stream_of_any_ids_is_their_text(smol: Tokenizer) -> None:
    order = random.Random(4)
    for seed in range(300):
        ids = [order.randrange(smol.size) for _ in range(40)]
        assert "".join(_streamed(smol, ids, seed)) == smol.decode(ids)


def test_a_character_waits_for_its_last_byte(smol: Tokenizer) -> None:
    ids = smol.encode("😀")
    assert len(ids) > 1
    stream = smol.detokenizer()
    assert [stream.feed([token]) for token in ids] == [*[""] * (len(ids) - 1), "😀"]
    stream = smol.detokenizer()
    assert stream.feed(ids[:-1]) == ""
    assert stream.feed(smol.encode("x")) == "\ufffdx"
    assert stream.feed(ids[:-1]) == "" and stream.finish() == "\ufffd"


# -- pieces ----------------------------------------------------------------------------------------

_WORDS = [
    "▁the", "▁t", "he", "in", "▁in", "ing", "the", "er", "▁wat", "water", "▁water", "at", "wa",
    "ter", "te", "▁a", "an", "▁an", "and", "▁and", "nd", "aa", "aaa", "▁▁", "th", "▁w",
]  # fmt: skip
_LETTERS = ["▁", *"abcdefghijklmnopqrstuvwxyz", "é"]
_CONTROL = ["<unk>", "<s>", "</s>", "<end_of_turn>"]


def _piece_metadata(**more: object) -> Metadata:
    """A small SentencePiece vocabulary in the order of Llama's."""
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    user = ["\n\n", "<table>"]
    tokens = [*_CONTROL, *single, *user, *_WORDS, *_LETTERS]
    kinds = [2, 3, 3, 3, *[6] * 256, *[4] * len(user), *[1] * len(_WORDS + _LETTERS)]
    order = random.Random(9)
    scores = [-float(i) for i in order.sample(range(len(_WORDS)), len(_WORDS))]
    plain = [0.0] * (len(_CONTROL) + 256 + len(user))
    ids = {"unknown": 0, "bos": 1, "eos": 2}
    values: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [*plain, *scores, *[-1000.0] * len(_LETTERS)],
        **{f"tokenizer.ggml.{role}_token_id": i for role, i in ids.items()},
    }
    return Metadata(Path("small.gguf"), {**values, **more})


def _gguf(tmp_path: Path, metadata: Metadata) -> Checkpoint:
    """A model with this vocabulary, and just enough of everything else."""
    sizes = ("block_count", "context_length", "embedding_length", "feed_forward_length",
             "attention.head_count")  # fmt: skip
    model: dict[str, object] = {f"llama.{size}": 8 for size in sizes}
    model |= {"general.architecture": "llama", "llama.attention.layer_norm_rms_epsilon": 1e-5}
    embedding = {"token_embd.weight": f32(torch.zeros(400, 8))}
    return open_checkpoint(write(tmp_path / "v.gguf", {**model, **metadata.values}, embedding))


def _pieces(tmp_path: Path, **more: object) -> Tokenizer:
    loaded = load_tokenizer(_gguf(tmp_path, _piece_metadata(**more)))
    assert loaded is not None
    return loaded


class NaivePieces:
    """SentencePiece's rule: the neighbours whose piece scores highest merge, leftmost first."""

    def __init__(self, metadata: Metadata) -> None:
        self.ids = {token: i for i, token in enumerate(metadata.texts("tokenizer.ggml.tokens"))}
        scores = metadata.numbers("tokenizer.ggml.scores")
        self.score = {token: scores[self.ids[token]] for token in [*_WORDS, *_LETTERS]}

    def encode(self, text: str) -> list[int]:
        parts = list(text.replace(" ", "▁"))
        while True:
            joined = [a + b for a, b in pairwise(parts)]
            found = [(-self.score[j], i) for i, j in enumerate(joined) if j in self.score]
            if not found:
                return [i for part in parts for i in self._ids(part)]
            at = min(found)[1]
            parts[at : at + 2] = [joined[at]]

    def _ids(self, part: str) -> list[int]:
        if part in self.score:
            return [self.ids[part]]
        return [self.ids[f"<0x{byte:02X}>"] for byte in part.encode()]


def test_pieces_merge_by_score(tmp_path: Path) -> None:
    naive, order = NaivePieces(_piece_metadata()), random.Random(3)
    pieces = _pieces(tmp_path, **{"tokenizer.ggml.add_space_prefix": False})
    for _ in range(400):
        text = "".join(order.choice("  aaththeewinrntd😀é\tZ") for _ in range(order.randrange(25)))
        assert pieces.encode(text, add_special=False) == naive.encode(text), text
        assert pieces.decode(pieces.encode(text)) == text


def test_a_text_begins_with_a_space_where_the_vocabulary_wants_one(tmp_path: Path) -> None:
    pieces = _pieces(tmp_path)
    ids = pieces.encode("the water and é😀")
    spelled = [pieces.token_bytes(i) for i in ids]
    assert spelled[0] == b"<s>" and spelled[1].startswith(b" t")
    assert pieces.decode(ids) == "the water and é😀"
    assert pieces.decode(pieces.encode("  the")) == "  the"
    assert pieces.encode("the", add_special=False) == pieces.encode("the")[1:]


def test_only_the_space_that_was_put_before_a_text_goes(tmp_path: Path) -> None:
    pieces = _pieces(tmp_path)
    prompt, answer = pieces.encode("in"), pieces.encode("the water", add_special=False)
    assert pieces.detokenizer().feed(answer) == "the water"
    assert pieces.detokenizer(after=prompt).feed(answer) == " the water"
    assert pieces.detokenizer(after=[*prompt, 3]).feed(answer) == "the water"
    stream = pieces.detokenizer()
    assert next(stream.feed([i]) for i in [1, *answer]) == ""


def test_what_the_user_defined_is_never_merged_into(tmp_path: Path) -> None:
    pieces = _pieces(tmp_path, **{"tokenizer.ggml.add_space_prefix": False})
    spelled = [pieces.token_bytes(i) for i in pieces.encode("the\n\n\nin<table>the")]
    assert b"\n\n" in spelled and b"<table>" in spelled and spelled.count(b"\n") == 1
    assert pieces.decode(pieces.encode("the\n\n\nin<table>the")) == "the\n\n\nin<table>the"


def test_bytes_of_pieces_stream_as_characters(tmp_path: Path) -> None:
    pieces = _pieces(tmp_path)
    ids = pieces.encode("the 😀 in ü", add_special=False)
    for seed in range(20):
        parts = _streamed(pieces, ids, seed)
        assert "".join(parts) == "the 😀 in ü" and "\ufffd" not in "".join(parts)
    whole, broken = pieces.encode("你", add_special=False)[1:], 4 + 0xE4
    assert pieces.decode([*whole, broken]) == "你\ufffd"


def test_a_model_stops_at_every_token_that_ends_a_turn(tmp_path: Path) -> None:
    assert _pieces(tmp_path).special.stop_ids == {2, 3}
    more = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.add_eos_token": True}  # fmt: skip
    pieces = _pieces(tmp_path, **more)
    assert pieces.special.stop_ids == {2, 3, 7}
    assert pieces.encode("in")[-1] == 2 and 1 not in pieces.encode("in")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"tokenizer.ggml.model": "t5"}, "a tokenizer of kind t5 is not read.*tokenizer.json"),
        ({"tokenizer.ggml.model": "gpt2"}, "cuts words by the rule default.*tokenizer.json"),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "gpt-2",
                "tokenizer.ggml.merges": ["q zz"],
            },
            "merges do not fit its tokens.*; download the file again",
        ),
        ({"tokenizer.ggml.scores": [0.0]}, "tokens and 1 scores; download the file again"),
        ({"tokenizer.ggml.token_type": [1]}, "tokens and 1 token types; download the file again"),
    ],
)
def test_an_unknown_vocabulary_is_refused(
    tmp_path: Path, more: dict[str, object], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        _pieces(tmp_path, **more)


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(_gguf(tmp_path, Metadata(Path("x"), {}))) is None


def _cut_words(rule: str, text: str) -> list[str]:
    values: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    vocabulary = Vocabulary.of(Metadata(Path("x"), values))
    assert vocabulary is not None
    cut = build(vocabulary).pre_tokenizer.pre_tokenize_str(text)
    return [byte_level(word).decode() for word, _ in cut]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("gpt-2", ["It", "'s", " 12345", " (", "ok", ")", "\n", "\n", "X", "'", "S", "  ",
                   " y"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " (", "ok", ")", "\n", "\n", "X",
                    "'", "S", "  ", " y"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " (", "ok", ")\n\n", "X", "'S", "  ", " y"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " (", "ok", ")\n\n", "X", "'S", "  ",
                   " y"]),
    ],
)  # fmt: skip
def test_words_are_cut_by_the_rule_that_the_file_names(rule: str, words: list[str]) -> None:
    assert _cut_words(rule, "It's 12345 (ok)\n\nX'S   y") == words


# -- folders -------------------------------------------------------------------------------------


def _folder(tmp_path: Path, core: tokenizers.Tokenizer, **files: object) -> Checkpoint:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, eos_token_id=[2, 9],
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    core.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return open_checkpoint(tmp_path)


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    _folder(tmp_path, tokenizers.Tokenizer(tokenizers.models.BPE()))
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer(open_checkpoint(tmp_path)) is None


def test_a_byte_level_tokenizer_json_gives_the_same_tokenizer(
    tmp_path: Path, smol: Tokenizer
) -> None:
    settings_ = {
        "bos_token": {"content": "<|im_start|>", "lstrip": False},
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "chat_template": [
            {"name": "rag", "template": "no"},
            {"name": "tool_use", "template": "{{ eos_token }}{{ tools }}"},
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
        ],
    }
    smol._core.enable_truncation(4)
    checkpoint = _folder(tmp_path, smol._core, tokenizer_config=settings_)
    smol._core.no_truncation()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    loaded = load_tokenizer(checkpoint)
    assert loaded is not None
    for text in TEXTS:
        assert loaded.encode(text) == smol.encode(text)
        assert "".join(_streamed(loaded, loaded.encode(text), 1)) == text
    assert (loaded.special.bos_id, loaded.special.eos_id) == (1, 2)
    assert loaded.special.stop_ids == {2, 9, 0}
    assert loaded.render(Conversation([{"content": "hi"}])) == "<|im_start|>hi"
    assert loaded.tool_chat is not None
    assert loaded.tool_chat.render(Conversation([], tools=[{}])) == "<|im_end|>[{}]"


def test_a_tokenizer_json_of_pieces_gives_the_same_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    pieces = _pieces(tmp_path / "gguf")
    loaded = load_tokenizer(_folder(tmp_path, pieces._core))
    assert loaded is not None and loaded.chat is None
    for text in ["the water 😀", "  in", "an <table> and\n\n"]:
        ids = pieces.encode(text)
        assert loaded.encode(text) == ids
        assert loaded.decode(ids) == pieces.decode(ids) == pieces._core.decode(ids)
    with pytest.raises(TemplateError, match="no chat template; ask for a completion"):
        loaded.encode_chat(Conversation([{"role": "user", "content": "hi"}]))


def test_a_template_file_comes_before_the_settings(tmp_path: Path, smol: Tokenizer) -> None:
    _folder(tmp_path, smol._core, tokenizer_config={"chat_template": "settings"})
    (tmp_path / "chat_template.jinja").write_text("file")
    loaded = load_tokenizer(open_checkpoint(tmp_path))
    assert loaded is not None and loaded.render(Conversation([])) == "file"
    assert loaded.tool_chat is None
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("tools")
    loaded = load_tokenizer(open_checkpoint(tmp_path))
    assert loaded is not None and loaded.tool_chat is not None
    assert (loaded.render(Conversation([])), loaded.tool_chat.render(Conversation([]))) == (
        "file",
        "tools",
    )
    given = load_tokenizer(open_checkpoint(tmp_path), "given")
    assert given is not None and given.render(Conversation([])) == "given"
    assert given.tool_chat is None, "a template that is given is for all conversations"


def test_a_tokenizer_json_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="a"))
    core.decoder = tokenizers.decoders.WordPiece()
    checkpoint = _folder(tmp_path, core)
    with pytest.raises(CheckpointError, match=r"decoded by WordPiece.*serve .* by token ids"):
        load_tokenizer(checkpoint)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match=r"not readable as a tokenizer \(.*; download it ag"):
        load_tokenizer(checkpoint)


def test_tokens_are_read_as_they_are_written() -> None:
    assert byte_level("ĠHello") == b" Hello" and byte_level("Ċ") == b"\n"
    assert byte_level("Ã©") == "é".encode() and byte_level("<｜User｜>") == "<｜User｜>".encode()
    assert (
        piece("▁Hello▁") == b" Hello " and piece("<0x0A>") == b"\n" and piece("<0x0>") == b"<0x0>"
    )


# -- conversations -------------------------------------------------------------------------------

CHAT = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
]


def test_smollm2_talks_in_its_own_format(smol: Tokenizer) -> None:
    system = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    )
    asked = (
        f"{system}<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n4"
        "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
    )
    assert smol.render(Conversation(CHAT)) == asked + "<|im_start|>assistant\n"
    assert smol.render(Conversation(CHAT, add_generation_prompt=False)) == asked
    own = [{"role": "system", "content": "Be brief."}]
    assert smol.render(Conversation(own)).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im"
    )
    ids = smol.encode_chat(Conversation(CHAT))
    assert ids[0] == 1 and ids.count(1) == 5 and ids.count(2) == 4


TEMPLATE = """
{%- set ns = namespace(count=0) -%}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- bos_token }}{{ message.role | upper }}: {% generation %}{{ message.content | trim }}
    {%- endgeneration %}{{ eos_token }}
{% endfor %}
    {% if add_generation_prompt %}
  asked
    {% endif %}
{%- if tools %}{{ tools | tojson(indent=1) }}{% endif %}
{%- if add_generation_prompt %}{{ ns.count }}>{% endif %}
{{- dict(a=thinking).a }}"""
TOOLS = [{"name": "f", "arguments": {"z": "<é>", "a": [1, None, True]}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def test_templates_render_as_transformers_renders_them(smol: Tokenizer) -> None:
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=smol._core, **TOKENS)
    messages = [*CHAT, {"role": "skip", "content": ""}, {"role": "user", "content": " \n x "}]
    for prompt in (True, False):
        for tools in (None, TOOLS):
            wanted = oracle.apply_chat_template(
                messages, tools=tools, chat_template=TEMPLATE, tokenize=False,
                add_generation_prompt=prompt, thinking="on",
            )  # fmt: skip
            asked = Conversation(messages, prompt, tools, {"thinking": "on"})
            assert ChatTemplate(TEMPLATE, TOKENS).render(asked) == wanted


def test_a_template_knows_the_date() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, lambda: datetime(2026, 11, 15))
    assert template.render(Conversation([])) == "15 Nov 2026"


def test_a_template_may_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateError, match="refuses this conversation: roles must alternate"):
        template.render(Conversation([]))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__x=1) }}",
        "{{ dict.fromkeys('a') }}",
    ],
)
def test_what_a_template_may_not_do_is_a_refusal(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(TemplateError, match=r"does not take this conversation.*; send messages"):
        template.render(Conversation([{"role": "user", "content": "hi"}]))


def test_a_conversation_is_json() -> None:
    with pytest.raises(TemplateError, match="not JSON serializable"):
        ChatTemplate("x", {}).render(Conversation([{"content": object()}]))


def test_a_template_that_does_not_parse_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"chat template does not parse.*; use the one"):
        ChatTemplate("{% if %}", {})
