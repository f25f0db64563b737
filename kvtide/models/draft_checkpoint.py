"""A draft on disk: a folder with `config.json` and `model.safetensors`, in EAGLE3's format.

    draft = open_draft(folder)
    target = build(config, weights, draft=draft)    the target's memory has the draft's pools
    model = draft.build(target)                     may share the target's embedding

`declare`, which the second step calls, refuses a draft that was made for another target. It reads
shapes alone, so this takes no time and comes before the target's weights are read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvtide.models.checkpoint import Checkpoint, open_checkpoint
from kvtide.models.eagle3 import Eagle3, Eagle3Weights, captured_layers, target_tokens
from kvtide.models.model import Decoder
from kvtide.spec import ModelMemory
from kvtide.spec.config import Config
from kvtide.spec.families import KVDType, declare_eagle3

TensorShape = tuple[int, ...]

_ANOTHER_TARGET = "use a draft that was trained for this target"
_UNKNOWN = {
    "norm_before_fc": "norms hidden states before it joins them",
    "parallel_drafting": "drafts several tokens in one pass",
}
"""Fields of configs that make other models of drafts, and what those do."""


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """An open draft, for one target or several. `config` has its layers' fields at the top."""

    checkpoint: Checkpoint
    config: Config

    def fingerprint(self, *, every_byte: bool = False) -> bytes:
        """32 bytes that stand for the draft's config and weights, as those of a target do."""
        return self.checkpoint.fingerprint(every_byte=every_byte)

    @property
    def weights(self) -> Eagle3Weights:
        return Eagle3Weights(self.checkpoint.weights)

    def declare(
        self, target: Config, memory: ModelMemory, kv_dtype: KVDType | None = None
    ) -> ModelMemory:
        """What the draft keeps beside the target with this config, for `with_draft`."""
        draft = declare_eagle3(self.config, memory=memory, kv_dtype=kv_dtype)
        _check_target(self.config, target)
        _check_layers(self.checkpoint, self.config, draft.layers)
        _check_vocabulary(self.config, self.weights, target)
        _check_shapes(self, target, len(self.captures(memory)), draft)
        return draft

    def build(self, target: Decoder) -> Eagle3:
        """The draft beside its target: on its device, in its dtype and arithmetic, on its ranks.

        The target is a whole model or the last of its stages.
        """
        layers = self.config.count("num_hidden_layers")
        if target.memory.end_layer - target.memory.layers != layers or not target.is_last:
            raise self.config.refusal(
                f"the memory of {target.memory.model} has no pools for its {layers} layers; build "
                "the target with this draft, and the draft beside the target's last stage"
            )
        blueprint = target.draft_blueprint(self.config, self.weights)
        with target.head.device:
            return Eagle3(blueprint, self.captures(target.memory), target.embedding)

    def captures(self, memory: ModelMemory) -> tuple[int, ...]:
        """The layers of the target with this memory whose inputs the draft takes."""
        return captured_layers(self.config, memory.layers)


def open_draft(path: str | os.PathLike[str]) -> DraftCheckpoint:
    """The draft in this folder."""
    checkpoint = open_checkpoint(path)
    config = Config(f"draft {checkpoint.path}", checkpoint.config)
    # The `speculators` format keeps the layers' fields in an object of their own.
    if (layers := config.nested("transformer_layer_config")) is not None:
        config = config.beneath(layers.values)
    if not checkpoint.weights.has("fc.weight"):
        raise config.refusal(
            "there is no tensor fc.weight, which every EAGLE3 draft has; pass the folder of one"
        )
    if config.beneath(_eagle_fields(config)).find("use_aux_hidden_state") is False:
        raise config.refusal(
            "it takes the target's last hidden state alone (`use_aux_hidden_state`), as EAGLE did; "
            "use EAGLE3"
        )
    for field, what in _UNKNOWN.items():
        if config.flag(field):
            raise config.refusal(f"it {what} (`{field}`), which is not known here; use EAGLE3")
    return DraftCheckpoint(checkpoint, config)


def _eagle_fields(config: Config) -> Mapping[str, object]:
    nested = config.nested("eagle_config")
    return {} if nested is None else nested.values


# -- whether a draft fits its target -----------------------------------------------------------


def _check_target(config: Config, target: Config) -> None:
    if (streams := target.count("hc_mult", default=1)) > 1:
        raise config.refusal(
            f"it takes one hidden state of a token, and {target.model} has {streams}, its streams; "
            "draft with the target's own layers for multi-token prediction"
        )
    wanted, found = (
        target.count("hidden_size"),
        config.count("target_hidden_size", "hidden_size"),
    )
    if found != wanted:
        raise config.refusal(
            f"it is for a target of hidden size {found}, and {target.model} has {wanted}; "
            f"{_ANOTHER_TARGET}"
        )


def _check_layers(checkpoint: Checkpoint, config: Config, layers: int) -> None:
    firsts = {"midlayer": "0"}
    parts = (name.split(".") for name in checkpoint.weights.names())
    stored = {part[1] if part[0] == "layers" else firsts.get(part[0]) for part in parts} - {None}
    if len(stored) != layers:
        raise config.refusal(
            f"`num_hidden_layers` is {layers} and its weights are of {len(stored)} layers; use the "
            "config.json that the weights were saved with"
        )


def _check_vocabulary(config: Config, weights: Eagle3Weights, target: Config) -> None:
    """Everything that counts tokens: of the target, and of the draft."""
    tokens, drafted = target.count("vocab_size"), weights.shape("lm_head.weight")[0]
    known = {"`vocab_size`": config.count("vocab_size", default=tokens)}
    for name in ("t2d", "embed_tokens.weight"):
        if weights.has(name):
            known[name] = weights.shape(name)[0]
    own = {"`draft_vocab_size`": config.count("draft_vocab_size", default=drafted)}
    targets = target_tokens(weights)
    if targets is None:
        known["lm_head.weight without a d2t"] = drafted
    else:
        own["d2t"] = len(targets)
    for name, found in known.items():
        if found != tokens:
            raise config.refusal(
                f"{name} is of {found} tokens, and {target.model} has {tokens}; {_ANOTHER_TARGET}"
            )
    for name, found in own.items():
        if found != drafted:
            raise config.refusal(
                f"{name} is of {found} tokens, and lm_head.weight of {drafted}; use the "
                "config.json and the tensors that were saved together"
            )
    if targets is not None and not bool(((targets >= 0) & (targets < tokens)).all()):
        raise config.refusal(
            f"its d2t names tokens {int(targets.min())} to {int(targets.max())}, and "
            f"{target.model} has {tokens}; {_ANOTHER_TARGET}"
        )


def _check_shapes(
    draft: DraftCheckpoint, target: Config, captures: int, memory: ModelMemory
) -> None:
    weights, config = draft.weights, draft.config
    width, outer = config.count("hidden_size"), target.count("hidden_size")
    if not weights.has("embed_tokens.weight") and width != outer:
        raise config.refusal(
            f"it has no embed_tokens.weight, and the embedding of {target.model} is {outer} wide, "
            f"its own hidden states {width}; use a draft with an embedding"
        )
    shapes: dict[str, TensorShape] = {
        "fc.weight": (width, captures * outer),
        "norm.weight": (width,),
    }
    shapes["lm_head.weight"] = (weights.shape("lm_head.weight")[0], width)
    for number in range(memory.layers):
        for name, shape in _layer_shapes(config, memory, is_first=number == 0).items():
            shapes[f"layers.{number}.{name}.weight"] = shape
    if weights.has("embed_tokens.weight"):
        shapes["embed_tokens.weight"] = (target.count("vocab_size"), width)
    for name, shape in shapes.items():
        if (found := weights.shape(name)) != shape:
            why = f" for {captures} layers of {target.model}" if name == "fc.weight" else ""
            raise config.refusal(
                f"{name} is {list(found)}, and {list(shape)} is wanted{why}; use the config.json "
                "that the weights were saved with, or another draft"
            )


def _layer_shapes(config: Config, memory: ModelMemory, *, is_first: bool) -> dict[str, TensorShape]:
    """Of a layer's weights: the first layer's attention takes an embedding beside a feature."""
    width, inner = config.count("hidden_size"), config.count("intermediate_size")
    kv_heads, head_dim = memory.pools[0].entry.fields[0].shape
    heads, inputs = config.count("num_attention_heads") * head_dim, width * (1 + is_first)
    shapes: dict[str, TensorShape] = {
        "self_attn.q_proj": (heads, inputs),
        "self_attn.k_proj": (kv_heads * head_dim, inputs),
        "self_attn.v_proj": (kv_heads * head_dim, inputs),
        "self_attn.o_proj": (width, heads),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    return {**shapes, "hidden_norm": (width,)} if is_first else shapes
