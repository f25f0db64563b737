"""Text to tokens and back, for a checkpoint that brings a tokenizer.

Encoding is the `tokenizers` package's. Decoding is ours, and has one implementation, the one that
streams: the bytes of tokens are joined and read as UTF-8, and what is not yet a whole character
waits. So text that was streamed is the text of all tokens at once, however they came.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from kvtide.models.chat import ChatTemplate, Conversation
from kvtide.models.chat_templates.builtin import builtin_template
from kvtide.models.checkpoint import Checkpoint
from kvtide.models.gguf.vocabulary import Vocabulary, build
from kvtide.models.model_errors import CheckpointError, TemplateError
from kvtide.models.safetensors_folder import read_json
from kvtide.models.token_bytes import Spelling, byte_level, piece

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of chat templates, as checkpoints publish them."""
_TEMPLATE_FILES = {
    DEFAULT: "chat_template.jinja",
    TOOL_USE: f"additional_chat_templates/{TOOL_USE}.jinja",
}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids with a meaning: where a text begins and ends, and after which ids a model stops."""

    bos_id: int | None
    eos_id: int | None
    stop_ids: frozenset[int]


class Detokenizer:
    """Text from tokens as they come. What was handed out never changes.

    `feed` gives the characters that are complete; `finish` gives what is left, with U+FFFD for
    bytes that are no character. Special tokens are no text, except for those to `keep`.
    """

    def __init__(
        self, spelling: Spelling, *, drop_space: bool, keep: frozenset[int] = frozenset()
    ) -> None:
        self._spelling = spelling
        self._silent = spelling.silent - keep
        self._drop_space = drop_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        silent, spelling = self._silent, self._spelling
        data = b"".join(spelling[i] for i in ids if i not in silent)
        if self._drop_space and data:
            data, self._drop_space = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class Tokenizer:
    """A model's tokenizer. `chat` is None for a model that was not trained to talk, `tool_chat` for
    one that has no template of its own for conversations with tools."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        spelling: Spelling,
        special: SpecialTokens,
        chat: ChatTemplate | None,
        tool_chat: ChatTemplate | None = None,
    ) -> None:
        # Both cut or fill what is encoded; a server decides about lengths itself.
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._spelling = spelling
        self.special = special
        self.chat = chat
        self.tool_chat = tool_chat

    @property
    def size(self) -> int:
        """Tokens, added ones included."""
        return self._core.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text."""
        return self._spelling.silent

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a text; `add_special` frames it as a text that stands alone."""
        # JSON can carry halves of characters, which are no text.
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = self._core.encode(whole, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids from its beginning. Special tokens are no text."""
        stream = self.detokenizer()
        return stream.feed(ids) + stream.finish()

    def detokenizer(
        self, after: Sequence[int] = (), keep: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """For the text that follows these ids, which are usually a prompt's.

        keep  special tokens that are text here
        """
        begins = not after or after[-1] in self._spelling.silent
        drop_space = begins and self._spelling.leading_space
        return Detokenizer(self._spelling, drop_space=drop_space, keep=keep)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, which need not be whole characters."""
        return self._spelling[token_id]

    def special_id(self, text: str) -> int | None:
        """The special token that is written so."""
        token: int | None = self._core.token_to_id(text)
        return token if token in self._spelling.silent else None

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation."""
        if self.chat is None:
            raise TemplateError(
                "this model has no chat template; ask for a completion of a text, or serve it with "
                "--chat-template"
            )
        return self.chat.render(conversation)

    def encode_chat(self, conversation: Conversation) -> list[int]:
        """The ids of a conversation. Its template frames it, so nothing is added."""
        return self.encode(self.render(conversation), add_special=False)


def load_tokenizer(checkpoint: Checkpoint, template: str | None = None) -> Tokenizer | None:
    """The tokenizer that a checkpoint brings; None where it brings none.

    template  the chat template, instead of the checkpoint's
    """
    if checkpoint.gguf is not None:
        vocabulary = Vocabulary.of(checkpoint.gguf.metadata)
        return None if vocabulary is None else _from_gguf(vocabulary, template)
    if "tokenizer.json" not in checkpoint.tokenizer_files:
        return None
    return read_tokenizer(checkpoint.tokenizer_files, checkpoint.config, template)


# -- GGUF --------------------------------------------------------------------------------------


def _from_gguf(vocabulary: Vocabulary, template: str | None) -> Tokenizer:
    tokens = vocabulary.tokens
    spelling = Spelling(
        token=lambda i: tokens[i] if 0 <= i < len(tokens) else None,
        read=byte_level if vocabulary.byte_level else piece,
        silent=frozenset(vocabulary.special),
        leading_space=vocabulary.leading_space,
    )
    roles = {role: vocabulary.named(role) for role in ("bos", "eos")}
    names = {f"{role}_token": tokens[i] for role, i in roles.items() if i is not None}
    source = template or vocabulary.metadata.text("tokenizer.chat_template", "")
    with_tools = vocabulary.metadata.text(f"tokenizer.chat_template.{TOOL_USE}", "")
    return Tokenizer(
        build(vocabulary),
        spelling,
        SpecialTokens(roles["bos"], roles["eos"], vocabulary.stop_ids()),
        ChatTemplate(source, names) if source else None,
        ChatTemplate(with_tools, names) if with_tools and not template else None,
    )


# -- folders -----------------------------------------------------------------------------------


def read_tokenizer(
    files: Mapping[str, Path], config: Mapping[str, object], template: str | None = None
) -> Tokenizer:
    """The tokenizer of a folder's files, by name, and of its model's config."""
    core = _core(files["tokenizer.json"])
    settings, generation = (
        read_json(files[name]) if name in files else {}
        for name in ("tokenizer_config.json", "generation_config.json")
    )
    names = _token_names(settings)
    bos_id, eos_id = (
        core.token_to_id(names[role]) if role in names else None
        for role in ("bos_token", "eos_token")
    )
    stops = {eos_id, *_ids(generation), *_ids(config)}
    own = _templates(files, settings)
    source = template or own.get(DEFAULT) or builtin_template(config.get("model_type"))
    with_tools = None if template else own.get(TOOL_USE)
    return Tokenizer(
        core,
        _spelling(core, files["tokenizer.json"]),
        SpecialTokens(bos_id, eos_id, frozenset(i for i in stops if i is not None)),
        ChatTemplate(source, names) if source else None,
        ChatTemplate(with_tools, names) if with_tools else None,
    )


def _core(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as flaw:  # The package raises nothing more precise.
        raise CheckpointError(
            f"{path}: not readable as a tokenizer ({flaw}); download it again"
        ) from None


def _token_names(settings: Mapping[str, object]) -> dict[str, str]:
    """`bos_token` and its like, which are strings or objects with a `content`."""
    names: dict[str, str] = {}
    for role, value in settings.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if role.endswith("_token") and isinstance(content, str):
            names[role] = content
    return names


def _ids(config: Mapping[str, object]) -> list[int]:
    """`eos_token_id`, which is one id or a list of them."""
    value = config.get("eos_token_id")
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]


def _templates(files: Mapping[str, Path], settings: Mapping[str, object]) -> dict[str, str]:
    """Chat templates by name: files of their own, or in the settings, one or a list of many."""
    written = {name: files[file] for name, file in _TEMPLATE_FILES.items() if file in files}
    if written:
        return {name: file.read_text(encoding="utf-8") for name, file in written.items()}
    value = settings.get("chat_template")
    listed = value if isinstance(value, list) else [{"name": DEFAULT, "template": value}]
    named = [(each.get("name"), each.get("template")) for each in listed if isinstance(each, dict)]
    return {str(name): text for name, text in named if isinstance(text, str)}


def _spelling(core: tokenizers.Tokenizer, path: Path) -> Spelling:
    added = core.get_added_tokens_decoder().items()
    read, leading_space = _reading(core, path)
    return Spelling(
        token=core.id_to_token,
        read=read,
        silent=frozenset(i for i, token in added if token.special),
        leading_space=leading_space,
    )


def _reading(core: tokenizers.Tokenizer, path: Path) -> tuple[Callable[[str], bytes], bool]:
    """How tokens are read, and whether a leading space goes: what the decoder amounts to."""
    decoder = json.loads(core.decoder.__getstate__()) if core.decoder else {"type": "none"}
    steps = decoder.get("decoders", [decoder])
    kinds = {step["type"]: step for step in steps}
    if "ByteLevel" in kinds:
        return byte_level, False
    if "Metaspace" in kinds:
        return piece, kinds["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds:
        return piece, "Strip" in kinds
    raise CheckpointError(
        f"{path}: tokens are decoded by {', '.join(kinds)}, and only byte-level and SentencePiece "
        "vocabularies are read here; serve this model without its tokenizer, by token ids"
    )
