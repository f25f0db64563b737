"""The default model's draft: it comes with the package, fits, is used, and drafts chat well."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtide.bench.drafts import restored_drafts
from kvtide.bench.drafts.speculate import CHAT, ModelBed
from kvtide.models import build, default_model
from kvtide.models.checkpoint import Checkpoint, open_checkpoint
from kvtide.models.draft_checkpoint import open_draft
from kvtide.models.tokenizer import load_tokenizer
from kvtide.server.settings import EAGLE3, NO_SPECULATION, Settings
from kvtide.server.setup.speculation_setup import choose_speculation
from kvtide.spec.families import KVDType
from kvtide.training.held_out import HeldOutPlan, measure_held_out
from kvtide.training.prompts import PromptFile, encode_prompts, read_prompts
from tests.grids import everything
from tests.models.tiny_eagle3 import tiny_eagle3
from tests.server import tiny_model

MAX_BYTES, MAX_VOCABULARY = 12_000_000, 8192
MIN_ACCEPT_LENGTH = 1.75
"""Three short answers give 2.09 on a CPU in 44 verify steps, four longer ones 2.02 in 123. The
margin is for machines whose sums turn a few greedy tokens. docs/SPECULATION.md has the figures of
all prompts."""
HELD_OUT = Path(__file__).resolve().parents[2] / "examples" / "draft_prompts" / "held_out"
FOLDER = default_model.DRAFTS / default_model.NAME
NOTE = default_model.DRAFTS / "README.md"


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint(default_model.default_model())


def test_the_draft_is_shipped() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"config.json", "model.safetensors"}
    row = next(line for line in NOTE.read_text().splitlines() if default_model.NAME in line)
    assert "Apache-2.0" in row


def test_the_package_has_the_draft() -> None:
    """What setuptools packs, file by file."""
    root = Path(default_model.__file__).resolve().parents[1]
    setup = tomllib.loads((root.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    packed = {path for pattern in setup["package-data"]["kvtide"] for path in root.glob(pattern)}
    assert {NOTE, *FOLDER.iterdir()} <= packed


def test_it_is_small_and_fits_the_model(smollm2: Checkpoint) -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= MAX_BYTES
    draft = open_draft(FOLDER)
    assert draft.config.count("draft_vocab_size") <= MAX_VOCABULARY
    model = build(smollm2.config, smollm2.weights, kv_dtype=KVDType.FP32, draft=draft)
    assert model.memory.draft_sidecars
    choice = choose_speculation(Settings(), smollm2)
    assert choice.method == EAGLE3 and choice.draft is not None
    assert Path(choice.draft.checkpoint.path) == FOLDER


def test_it_drafts_chat_well(smollm2: Checkpoint) -> None:
    draft, tokenizer = open_draft(FOLDER), load_tokenizer(smollm2)
    assert tokenizer is not None
    model = build(
        smollm2.config, smollm2.weights, kv_dtype=KVDType.FP32, dtype=torch.float32, draft=draft
    )
    count, max_tokens = (4, 64) if everything() else (2, 32)
    some = PromptFile("chat", read_prompts(HELD_OUT / "chat.txt").prompts[:count])
    asked, stop_ids = encode_prompts(some, tokenizer, 1000), tokenizer.special.stop_ids
    plan = HeldOutPlan(max_tokens, draft_tokens=3)
    (found,) = measure_held_out(model, draft.build(model), [asked], plan, stop_ids)
    assert found.steps > count * max_tokens / 3 and found.accept_length >= MIN_ACCEPT_LENGTH


@pytest.mark.full
def test_restored_prefixes_keep_its_accept_length(smollm2: Checkpoint, tmp_path: Path) -> None:
    """From device, host, and storage after a restart."""
    bed = ModelBed(smollm2, str(FOLDER), torch.device("cpu"))
    computed, *restored, _ = restored_drafts.measure(bed, CHAT[:2], 40, 3, tmp_path)
    assert computed.restored_tokens == 0 and computed.accept_length >= MIN_ACCEPT_LENGTH
    assert [found.prefix for found in restored] == ["device", "host", "storage"]
    for found in restored:
        assert found.restored_tokens > 0 and found.of_computed >= 0.98


# -- which draft is used --------------------------------------------------------------------------


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in the place of the default model, for which no draft is shipped."""
    folder = tiny_model.save(tmp_path / "model")
    monkeypatch.setattr(default_model, "default_model", lambda: folder)
    monkeypatch.setattr(default_model, "DRAFTS", tmp_path / "drafts")
    return folder


@pytest.fixture
def chosen(default: Path) -> Callable[..., tuple[str, Path | None]]:
    """What drafts, and from which folder."""

    def choose(model: Path = default, **settings: str) -> tuple[str, Path | None]:
        choice = choose_speculation(Settings(**settings), open_checkpoint(model))
        return choice.method, None if choice.draft is None else Path(choice.draft.checkpoint.path)

    return choose


def test_the_shipped_draft_is_for_the_default_model_alone(
    default: Path, chosen: Callable[..., tuple[str, Path | None]], tmp_path: Path
) -> None:
    assert chosen() == (NO_SPECULATION, None)
    config = open_checkpoint(default).config
    place = tiny_eagle3(config, tmp_path / "drafts" / default_model.NAME)
    assert chosen() == chosen(speculate="eagle3") == (EAGLE3, place)
    assert chosen(speculate="none") == (NO_SPECULATION, None)
    assert chosen(speculate="ngram") == ("ngram", None)
    other = tiny_model.save(tmp_path / "other")
    assert chosen(other) == (NO_SPECULATION, None)
    own = tiny_eagle3(config, tmp_path / "own")
    assert chosen(draft=str(own)) == (EAGLE3, own)
    beside = tiny_eagle3(config, default / "draft")
    assert chosen() == (EAGLE3, beside)


def test_without_the_default_model_no_draft_is_shipped(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_model, "DRAFTS", tmp_path)
        patch.setattr(default_model, "PACKAGE", "no-such-package")
        (tmp_path / default_model.NAME).mkdir()
        (tmp_path / default_model.NAME / "config.json").write_text("{}")
        assert default_model.shipped_draft(tmp_path) is None
        assert default_model.shipped_draft() == tmp_path / default_model.NAME
