"""All of a draft's training, in order: answers, vocabulary, hidden states, training, measurement.

The target is built once, with pools for the draft in its memory: it answers the prompts without a
draft, gives its hidden states, and verifies the drafts of the held-out measurement.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random

import torch

from kvtide.models import build
from kvtide.models.checkpoint import Checkpoint, OnDevice, open_checkpoint
from kvtide.models.draft_checkpoint import DraftCheckpoint, open_draft
from kvtide.models.eagle3 import target_tokens
from kvtide.models.model import Decoder
from kvtide.models.tokenizer import load_tokenizer
from kvtide.spec.families import KVDType
from kvtide.training import time_budget
from kvtide.training.draft_shape import QUANTIZATION, DraftShape, ShapeRequest, draft_shape
from kvtide.training.draft_vocabulary import (
    DraftVocabulary,
    choose_vocabulary,
    extended_vocabulary,
)
from kvtide.training.eagle3_training import DraftTraining, TrainingPlan, TrainingStep
from kvtide.training.features import TargetStates, target_states
from kvtide.training.generate import Answered, AnswerFile, AnswerPlan, ShowLine, generate
from kvtide.training.held_out import (
    HeldOut,
    HeldOutPlan,
    measure_held_out,
    predicted_accept_length,
)
from kvtide.training.prompts import (
    EncodedPrompts,
    PromptFile,
    TrainingError,
    encode_prompts,
    overlapping,
)
from kvtide.training.publish import TrainedDraft
from kvtide.training.starting_weights import start_from_draft, start_from_target
from kvtide.training.time_budget import TimeBudget
from kvtide.training.trainable_eagle3 import TrainableEagle3

ANSWERS = "answers.safetensors"
"""The file of answers beside a draft; who ships the draft leaves it out."""
STATES_FRACTION = 0.6
"""Of a device's free memory, for hidden states."""
_ENDLESS = TimeBudget()
_DTYPES = {"cpu": (torch.float32, KVDType.FP32), "cuda": (torch.bfloat16, KVDType.BF16)}


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What is trained, and how long.

    resume         the folder of a draft to go on from; the same one, or one with more tokens
    predict_every  steps between predictions for held-out prompts, and between drafts on disk
    """

    shape: ShapeRequest = field(default_factory=ShapeRequest)
    answers: AnswerPlan = field(default_factory=AnswerPlan)
    training: TrainingPlan = field(default_factory=TrainingPlan)
    held_out: HeldOutPlan = field(default_factory=HeldOutPlan)
    resume: Path | None = None
    report_every: int = 50
    predict_every: int = 500


@dataclass(frozen=True, slots=True)
class TrainingText:
    """Prompts to learn from and prompts to measure with; answers end at one of `stop_ids`."""

    training: Sequence[EncodedPrompts]
    held_out: Sequence[EncodedPrompts] = ()
    stop_ids: frozenset[int] = frozenset()

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [prompt for file in self.training for prompt in file.prompts]


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A published draft.

    coverage   of the answers' tokens, the fraction that it may predict
    held_out   accept lengths in the engine, by category
    predicted  the same from hidden states, as training saw it
    """

    bytes: int
    weights: int
    coverage: float
    answer_tokens: int
    last: TrainingStep
    held_out: list[HeldOut]
    predicted: dict[str, float]


class TrainingTarget:
    """A model that is to have a draft, and the untrained draft."""

    def __init__(self, checkpoint: Checkpoint, shape: DraftShape, device: torch.device) -> None:
        self.checkpoint, self.shape, self.device = checkpoint, shape, device
        self.draft = TrainableEagle3(shape).to(device)
        dtype, kv_dtype = _DTYPES[device.type]
        untrained = TrainedDraft.of(self.draft, _first_tokens(shape)).opened()
        with device:
            self.model: Decoder = build(
                checkpoint.config,
                OnDevice(checkpoint.weights, device),
                kv_dtype=kv_dtype,
                dtype=dtype,
                draft=untrained,
            )

    def measure(
        self, trained: TrainedDraft, text: TrainingText, plan: HeldOutPlan, until: float
    ) -> list[HeldOut]:
        """The accept length with the draft as it is published."""
        draft = trained.opened().build(self.model)
        return measure_held_out(self.model, draft, text.held_out, plan, text.stop_ids, until)


def open_target(path: Path, asked: ShapeRequest, device: torch.device) -> TrainingTarget:
    """The model in this folder or GGUF file, and a draft for it."""
    checkpoint = open_checkpoint(path)
    return TrainingTarget(checkpoint, draft_shape(checkpoint.config, asked), device)


def train_draft(
    target: TrainingTarget,
    text: TrainingText,
    options: TrainingOptions,
    folder: Path,
    report: ShowLine,
    given: Sequence[Answered] = (),
    budget: TimeBudget = _ENDLESS,
) -> TrainingResult:
    """Train a draft and publish it into the folder. `given`: answers that are there already."""
    known = None if options.resume is None else resumable_draft(target, options.resume)
    folder.mkdir(parents=True, exist_ok=True)
    answered = _usable(given) if given else _answers(target, text, options, folder, report, budget)
    vocabulary = _start(target, answered, known, report)
    captures, model = target.shape.captures, target.model
    held_out = held_out_states(target, text, options.held_out, budget.end_of(time_budget.HELD_OUT))
    fitting = _fitting(target, answered, report)
    states = target_states(model, captures, fitting, report, budget.end_of(time_budget.STATES))
    tokens = None if vocabulary is None else vocabulary.tokens
    trainer = DraftTraining(target.draft, model, tokens, options.training)

    def after(step: TrainingStep) -> None:
        report(_line(step))
        if step.number % options.predict_every == 0:
            TrainedDraft.of(target.draft, vocabulary).publish(folder)
            for category, some in held_out.items():
                length = predicted_accept_length(trainer, some)
                report(f"held out: {category} is to accept {length:.2f} a step")

    until = budget.end_of(time_budget.TRAINING)
    last = trainer.run(states, after, options.report_every, until)
    trained = TrainedDraft.of(target.draft, vocabulary)
    size = trained.publish(folder)
    report(f"published {size:,} bytes; measures held-out prompts")
    predicted = {one: predicted_accept_length(trainer, some) for one, some in held_out.items()}
    measured = target.measure(trained, text, options.held_out, budget.end_of(time_budget.ALL))
    return TrainingResult(
        size,
        target.shape.weights,
        1.0 if vocabulary is None else vocabulary.coverage,
        sum(len(one.answer) for one in answered),
        last,
        measured,
        predicted,
    )


def encoded(
    target: TrainingTarget,
    training: Sequence[PromptFile],
    held_out: Sequence[PromptFile],
    options: TrainingOptions,
) -> TrainingText:
    """Prompts as the target takes them; refuses what cannot be used."""
    checkpoint, max_positions = target.checkpoint, target.model.max_positions
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise TrainingError(
            f"{checkpoint.path}: the model has no tokenizer, and prompts are text; put its "
            "tokenizer.json there"
        )
    if both := overlapping(training, held_out):
        raise TrainingError(
            f"{len(both)} prompts are both trained on and held out, {sorted(both)[0][:40]!r} for "
            "one; held-out prompts must be others"
        )
    room = max_positions - options.answers.max_tokens
    held_room = max_positions - options.held_out.max_tokens
    return TrainingText(
        [encode_prompts(file, tokenizer, room) for file in training],
        [encode_prompts(file, tokenizer, held_room) for file in held_out],
        tokenizer.special.stop_ids,
    )


# -- parts ---------------------------------------------------------------------------------------


def _answers(
    target: TrainingTarget,
    text: TrainingText,
    options: TrainingOptions,
    folder: Path,
    report: ShowLine,
    budget: TimeBudget,
) -> list[Answered]:
    """The target's answers: those in the folder, if they are of these prompts and this plan."""
    prompts, stop_ids, plan = text.prompts, text.stop_ids, options.answers
    made_from = (target.checkpoint.fingerprint(), prompts, asdict(plan), sorted(stop_ids))
    label = hashlib.sha256(repr(made_from).encode()).hexdigest()
    file = AnswerFile(folder / ANSWERS)
    answered = file.read_if(label)
    if answered is None:
        until = budget.end_of(time_budget.ANSWERS)
        answered = generate(target.model, prompts, plan, stop_ids, report, until)
        file.write(answered, target.checkpoint.fingerprint(), label)
        source = "generated"
    else:
        source = f"{file.path} has"
    tokens = sum(len(one.answer) for one in answered)
    report(f"{source} {tokens:,} tokens in {len(answered):,} answers to {len(prompts):,} prompts")
    return _usable(answered)


def _usable(answered: Sequence[Answered]) -> list[Answered]:
    """Those with something to predict: two tokens."""
    if not (usable := [one for one in answered if len(one.answer) > 1]):
        raise TrainingError(
            "the model ends every answer at once, and there is nothing to learn from; use other "
            "prompts, or a model that answers"
        )
    return usable


def _fitting(
    target: TrainingTarget, answered: Sequence[Answered], report: ShowLine
) -> Sequence[Answered]:
    """As many answers as the device has memory for beside the training, in random order."""
    mixed = list(answered)
    Random(0).shuffle(mixed)
    if target.device.type != "cuda":
        return mixed
    free, _ = torch.cuda.mem_get_info(target.device)
    row = (len(target.shape.captures) + 1) * target.model.width * target.model.dtype.itemsize
    ends = accumulate(len(one.tokens) * row for one in mixed)
    count = sum(end <= STATES_FRACTION * free for end in ends)
    if count < len(mixed):
        report(f"hidden states of {count:,} of {len(mixed):,} answers fit into the device's memory")
    return mixed[: max(1, count)]


def held_out_states(
    target: TrainingTarget, text: TrainingText, plan: HeldOutPlan, until: float = math.inf
) -> dict[str, TargetStates]:
    """Hidden states over the target's answers to the held-out prompts, by category."""
    prompts = [prompt for file in text.held_out for prompt in file.prompts]
    if not prompts:
        return {}
    answered = generate(target.model, prompts, plan.answers, text.stop_ids, _silent, until)
    found = {}
    for file in text.held_out:
        own = set(file.prompts)
        some = [one for one in answered if one.prompt in own and len(one.answer) > 1]
        if some:
            captures = target.shape.captures
            found[file.category] = target_states(target.model, captures, some, _silent)
    return found


def _silent(line: str) -> None:
    pass


def _start(
    target: TrainingTarget,
    answered: Sequence[Answered],
    known: DraftCheckpoint | None,
    report: ShowLine,
) -> DraftVocabulary | None:
    """The weights to begin with: the target's, or those of a draft that was trained before."""
    count, tokens = target.shape.vocabulary, target.model.vocabulary
    if known is None:
        vocabulary = choose_vocabulary(answered, count, tokens)
        weights = OnDevice(target.checkpoint.weights, target.device)
        start_from_target(target.draft, target.model, weights, vocabulary)
    else:
        own = target_tokens(known.weights)
        vocabulary = None
        if own is not None and count is not None:
            vocabulary = extended_vocabulary(answered, own, count, tokens)
        start_from_draft(target.draft, target.model, known.weights, vocabulary)
        report(
            f"goes on from the draft in {known.checkpoint.path}, of {_predicted(known):,} tokens"
        )
    if vocabulary is not None:
        report(f"{count:,} tokens cover {vocabulary.coverage:.1%} of the answers")
    return vocabulary


def resumable_draft(target: TrainingTarget, folder: Path) -> DraftCheckpoint:
    """The draft in this folder; refuses one of another shape, or with more tokens."""
    known, shape = open_draft(folder), target.shape
    if _same_in_all(known.config.values) != _same_in_all(shape.config()):
        raise TrainingError(
            f"{folder}: the draft there has another shape; train a new one, or ask for that shape"
        )
    if (found := _predicted(known)) > shape.predicted:
        raise TrainingError(
            f"{folder}: the draft there has {found:,} tokens, and {shape.predicted:,} were asked "
            "for; ask for as many with --draft-vocab, or for more"
        )
    return known


def _same_in_all(config: Mapping[str, object]) -> dict[str, object]:
    """The fields that a draft and one that goes on from it share."""
    return {k: v for k, v in config.items() if k not in ("draft_vocab_size", QUANTIZATION)}


def _predicted(known: DraftCheckpoint) -> int:
    """Tokens that it may predict."""
    tokens = known.config.count("vocab_size")
    return known.config.count("draft_vocab_size", default=tokens)


def _first_tokens(shape: DraftShape) -> DraftVocabulary | None:
    """In the place of a vocabulary until there are answers."""
    if shape.vocabulary is None:
        return None
    return DraftVocabulary(torch.arange(shape.vocabulary), shape.target_vocabulary, 0.0)


def _line(step: TrainingStep) -> str:
    right = " ".join(f"{one:.3f}" for one in step.top_1)
    return (
        f"step {step.number:,}: loss {step.loss:.3f}, top-1 by draft {right}, accepts "
        f"{step.accept_length:.2f} a step; {step.tokens_s:,.0f} tokens/s"
    )
