"""Tiny models whose last layer is a next-token layer, and what such a layer computes.

The oracle is a model of `transformers` with one layer more than ours. Ours has the weights of the
last one as its next-token layer. The oracle is made to run that layer on any input (`last_layer`).
What stands before and after it is written out here, in plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers import Step
from kvtide.models import Model, build, build_mtp
from kvtide.models.draft import CapturedStates, DraftModel
from kvtide.spec.families import KVDType
from tests.models.tiny import Tensors, checkpoint, config_of, oracle

V4 = "deepseek_v4-mtp"


@dataclass(frozen=True)
class Naming:
    """Names of a published next-token layer: its parts and, under `layer`, what any layer has."""

    layer: str
    token_norm: str
    feature_norm: str
    projection: str
    norm: str
    offset: float = 0.0
    """What is added to the weights of norms."""


_DEEPSEEK = Naming(
    "model.layers.2.",
    "model.layers.2.enorm.weight",
    "model.layers.2.hnorm.weight",
    "model.layers.2.eh_proj.weight",
    "model.layers.2.shared_head.norm.weight",
)
_QWEN = Naming(
    "mtp.layers.0.",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
    1.0,
)
PROJECTED = {
    "deepseek_v3-mtp": _DEEPSEEK,
    "deepseek_v32-mtp": _DEEPSEEK,
    "glm4_moe_lite-mtp": _DEEPSEEK,
    "glm_moe_dsa-mtp": _DEEPSEEK,
    "qwen3_next-mtp": _QWEN,
    "qwen3_5-mtp": _QWEN,
    "qwen3_5_moe-mtp": _QWEN,
}
NAMES = [*PROJECTED, V4]


# -- checkpoints -------------------------------------------------------------------------------


def config(name: str) -> dict[str, Any]:
    """Lists of the oracle's config go on past the layers that are left."""
    layers = config_of(name).num_hidden_layers - 1
    more = {} if name in PROJECTED and PROJECTED[name] is _QWEN else {"num_nextn_predict_layers": 1}
    return {**checkpoint(name).config, "num_hidden_layers": layers, **more}


@functools.cache
def weights(name: str) -> dict[str, Tensor]:
    """The oracle's, the last layer under its published name, with what such a layer has besides."""
    saved, last = checkpoint(name).weights, config_of(name).num_hidden_layers - 1
    under = PROJECTED[name].layer if name in PROJECTED else "mtp.0."
    found = {one.replace(f"model.layers.{last}.", under): saved.get(one) for one in saved.names()}
    return found | (_projected(name, PROJECTED[name]) if name in PROJECTED else _of_streams())


def _projected(name: str, naming: Naming) -> dict[str, Tensor]:
    width, draw = config_of(name).hidden_size, torch.Generator().manual_seed(3)
    norms = (naming.token_norm, naming.feature_norm, naming.norm)
    one = 1 - naming.offset
    found = {norm: one + torch.randn(width, generator=draw) * 0.1 for norm in norms}
    projection = torch.randn(width, 2 * width, generator=draw) * 0.1
    return {**found, naming.projection: projection}


def _of_streams() -> dict[str, Tensor]:
    saved, draw = checkpoint(V4).weights, torch.Generator().manual_seed(3)
    again = ("norm.weight", "hc_head.hc_fn", "hc_head.hc_base", "hc_head.hc_scale")
    found = {f"mtp.0.{name}": saved.get(f"model.{name}") for name in again}
    for name in ("e_proj", "h_proj"):
        found[f"mtp.0.{name}.weight"] = torch.randn(96, 96, generator=draw) * 0.1
    for name in ("enorm", "hnorm"):
        found[f"mtp.0.{name}.weight"] = 1 + torch.randn(96, generator=draw) * 0.1
    return found


# -- what the layer computes -------------------------------------------------------------------


def last_layer(name: str, tokens: Tensor, enter: Callable[[Tensor], Tensor]) -> Tensor:
    """The output of the oracle's last layer on `enter` of what the layer before it gives."""
    model, out = oracle(name), []

    def entering(module: object, args: tuple[Tensor, ...], more: dict[str, Any]) -> Any:
        first = args[0] if args else more["hidden_states"]
        given = enter(first[0])[None]
        return ((given, *args[1:]), more) if args else (args, {**more, "hidden_states": given})

    def leaving(module: object, args: object, result: Any) -> None:
        out.append((result[0] if isinstance(result, tuple) else result)[0])

    layer = model.model.layers[-1]
    handles = [
        layer.register_forward_pre_hook(entering, with_kwargs=True),
        layer.register_forward_hook(leaving),
    ]
    with torch.no_grad():
        model(tokens[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return out[0]


def target_features(name: str, tokens: Tensor) -> Tensor:
    """The features of tokens, as the target without the oracle's last layer gives them."""
    found = []

    def enter(x: Tensor) -> Tensor:
        found.append(x)
        return x

    last_layer(name, tokens, enter)
    with torch.no_grad():
        return found[0] if name == V4 else oracle(name).model.norm(found[0])


def drafted(name: str, following: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of rows with these next tokens and features."""
    with torch.no_grad():
        token = oracle(name).model.embed_tokens(following)
    entered = _enter_streams(token, features) if name == V4 else _enter(name, token, features)
    # The tokens that the oracle embeds are not seen: their rows are replaced.
    out = last_layer(name, following, lambda _: entered)
    with torch.no_grad():
        if name == V4:
            model = oracle(name)
            return out, model.lm_head(model.model.norm(model.model.hc_head(out[None])[0]))
        hidden = _norm(name, out, PROJECTED[name].norm)
        return hidden, oracle(name).lm_head(hidden)


def _norm(name: str, x: Tensor, weight: str) -> Tensor:
    naming, eps = PROJECTED[name], config_of(name).rms_norm_eps
    return functional.rms_norm(x, x.shape[-1:], weights(name)[weight] + naming.offset, eps)


def _enter(name: str, token: Tensor, features: Tensor) -> Tensor:
    naming = PROJECTED[name]
    both = _norm(name, token, naming.token_norm), _norm(name, features, naming.feature_norm)
    return torch.cat(both, dim=-1) @ weights(name)[naming.projection].T


def _enter_streams(token: Tensor, features: Tensor) -> Tensor:
    ours = weights(V4)

    def projected(x: Tensor, norm: str, projection: str) -> Tensor:
        normed = functional.rms_norm(x, (96,), ours[f"mtp.0.{norm}.weight"], 1e-6)
        return normed @ ours[f"mtp.0.{projection}.weight"].T

    streams = projected(features, "hnorm", "h_proj")
    return projected(token, "enorm", "e_proj")[:, None] + streams


@functools.cache
def expectation(name: str, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of all rows: the last token is only ever a next one."""
    known = torch.tensor(tokens)
    return drafted(name, known[1:], target_features(name, known[:-1]))


# -- ours --------------------------------------------------------------------------------------


def pair(
    name: str, *, deterministic: bool = False, kv_dtype: KVDType = KVDType.FP32, **more: Any
) -> tuple[Model, DraftModel]:
    """A target and its draft. `more` is what else `build` takes."""
    fields, tensors = config(name), Tensors(weights(name))
    how = {"page_tokens": 16, "kv_dtype": kv_dtype, "deterministic": deterministic, **more}
    target = build(fields, tensors, mtp=True, **how)
    return target, build_mtp(fields, tensors, target)


class Guessing:
    """A target and its draft, as one model that says what the token after next is.

    For sequences that begin with these tokens, and are one shorter at the most.
    """

    def __init__(self, target: Model, draft: DraftModel, tokens: list[int]) -> None:
        self.target, self.draft, self.tokens = target, draft, torch.tensor(tokens)
        self.memory, self.uses_kernels = target.memory, target.uses_kernels
        self.vocabulary, self.max_positions = target.vocabulary, target.max_positions

    def forward(
        self, step: Step, before: Tensor | None = None, captured: CapturedStates | None = None
    ) -> Tensor:
        captured = CapturedStates(self.draft.captures)
        self.target.forward(step, before, captured)
        following = replace(step, tokens=self.tokens[step.positions + 1])
        return self.draft.forward(following, self.draft.features(captured.joined))

    def carried(self, tokens: Tensor) -> Tensor:
        return self.target.carried(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.draft.logits(hidden)


def guessing(tokens: list[int], name: str = V4, *, deterministic: bool = False) -> Guessing:
    return Guessing(*pair(name, deterministic=deterministic), tokens)
