"""EAGLE3 drafts against plain torch code over whole sequences, which knows no pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from kvtide.layers.backend.triton_ops import TritonOps
from kvtide.layers.tensor_ranks import ALONE, TensorRanks
from kvtide.models import build
from kvtide.models.checkpoint import OnDevice
from kvtide.models.draft import CapturedStates
from kvtide.models.draft_checkpoint import DraftCheckpoint, open_draft
from kvtide.models.eagle3 import Eagle3, captured_layers
from kvtide.models.model import Decoder
from kvtide.models.model_errors import CheckpointError
from kvtide.spec import SpecError
from kvtide.spec.config import Config
from kvtide.spec.families import KVDType
from kvtide.tiers import Layout
from tests.models.drafting import DraftChunk, DraftPlayer
from tests.models.playing import Player
from tests.models.test_tensor_ranks import Threads, together
from tests.models.tiny import checkpoint, oracle, ours, prompt
from tests.models.tiny_eagle3 import tiny_eagle3

TARGET, TOKENS, PAGE = "llama", 56, 16
CLOSE = 2e-5
CHOOSE = "kvtide.models.family_registry.choose"
FORMS: dict[str, dict[str, object]] = {
    "one-layer": {},
    "two-layers": {"layers": 2, "midlayer": False},
    "all-tokens-own-embedding": {"draft_vocabulary": None, "own_embedding": True},
    "other-captures": {"captures": (3, 1), "midlayer": False},
    "other-width": {"hidden_size": 64, "target_hidden_size": 96, "own_embedding": True},
    "normed-residual": {"norm_before_residual": True, "layers": 3},
    "scaled-rope": {
        "num_key_value_heads": 4,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


def both(draft: DraftCheckpoint, name: str = TARGET, **more: object) -> tuple[Decoder, Eagle3]:
    """The target, built for this draft, and the draft beside it."""
    target = ours(name, draft=draft, **more)
    assert isinstance(target, Decoder)
    return target, draft.build(target)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., DraftCheckpoint]:
    """Writes a draft of these fields for the tiny target, and opens it."""

    def write(**fields: object) -> DraftCheckpoint:
        return open_draft(tiny_eagle3(checkpoint(TARGET).config, tmp_path / "draft", **fields))

    return write


# -- the oracle --------------------------------------------------------------------------------


class Plain:
    """A draft over whole sequences, in float32 and nothing but torch."""

    def __init__(self, draft: DraftCheckpoint, name: str = TARGET) -> None:
        names = load_file(draft.checkpoint.path / "model.safetensors")
        self.weights = {k.replace("midlayer.", "layers.0."): v for k, v in names.items()}
        self.config = json.loads((draft.checkpoint.path / "config.json").read_text("utf-8"))
        target = oracle(name).get_input_embeddings().weight.detach()
        self.embedding = self.weights.get("embed_tokens.weight", target)
        self.layers, self.dim = self.config["num_hidden_layers"], self.config["head_dim"]

    def features(self, states: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(states), dim=-1) @ self.weights["fc.weight"].T

    def hidden(self, tokens: list[int], features: Tensor, seen: Tensor | None = None) -> Tensor:
        """Of rows at positions 0, 1, …; `seen` (rows, rows) is causal if not given."""
        count = len(tokens)
        seen = torch.ones(count, count).tril().bool() if seen is None else seen
        x = features
        for number in range(self.layers):
            normed = self._norm(f"layers.{number}.input_layernorm", x)
            if number == 0:
                token = self._norm("layers.0.input_layernorm", self.embedding[torch.tensor(tokens)])
                feature = self._norm("layers.0.hidden_norm", features)
                normed = torch.cat([token, feature], dim=-1)
                x = feature if self.config.get("norm_before_residual") else features
            x = x + self._attention(f"layers.{number}.self_attn.", normed, seen)
            inner = self._norm(f"layers.{number}.post_attention_layernorm", x)
            gate, up = (
                self._linear(f"layers.{number}.mlp.{n}_proj", inner) for n in ("gate", "up")
            )
            x = x + self._linear(f"layers.{number}.mlp.down_proj", functional.silu(gate) * up)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self._linear("lm_head", self._norm("norm", hidden))

    def _attention(self, name: str, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (self._linear(f"{name}{n}_proj", x).unflatten(1, (-1, self.dim)) for n in "qkv")
        q, k = self._rotated(q), self._rotated(k)
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.dim**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self._linear(f"{name}o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.arange(len(x))[:, None] * self._frequencies()
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _frequencies(self) -> Tensor:
        """Those of llama3 where the config scales them, after `transformers`."""
        plain = self.config["rope_theta"] ** -(torch.arange(0, self.dim, 2) / self.dim)
        if (scaling := self.config.get("rope_scaling")) is None:
            return plain
        turns = scaling["original_max_position_embeddings"] * plain / (2 * torch.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / scaling["factor"])

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]


def target_states(tokens: list[int], layers: Sequence[int], name: str = TARGET) -> list[Tensor]:
    """What enters these layers in `transformers`; past the last, what leaves it."""
    model, found = oracle(name), {}
    count = model.config.num_hidden_layers
    hooks = [
        layer.register_forward_hook(
            lambda _, args, out, i=i: found.update({i: args[0][0], i + 1: out[0]})
        )
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(found) == count + 1
    return [found[layer] for layer in layers]


def close(found: Tensor, wanted: Tensor, bound: float = CLOSE) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= bound


# -- logits ------------------------------------------------------------------------------------


def prefilled(player: DraftPlayer, tokens: list[int], *chunks: int) -> Iterator[Tensor]:
    """The draft's hidden states of all tokens but the last, the target's chunks being these."""
    sequence, number = player.begin(tokens), 0
    while (first := sequence.past) < len(tokens) - 1:
        count = min(chunks[number % len(chunks)], len(tokens) - 1 - first)
        (features,) = player.features((sequence, count))
        following = tokens[first + 1 : first + 1 + count]
        yield from player.draft_pass(DraftChunk(sequence, first, following, features))
        number += 1
    player.end(sequence)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunks", [(TOKENS,), (7,), (16, 1, 1, 30)], ids=["one", "7s", "mixed"])
def test_logits_are_those_of_the_oracle_however_a_prompt_is_cut(
    form: str, chunks: tuple[int, ...], written: Callable[..., DraftCheckpoint]
) -> None:
    source = written(**FORMS[form])
    target, draft = both(source)
    tokens, plain = prompt(TOKENS), Plain(source)
    states = target_states(tokens, draft.captures)
    wanted = plain.hidden(tokens[1:], plain.features([one[:-1] for one in states]))
    hidden = torch.cat(list(prefilled(DraftPlayer(target, draft), tokens, *chunks)))
    close(draft.logits(hidden), plain.logits(wanted))


@pytest.mark.parametrize("form", FORMS)
def test_recurrent_steps_are_those_of_the_oracle(
    form: str, written: Callable[..., DraftCheckpoint]
) -> None:
    """Two sequences side by side, each continued by tokens of its own, over the end of a page."""
    source = written(**FORMS[form])
    target, draft = both(source)
    player, plain = DraftPlayer(target, draft), Plain(source)
    prompts, tails = [prompt(30), prompt(27, 2)], [prompt(6, 3), prompt(6, 4)]
    sequences = [player.begin(one) for one in prompts]
    features = player.features(*((one, len(one.tokens)) for one in sequences))
    wanted = [plain.features(target_states(one, draft.captures)) for one in prompts]
    tokens = [one[1:] + tail[:1] for one, tail in zip(prompts, tails, strict=True)]
    firsts = [0, 0]
    for drafted in range(1, 6):
        chunks = map(DraftChunk, sequences, firsts, tokens, features)
        features = player.draft_pass(*chunks)
        for number, (one, tail) in enumerate(zip(prompts, tails, strict=True)):
            expected = plain.hidden(one[1:] + tail[:drafted], wanted[number])
            close(draft.logits(features[number])[-1:], plain.logits(expected[-1:]))
            wanted[number] = torch.cat([wanted[number], expected[-1:]])
        features = [one[-1:] for one in features]
        tokens = [[tail[drafted]] for tail in tails]
        firsts = [len(one) + drafted - 1 for one in prompts]


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "falcon_h1", "deepseek_v3", "qwen3_next"])
def test_any_family_with_a_history_can_be_a_target(name: str, tmp_path: Path) -> None:
    source = open_draft(tiny_eagle3(checkpoint(name).config, tmp_path, captures=(1, 0, 2)))
    target, draft = both(source, name)
    tokens, plain = prompt(40), Plain(source, name)
    states = target_states(tokens, draft.captures, name)
    wanted = plain.hidden(tokens[1:], plain.features([one[:-1] for one in states]))
    hidden = torch.cat(list(prefilled(DraftPlayer(target, draft), tokens, 17)))
    close(draft.logits(hidden), plain.logits(wanted))


def test_the_drafts_tokens_are_known_by_the_targets(
    written: Callable[..., DraftCheckpoint],
) -> None:
    source = written(draft_vocabulary=64)
    _, draft = both(source)
    known = Plain(source).weights["t2d"].nonzero().squeeze(1)
    assert draft.vocabulary is not None
    assert torch.equal(draft.vocabulary, known)
    assert both(written(draft_vocabulary=None))[1].vocabulary is None


@pytest.mark.parametrize("kv", [KVDType.FP32, KVDType.BF16])
def test_deterministic_drafts_give_the_same_bits_in_any_chunks_and_company(
    kv: KVDType, written: Callable[..., DraftCheckpoint]
) -> None:
    source = written(layers=2)
    target, draft = both(source, deterministic=True, kv_dtype=kv)
    tokens, others = prompt(TOKENS), prompt(TOKENS, 5)
    alone = torch.cat(list(prefilled(DraftPlayer(target, draft), tokens, TOKENS)))
    for chunks in ((7,), (33, 1, 1, 16, 2)):
        player = DraftPlayer(target, draft, layout=Layout.PAGE_FIRST)
        assert torch.equal(torch.cat(list(prefilled(player, tokens, *chunks))), alone)
    player = DraftPlayer(target, draft)
    one, other = player.begin(tokens), player.begin(others)
    found = []
    for first in range(0, 50, 10):
        features = player.features((other, 7), (one, 10))
        following = others[first // 10 * 7 + 1 :][:7], tokens[first + 1 :][:10]
        chunks = map(DraftChunk, (other, one), (first // 10 * 7, first), following, features)
        found.append(player.draft_pass(*chunks)[1])
    assert torch.equal(torch.cat(found), alone[:50])
    assert torch.equal(draft.logits(found[-1]), draft.logits(alone)[40:50])


# -- absent pages ------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [{0}, {1}, {0, 2}], ids=str)
@pytest.mark.parametrize("layers", [1, 2])
def test_pages_without_entries_of_the_draft_are_left_out(
    absent: set[int], layers: int, written: Callable[..., DraftCheckpoint]
) -> None:
    source = written(layers=layers)
    target, draft = both(source)
    tokens, first, plain = prompt(TOKENS + 1), 50, Plain(source)
    features = plain.features(target_states(tokens, draft.captures))[:-1]
    seen = _without(absent, first)
    wanted = plain.hidden(tokens[1:], features, seen)
    close(_resumed(target, draft, tokens, first, absent), wanted[first:])
    assert float((plain.hidden(tokens[1:], features) - wanted)[first:].abs().max()) > 0.01


def _without(absent: set[int], first: int) -> Tensor:
    """What rows from `first` on see of the pages before them, and earlier rows of theirs."""
    seen = torch.ones(TOKENS, TOKENS).tril().bool()
    for page in absent:
        seen[first:, page * PAGE : (page + 1) * PAGE] = False
    return seen


def _resumed(
    target: Decoder, draft: Eagle3, tokens: list[int], first: int, absent: set[int]
) -> Tensor:
    """Hidden states of rows from `first` on, some of the pages before them being forgotten."""
    player = DraftPlayer(target, draft)
    sequence = player.begin(tokens)
    count = len(tokens) - 1
    (features,) = player.features((sequence, count))
    player.draft_pass(DraftChunk(sequence, 0, tokens[1 : first + 1], features[:first]))
    for page in absent:
        player.forget(sequence, page)
    hidden = []
    for row, end in ((first, count - 2), (count - 2, count - 1), (count - 1, count)):
        following = tokens[row + 1 : end + 1]
        hidden += player.draft_pass(DraftChunk(sequence, row, following, features[row:end], absent))
    return torch.cat(hidden)


# -- kernels, ranks, stages --------------------------------------------------------------------


@pytest.mark.full
def test_kernels_give_the_references_hidden_states(
    written: Callable[..., DraftCheckpoint], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, tokens = written(layers=2), prompt(2 * PAGE + 7)
    target, draft = both(source)
    wanted = _resumed(target, draft, tokens, 2 * PAGE + 1, {1})
    monkeypatch.setattr("kvtide.layers.kernels.qkv.FEW_TOKENS", 0)
    monkeypatch.setattr(CHOOSE, lambda deterministic, device: TritonOps())
    saved = checkpoint(TARGET)
    with device:
        weights, kv = OnDevice(saved.weights, device), KVDType.FP32
        there = build(saved.config, weights, page_tokens=PAGE, kv_dtype=kv, draft=source)
        beside = source.build(there)
        found = _resumed(there, beside, tokens, 2 * PAGE + 1, {1})
        logits = beside.logits(found)
    close(found.cpu(), wanted, 1e-4)
    close(logits.cpu(), draft.logits(wanted), 1e-4)


def test_tensor_ranks_give_one_ranks_logits(written: Callable[..., DraftCheckpoint]) -> None:
    source, tokens = written(layers=2), prompt(TOKENS)

    def ran(ranks: TensorRanks) -> Tensor:
        try:
            target, draft = both(source, ranks=ranks)
            return draft.logits(torch.cat(list(prefilled(DraftPlayer(target, draft), tokens, 33))))
        except BaseException:
            if isinstance(ranks, Threads):
                ranks.meeting.leave()
            raise

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(ran, together(2)))
    for each in found:
        close(each, ran(ALONE), 1e-5)


def test_a_draft_is_built_beside_the_last_stage(written: Callable[..., DraftCheckpoint]) -> None:
    source = written(own_embedding=False)
    last, draft = both(source, stage=1, stages=2)
    assert draft.embedding is last.embedding
    assert not last.is_first
    with pytest.raises(SpecError, match="beside the target's last stage"):
        both(source, stage=0, stages=2)


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt_oss", "qwen3_next", "falcon_h1", "deepseek_v4"]
)
def test_captured_states_are_not_changed_by_later_layers(name: str) -> None:
    _assert_unchanged(ours(name))


@pytest.mark.full
def test_captured_states_are_not_changed_by_kernels(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.layers.kernels.qkv.FEW_TOKENS", 0)
    monkeypatch.setattr(CHOOSE, lambda deterministic, device: TritonOps())
    saved = checkpoint(TARGET)
    with device:
        _assert_unchanged(build(saved.config, OnDevice(saved.weights, device), page_tokens=PAGE))


class Copying(CapturedStates):
    """Also keeps a copy of what it is given."""

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__(layers)
        self.copies: list[Tensor] = []

    def enter(self, layer: int, x: Tensor) -> None:
        super().enter(layer, x)
        self.copies.append(x.clone())


class CapturingAll:
    """A target all of whose layers' inputs are captured, and compared when it has run."""

    def __init__(self, target: Decoder) -> None:
        self.target, self.memory = target, target.memory
        self.logits = target.logits

    def forward(self, step, before=None, captured=None) -> Tensor:
        captured = Copying(range(self.memory.layers + 1))
        hidden = self.target.forward(step, before, captured)
        assert torch.equal(captured.joined, torch.cat(captured.copies, dim=-1))
        return hidden


def _assert_unchanged(target: Decoder) -> None:
    Player(CapturingAll(target)).prefill(prompt(10), 9, 1)


# -- checkpoints -------------------------------------------------------------------------------


def test_capture_layers_are_the_configs_or_spread_over_the_target() -> None:
    def found(layers: int = 32, **fields: object) -> tuple[int, ...]:
        return captured_layers(Config("draft", fields), layers)

    assert found() == (2, 16, 29)
    assert found(eagle_aux_hidden_state_layer_ids=[1, 4]) == (1, 4)
    assert found(eagle_config={"eagle_aux_hidden_state_layer_ids": [31, -1, 1]}) == (32, 0, 2)
    assert found(eagle_config={"eagle_aux_hidden_state_layer_ids": []}) == (2, 16, 29)
    assert found(eagle_config={"use_aux_hidden_state": True}) == (2, 16, 29)


def test_the_drafts_pools_are_declared_from_its_own_config(
    written: Callable[..., DraftCheckpoint],
) -> None:
    target, draft = both(written(layers=2, head_dim=32, num_key_value_heads=1))
    pool = target.memory.pool("draft")
    assert pool.layers == (3, 4)
    assert [field.shape for field in pool.entry.fields] == [(1, 32)] * 2
    assert (pool.follows, pool.reuse.required, target.memory.holdback) == ("kv", False, 1)
    assert draft.memory is target.memory


def test_layers_in_an_object_of_their_own_are_read(tmp_path: Path) -> None:
    folder = tiny_eagle3(checkpoint(TARGET).config, tmp_path, midlayer=False)
    fields = json.loads((folder / "config.json").read_text("utf-8"))
    outer = {name: fields.pop(name) for name in ("draft_vocab_size", "eagle_config")}
    outer |= {"speculators_model_type": "eagle3", "norm_before_residual": False}
    written = json.dumps({**outer, "transformer_layer_config": fields})
    (folder / "config.json").write_text(written, "utf-8")
    _, draft = both(open_draft(folder))
    assert draft.width == 96


def test_a_fingerprint_stands_for_config_and_weights(
    written: Callable[..., DraftCheckpoint],
) -> None:
    prints = [written().fingerprint() for _ in range(2)]
    prints += [written(seed=1).fingerprint(), written(rope_theta=500.0).fingerprint()]
    assert len(set(prints)) == 3
    assert all(len(one) == 32 for one in prints)


# -- refusals ----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "hidden-size": ({"hidden_size": 64}, "hidden size 64, and llama has 96"),
    "target-hidden-size": ({"target_hidden_size": 128}, "hidden size 128, and llama has 96"),
    "vocabulary": ({"vocab_size": 300}, "`vocab_size` is of 300 tokens, and llama has 211"),
    "capture-layer": ({"captures": (0, 1, 4)}, r"layers \[-1, 0, 3\], and the target has 3 layers"),
    "narrow-embedding": (
        {"hidden_size": 64, "target_hidden_size": 96},
        "no embed_tokens.weight, and the embedding of llama is 96 wide, its own hidden states 64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_draft_for_another_target_is_refused(
    name: str, written: Callable[..., DraftCheckpoint]
) -> None:
    fields, says = REFUSED[name]
    with pytest.raises(SpecError, match=says):
        both(written(**fields))


def _changed(folder: Path, **tensors: Tensor | None) -> DraftCheckpoint:
    """The draft with these tensors in place of its own, or without; dots are two underscores."""
    file = folder / "model.safetensors"
    kept = load_file(file)
    for name, tensor in tensors.items():
        kept.pop(name.replace("__", "."), None)
        if tensor is not None:
            kept[name.replace("__", ".")] = tensor
    save_file({key: tensor.clone() for key, tensor in kept.items()}, file)
    return open_draft(folder)


_Q = "midlayer__self_attn__q_proj__weight"
FLAWS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "d2t-beyond": (
        {"d2t": torch.full((64,), 150)},
        "d2t names tokens 150 to 213, and llama has 211",
    ),
    "d2t-before": ({"d2t": torch.full((64,), -1)}, "d2t names tokens -1 to 62, and llama has 211"),
    "d2t-short": ({"d2t": torch.zeros(60, dtype=torch.long)}, "d2t is of 60 tokens, and lm_head"),
    "no-d2t": ({"d2t": None}, "lm_head.weight without a d2t is of 64 tokens, and llama has 211"),
    "t2d": ({"t2d": torch.ones(210, dtype=torch.bool)}, "t2d is of 210 tokens, and llama has 211"),
    "lm_head": ({"lm_head__weight": torch.ones(65, 96)}, "`draft_vocab_size` is of 64 tokens, and"),
    "embedding": (
        {"embed_tokens__weight": torch.ones(210, 96)},
        "embed_tokens.weight is of 210 tokens, and llama has 211",
    ),
    "embedding-width": (
        {"embed_tokens__weight": torch.ones(211, 64)},
        r"embed_tokens.weight is \[211, 64\], and \[211, 96\] is wanted",
    ),
    "fc": (
        {"fc__weight": torch.ones(96, 192)},
        r"fc.weight is \[96, 192\], and \[96, 288\] is wanted for 3 layers of llama",
    ),
    "queries": (
        {_Q: torch.ones(64, 96)},
        r"q_proj.weight is \[64, 96\], and \[64, 192\] is wanted",
    ),
    "more-layers": (
        {"layers__1__mlp__up_proj__weight": torch.ones(80, 96)},
        "`num_hidden_layers` is 1 and its weights are of 2 layers",
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_draft_whose_tensors_do_not_fit_is_refused(
    flaw: str, written: Callable[..., DraftCheckpoint]
) -> None:
    tensors, says = FLAWS[flaw]
    with pytest.raises(SpecError, match=says):
        both(_changed(written().checkpoint.path, **tensors))


@pytest.mark.parametrize(
    "name", ["norm__weight", "lm_head__weight", "midlayer__hidden_norm__weight", _Q]
)
def test_a_missing_tensor_is_named(name: str, written: Callable[..., DraftCheckpoint]) -> None:
    says = f"there is no tensor {name.replace('__', '.')}"
    with pytest.raises(CheckpointError, match=says):
        both(_changed(written().checkpoint.path, **{name: None}))


def test_a_folder_of_something_else_is_refused(
    written: Callable[..., DraftCheckpoint], tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=r"no tensor fc\.weight, which every EAGLE3 draft has"):
        _changed(written().checkpoint.path, fc__weight=None)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_draft(tmp_path / "nowhere")
    for field in ("norm_before_fc", "parallel_drafting"):
        with pytest.raises(SpecError, match=f"{field}`.*not known here"):
            written(**{field: True})
    with pytest.raises(SpecError, match="last hidden state alone"):
        written(eagle_config={"use_aux_hidden_state": False})


def test_fewer_layers_than_the_config_says_are_refused(
    written: Callable[..., DraftCheckpoint],
) -> None:
    folder = written().checkpoint.path
    fields = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 2}), "utf-8")
    with pytest.raises(SpecError, match="`num_hidden_layers` is 2 and its weights are of 1 layers"):
        both(open_draft(folder))


def test_a_target_that_a_draft_cannot_follow_is_refused(
    written: Callable[..., DraftCheckpoint],
) -> None:
    with pytest.raises(SpecError, match="one hidden state of a token, and deepseek_v4 has 4"):
        ours("deepseek_v4", draft=written())
    with pytest.raises(SpecError, match="reaches further back than every anchor"):
        ours("mistral-windows", draft=written())
    with pytest.raises(SpecError, match="two drafts; use one"):
        ours(TARGET, draft=written(), mtp=True)
    with pytest.raises(SpecError, match="a holdback of 1 tokens must be less than a page"):
        ours(TARGET, draft=written(), page_tokens=1)
    target = ours(TARGET)
    with pytest.raises(SpecError, match="build the target with this draft"):
        written().build(target)
