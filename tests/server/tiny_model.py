"""Folders with a tiny random model, a tokenizer of bytes, and a chat template if wanted."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def save(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """A Llama of two layers that says anything; a token is a byte."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256 + len(SPECIAL),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    core.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
