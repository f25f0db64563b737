"""The built-in template of a family, if it has one."""

from __future__ import annotations

from pathlib import Path

_FAMILIES = frozenset({"deepseek_v32", "deepseek_v4"})


def builtin_template(model_type: object) -> str | None:
    """The source of the template for checkpoints of this family that bring none."""
    if model_type not in _FAMILIES:
        return None
    return (Path(__file__).parent / f"{model_type}.jinja").read_text(encoding="utf-8")
