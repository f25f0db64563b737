"""From settings to what drafts tokens: `--speculate`, `--draft` and what lies beside the weights.

    choose_speculation ─▶ build the target with its pools ─▶ build_draft ─▶ the cache ─▶ drafter

Without `--speculate` and `--draft` a checkpoint's own layer for multi-token prediction drafts; else
an EAGLE3 draft that lies beside the weights: in a folder `draft` of the model's folder, or in
`NAME.draft` beside a file `NAME.gguf`. The default model's draft comes with kvtide.
docs/SPECULATION.md is the guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtide.cache import TieredCache
from kvtide.engine import RankTopology
from kvtide.engine.engine import DRAFT_TOKENS
from kvtide.engine.speculation.drafter import Drafter
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.engine.speculation.ngram import NGRAM_DRAFTS, NgramDrafter
from kvtide.models import build_mtp, has_mtp, mtp_remark
from kvtide.models.checkpoint import Checkpoint
from kvtide.models.default_model import shipped_draft
from kvtide.models.draft import DraftModel
from kvtide.models.draft_checkpoint import DraftCheckpoint, open_draft
from kvtide.models.model import Decoder
from kvtide.models.model_errors import CheckpointError
from kvtide.server.setting_values import SettingsError
from kvtide.server.settings import EAGLE3, MTP, NGRAM, NO_SPECULATION, Settings
from kvtide.spec import SpecError


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    """What drafts tokens on this server.

    method  a value of `--speculate`
    draft   the opened draft, with eagle3
    note    why nothing better was found, or what drafts do otherwise than the checkpoint asks: for
            the line at the start
    """

    method: str = NO_SPECULATION
    draft: DraftCheckpoint | None = None
    note: str = ""

    def fingerprint(self, target: bytes) -> bytes:
        """The fingerprint of the draft's stored pages; those of MTP are the target's own."""
        if self.draft is not None:
            return self.draft.fingerprint()
        return target if self.method == MTP else b""

    def drafts(self, settings: Settings) -> int:
        """Drafts of a request in a step, at the most; 0 without a drafter."""
        if self.method == NO_SPECULATION:
            return 0
        return settings.draft_tokens or (NGRAM_DRAFTS if self.method == NGRAM else DRAFT_TOKENS)

    def within(self, drafts: int) -> SpeculationChoice:
        """Without a drafter if a step has no room for a draft."""
        if drafts or self.method == NO_SPECULATION:
            return self
        return SpeculationChoice(note=f"{self.method} has no room for a draft in hot buffers")

    def sentence(self, drafts: int) -> str:
        """The line about speculation that a starting server prints."""
        note = self.note and f"; {self.note}"
        if self.method == NO_SPECULATION:
            return f"speculation: none{note}"
        of = f" of {self.draft.checkpoint.path}" if self.draft is not None else ""
        return f"speculation: {self.method}{of}, up to {drafts} drafts{note}"


def choose_speculation(settings: Settings, checkpoint: Checkpoint) -> SpeculationChoice:
    """What the settings ask for, or refuse it; else what the checkpoint offers."""
    named = settings.speculate
    if named is None and settings.draft is not None:
        named = EAGLE3
    return _found(checkpoint) if named is None else _named(named, settings, checkpoint)


def _named(method: str, settings: Settings, checkpoint: Checkpoint) -> SpeculationChoice:
    if method == MTP:
        return _mtp(checkpoint)
    if method != EAGLE3:
        return SpeculationChoice(method)
    if settings.draft is not None:
        return SpeculationChoice(EAGLE3, open_draft(settings.draft))
    if (folder := _draft_folder(checkpoint)) is None:
        raise SettingsError(
            f"--speculate eagle3 needs a draft, and there is none at {_beside(checkpoint)}; name "
            "its folder with --draft"
        )
    return SpeculationChoice(EAGLE3, open_draft(folder))


def _mtp(checkpoint: Checkpoint) -> SpeculationChoice:
    return SpeculationChoice(MTP, note=mtp_remark(checkpoint.config, checkpoint.weights))


def _found(checkpoint: Checkpoint) -> SpeculationChoice:
    if has_mtp(checkpoint.config, checkpoint.weights):
        return _mtp(checkpoint)
    if (folder := _draft_folder(checkpoint)) is None:
        return SpeculationChoice()
    try:
        return SpeculationChoice(EAGLE3, open_draft(folder))
    except (CheckpointError, SpecError) as refusal:
        return SpeculationChoice(note=f"the draft beside the weights is not used: {refusal}")


def _draft_folder(checkpoint: Checkpoint) -> Path | None:
    """A draft beside these weights, or the one that comes with kvtide."""
    beside = _beside(checkpoint)
    return beside if (beside / "config.json").is_file() else shipped_draft(checkpoint.path)


def _beside(checkpoint: Checkpoint) -> Path:
    """Where a draft beside these weights would lie."""
    path = checkpoint.path
    return path / "draft" if checkpoint.gguf is None else path.with_suffix(".draft")


def build_draft(
    choice: SpeculationChoice, checkpoint: Checkpoint, target: Decoder
) -> DraftModel | None:
    """The draft model, beside the last stage of a target whose memory has its pools."""
    if not target.is_last:
        return None
    if choice.draft is not None:
        return choice.draft.build(target)
    if choice.method == MTP:
        return build_mtp(checkpoint.config, checkpoint.weights, target)
    return None


def make_drafter(
    choice: SpeculationChoice,
    draft: DraftModel | None,
    target: Decoder,
    cache: TieredCache,
    topology: RankTopology,
) -> Drafter | None:
    """What drafts on this rank; `draft` is what `build_draft` gave."""
    if choice.method == NO_SPECULATION:
        return None
    if choice.method == NGRAM:
        return NgramDrafter()
    memory = target.memory
    captures = (memory.layers,) if choice.draft is None else choice.draft.captures(memory)
    (vocabulary,) = cache.agreement.all_min([target.vocabulary])
    return ModelDrafter(draft, captures, cache, vocabulary, topology)
