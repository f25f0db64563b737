"""`kvtide draft`: train an EAGLE3 draft for a model, and answer the prompts that it learns from.

kvtide draft train MODEL --text FILES --out DIR
kvtide draft answer MODEL --text FILES --out FILE
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from kvtide.cli.console import CommandError, parse_size, table
from kvtide.models.default_model import NAME, default_model, shipped_draft
from kvtide.models.model_errors import CheckpointError
from kvtide.spec import SpecError
from kvtide.tiers import TierError
from kvtide.training import time_budget
from kvtide.training.draft_shape import HeadFormat, ShapeRequest
from kvtide.training.draft_training import (
    TrainingOptions,
    TrainingResult,
    TrainingTarget,
    encoded,
    open_target,
    train_draft,
)
from kvtide.training.eagle3_training import TrainingPlan
from kvtide.training.evaluation import Evaluated, evaluate_draft, open_trained
from kvtide.training.generate import AnswerFile, AnswerPlan, ShowLine, generate
from kvtide.training.held_out import HeldOutPlan
from kvtide.training.prompts import TrainingError, read_prompts
from kvtide.training.time_budget import TimeBudget

REFUSALS = (CheckpointError, CommandError, SpecError, TierError, TrainingError)
_ANSWERS, _TRAINING, _HELD_OUT = AnswerPlan(), TrainingPlan(), HeldOutPlan()
_IN_OUT = Path()
"""The draft to go on from is the one in --out."""
_ENDLESS = 10**9
"""Steps of a training that its time ends."""


def add(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="WHAT")
    train = verbs.add_parser(
        "train",
        help="train an EAGLE3 draft for a model",
        description="Train an EAGLE3 draft: the model answers the prompts of text files, and the "
        "draft learns to predict the answers from the model's hidden states. A file has a prompt "
        "in every line, or in every paragraph if it has empty lines. The draft is for `kvtide "
        "serve --draft DIR`.",
    )
    _add_model(train)
    train.add_argument("--out", required=True, type=Path, metavar="DIR", help="the draft's folder")
    train.add_argument(
        "--answered", nargs="+", default=[], type=Path, metavar="FILE",
        help="answers that `kvtide draft answer` wrote; then --text is not answered",
    )  # fmt: skip
    train.add_argument(
        "--held-out", nargs="+", default=[], type=Path, metavar="FILE",
        help="prompts to measure the accept length on; a row of the table for each file",
    )  # fmt: skip
    _add_shape(train)
    _add_answer_plan(train)
    _add_training_plan(train)
    train.set_defaults(run=_train)
    answer = verbs.add_parser(
        "answer",
        help="answer the prompts that drafts are trained on",
        description="Answer the prompts of text files, for `kvtide draft train --answered`. "
        "Several processes with a --part each use one device better than one does.",
    )
    _add_model(answer)
    answer.add_argument("--out", required=True, type=Path, metavar="FILE", help="the answers' file")
    answer.add_argument(
        "--part", default="1/1", metavar="I/N", help="every Nth prompt, from the Ith on (1/1)"
    )
    _add_answer_plan(answer)
    answer.set_defaults(run=_answer)
    evaluate = verbs.add_parser(
        "evaluate",
        help="measure the accept length of a draft",
        description="Answer the prompts of text files with a draft. At a temperature the expected "
        "acceptance is shown too: with shared noise, as here, and by rejection sampling.",
    )
    _add_model(evaluate)
    evaluate.add_argument("--draft", type=Path, metavar="DIR", help="its folder (the model's own)")
    evaluate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(0: greedy)")
    tokens = {"--answer-tokens": (_HELD_OUT.max_tokens, "of an answer, at the most")}
    drafts = {"--draft-tokens": (_HELD_OUT.draft_tokens, "drafts of a verify step")}
    _add_numbers(evaluate, tokens | drafts)
    evaluate.set_defaults(run=_evaluate)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"a folder, a .gguf file, or {NAME}")
    parser.add_argument("--text", nargs="+", required=True, type=Path, metavar="FILE")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda if there is one")


def _add_time_and_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random")
    parser.add_argument(
        "--minutes", type=float, metavar="M",
        help="for the whole command: what is not done by then is left out",
    )  # fmt: skip


def _add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft-vocab", type=int, default=4096, metavar="N", help="tokens it may predict (4096)"
    )
    parser.add_argument("--layers", type=int, default=1, metavar="N", help="of the draft (1)")
    parser.add_argument(
        "--intermediate", type=int, metavar="N", help="the width of its MLP (the model's)"
    )
    parser.add_argument(
        "--max-size", metavar="SIZE", help="of its file, such as 12MB: narrows the MLP"
    )
    parser.add_argument(
        "--lm-head", choices=[one.value for one in HeadFormat], default=HeadFormat.BF16.value,
        help="what its lm_head is published in; fp8 has block scales (bf16)",
    )  # fmt: skip
    parser.add_argument(
        "--capture", metavar="N,N,N", help="layers whose inputs it takes (three, over the model)"
    )


def _add_answer_plan(parser: argparse.ArgumentParser) -> None:
    _add_time_and_seed(parser)
    whole: dict[str, tuple[int, str]] = {
        "--answers": (_ANSWERS.count, "to every prompt, the first one greedy"),
        "--answer-tokens": (_ANSWERS.max_tokens, "of an answer, at the most"),
        "--at-once": (_ANSWERS.at_once, "answers generated together"),
    }
    _add_numbers(parser, whole)
    parser.add_argument(
        "--temperature", type=float, default=_ANSWERS.temperature, metavar="T",
        help=f"of all answers but the first ({_ANSWERS.temperature})",
    )  # fmt: skip


def _add_training_plan(parser: argparse.ArgumentParser) -> None:
    whole: dict[str, tuple[int, str]] = {
        "--batch-tokens": (_TRAINING.batch_tokens, "of a training step"),
        "--draft-tokens": (_TRAINING.recurrent, "drafts of a verify step to train and measure for"),
        "--warm-up": (_TRAINING.warm_up, "steps until the learning rate is the highest"),
        "--predict-every": (500, "steps between predictions for held-out prompts"),
    }
    _add_numbers(parser, whole)
    parser.add_argument(
        "--steps", type=int, metavar="N",
        help=f"of training, at the most ({_TRAINING.steps}; with --minutes as many as fit)",
    )  # fmt: skip
    parser.add_argument(
        "--learning-rate", type=float, default=_TRAINING.rate, metavar="R",
        help=f"the highest ({_TRAINING.rate})",
    )  # fmt: skip
    parser.add_argument(
        "--resume", nargs="?", type=Path, const=_IN_OUT, metavar="DIR",
        help="go on from the draft there (--out); with a larger --draft-vocab it gets more tokens",
    )  # fmt: skip


def _add_numbers(parser: argparse.ArgumentParser, whole: Mapping[str, tuple[int, str]]) -> None:
    for flag, (default, text) in whole.items():
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} ({default})"
        )


def _train(args: argparse.Namespace) -> int:
    options, budget = _options(args), TimeBudget(args.minutes)
    report = _reporter(budget)
    training = [read_prompts(path) for path in args.text]
    held_out = [read_prompts(path) for path in args.held_out]
    target = _target(args, options.shape)
    text = encoded(target, training, held_out, options)
    fingerprint = target.checkpoint.fingerprint()
    given = [one for path in args.answered for one in AnswerFile(path).read(fingerprint)]
    if given:
        tokens = sum(len(one.answer) for one in given)
        report(f"{len(args.answered)} files have {tokens:,} tokens in {len(given):,} answers")
    report(f"the draft has {target.shape.weights:,} weights; its file takes {target.shape.bytes:,}")
    result = train_draft(target, text, options, args.out, report, given, budget)
    print(_summary(result, args.out, options))
    return 0


def _answer(args: argparse.Namespace) -> int:
    plan, budget = _answer_plan(args), TimeBudget(args.minutes)
    report = _reporter(budget)
    part, parts = _part(args.part)
    training = [read_prompts(path) for path in args.text]
    target = _target(args, ShapeRequest())
    text = encoded(target, training, (), TrainingOptions(answers=plan))
    until = budget.end_of(time_budget.ALL)
    prompts = text.prompts[part - 1 :: parts]
    if not prompts:
        raise CommandError(
            f"--part is {args.part}, and there are {len(text.prompts)} prompts; use fewer parts"
        )
    answered = generate(target.model, prompts, plan, text.stop_ids, report, until)
    AnswerFile(args.out).write(answered, target.checkpoint.fingerprint())
    tokens = sum(len(one.answer) for one in answered)
    report(
        f"{args.out}: {tokens:,} tokens in {len(answered):,} answers to {len(prompts):,} prompts"
    )
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    _check_positive(args, "answer_tokens")
    _check_drafts(args)
    _check_temperature(args)
    files = [read_prompts(path) for path in args.text]
    path = _model(args)
    if (folder := args.draft or shipped_draft(path)) is None:
        raise CommandError(f"{args.model} has no draft that comes with it; name one with --draft")
    plan = HeldOutPlan(args.answer_tokens, args.draft_tokens, temperature=args.temperature)
    target = open_trained(path, folder, _device(args.device))
    text = encoded(target, (), files, TrainingOptions(held_out=plan))
    print(_evaluated(evaluate_draft(target, folder, text, plan), plan))
    return 0


def _evaluated(rows: Sequence[Evaluated], plan: HeldOutPlan) -> str:
    header = ["text", "prompts", "verify steps", f"tokens per step, {plan.draft_tokens} drafts"]
    if plan.temperature == 0:
        header.append("predicted")
    cells = []
    for row in rows:
        one = row.measured
        figures = [row.predicted or 0.0] if plan.temperature == 0 else []
        numbers = [f"{figure:.2f}" for figure in (one.accept_length, *figures)]
        cells.append([one.category, one.prompts, f"{one.steps:,}", *numbers])
    found = table(header, cells)
    return found if plan.temperature == 0 else f"{found}\n\n{_expected(rows)}"


def _expected(rows: Sequence[Evaluated]) -> str:
    """What to expect of each way to sample, over the same answers."""
    cells = [
        [row.measured.category, method, f"{chance:.3f}", f"{row.acceptance.lengths[method]:.2f}"]
        for row in rows
        if row.acceptance is not None
        for method, chance in row.acceptance.first.items()
    ]
    return table(["text", "sampled by", "first draft accepted", "tokens per step"], cells)


def _reporter(budget: TimeBudget) -> ShowLine:
    def report(line: str) -> None:
        print(f"[{budget.seconds:6.1f} s] {line}", flush=True)

    return report


def _target(args: argparse.Namespace, shape: ShapeRequest) -> TrainingTarget:
    device = _device(args.device)
    torch.manual_seed(args.seed)
    return open_target(_model(args), shape, device)


def _model(args: argparse.Namespace) -> Path:
    return default_model() if args.model == NAME else Path(args.model)


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts):
        return int(part), int(parts)
    raise CommandError(f"--part is {text!r}; use a number and how many there are, like 2/4")


def _options(args: argparse.Namespace) -> TrainingOptions:
    answers = _answer_plan(args)
    for name in ("draft_vocab", "layers", "intermediate", "steps", "batch_tokens", "warm_up",
                 "predict_every"):  # fmt: skip
        _check_positive(args, name)
    _check_drafts(args)
    if args.learning_rate <= 0:
        raise CommandError(f"--learning-rate is {args.learning_rate:g}; use more than 0")
    size = None if args.max_size is None else parse_size(args.max_size)
    captures = None if args.capture is None else _layers(args.capture)
    head = HeadFormat(args.lm_head)
    return TrainingOptions(
        ShapeRequest(args.draft_vocab, args.layers, args.intermediate, captures, size, head),
        answers,
        TrainingPlan(
            steps=args.steps or (_TRAINING.steps if args.minutes is None else _ENDLESS),
            rate=args.learning_rate,
            warm_up=args.warm_up,
            recurrent=args.draft_tokens,
            batch_tokens=args.batch_tokens,
            seed=args.seed,
        ),
        HeldOutPlan(draft_tokens=args.draft_tokens),
        args.out if args.resume is _IN_OUT else args.resume,
        predict_every=args.predict_every,
    )


def _answer_plan(args: argparse.Namespace) -> AnswerPlan:
    for name in ("answers", "answer_tokens", "at_once"):
        _check_positive(args, name)
    if args.minutes is not None and args.minutes <= 0:
        raise CommandError(f"--minutes is {args.minutes:g}; use more than 0")
    _check_temperature(args)
    if args.answer_tokens < 2:
        raise CommandError("--answer-tokens is 1, and a draft predicts tokens after it; use more")
    return AnswerPlan(args.answer_tokens, args.answers, args.temperature, args.seed, args.at_once)


def _check_positive(args: argparse.Namespace, name: str) -> None:
    value = getattr(args, name)
    if value is not None and value < 1:
        raise CommandError(f"--{name.replace('_', '-')} is {value}; use at least 1")


def _check_drafts(args: argparse.Namespace) -> None:
    if not 1 <= args.draft_tokens <= 16:
        raise CommandError(f"--draft-tokens is {args.draft_tokens}; use 1 to 16")


def _check_temperature(args: argparse.Namespace) -> None:
    if not 0 <= args.temperature <= 100:
        raise CommandError(f"--temperature is {args.temperature:g}; use 0 to 100")


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CommandError(f"--capture is {text!r}; use numbers of layers, like 2,15,27") from None


def _device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: torch finds no such device here; use cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _summary(result: TrainingResult, folder: Path, options: TrainingOptions) -> str:
    lines = [
        "",
        f"{folder}: {result.bytes:,} bytes, {result.weights:,} weights; trained "
        f"{result.last.number:,} steps on {result.answer_tokens:,} tokens, of which it knows "
        f"{result.coverage:.1%}",
    ]
    if result.held_out:
        lines += ["", _held_out(result, options.held_out.draft_tokens)]
    return "\n".join(lines)


def _held_out(result: TrainingResult, drafts: int) -> str:
    header = [
        "held out",
        "prompts",
        "verify steps",
        f"tokens per step, {drafts} drafts",
        "predicted",
    ]
    cells = [
        [row.category, row.prompts, f"{row.steps:,}", f"{row.accept_length:.2f}",
         f"{result.predicted.get(row.category, 0.0):.2f}"]
        for row in result.held_out
    ]  # fmt: skip
    return table(header, cells)
