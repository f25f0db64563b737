"""`kvtide draft train MODEL --text FILES --out DIR`: train an EAGLE3 draft for a model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from kvtide.cli.console import CommandError, parse_size, table
from kvtide.models.default_model import NAME, default_model
from kvtide.models.model_errors import CheckpointError
from kvtide.spec import SpecError
from kvtide.tiers import TierError
from kvtide.training.draft_shape import ShapeRequest
from kvtide.training.draft_training import (
    TrainingOptions,
    TrainingResult,
    encoded,
    open_target,
    train_draft,
)
from kvtide.training.eagle3_training import TrainingPlan
from kvtide.training.generate import AnswerPlan
from kvtide.training.held_out import HeldOut, HeldOutPlan
from kvtide.training.prompts import TrainingError, read_prompts

REFUSALS = (CheckpointError, CommandError, SpecError, TierError, TrainingError)
_ANSWERS, _TRAINING, _HELD_OUT = AnswerPlan(), TrainingPlan(), HeldOutPlan()


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
    train.add_argument("model", metavar="MODEL", help=f"a folder, a .gguf file, or {NAME}")
    train.add_argument("--text", nargs="+", required=True, type=Path, metavar="FILE")
    train.add_argument("--out", required=True, type=Path, metavar="DIR", help="the draft's folder")
    train.add_argument(
        "--held-out", nargs="+", default=[], type=Path, metavar="FILE",
        help="prompts to measure the accept length on; a row of the table for each file",
    )  # fmt: skip
    _add_shape(train)
    _add_plans(train)
    train.set_defaults(run=_train)


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
        "--capture", metavar="N,N,N", help="layers whose inputs it takes (three, over the model)"
    )


def _add_plans(parser: argparse.ArgumentParser) -> None:
    whole: dict[str, tuple[int, str]] = {
        "--answers": (_ANSWERS.count, "to every prompt, the first one greedy"),
        "--answer-tokens": (_ANSWERS.max_tokens, "of an answer, at the most"),
        "--at-once": (_ANSWERS.at_once, "answers generated together"),
        "--steps": (_TRAINING.steps, "of training, at the most"),
        "--batch-tokens": (_TRAINING.batch_tokens, "of a training step"),
        "--draft-tokens": (_TRAINING.recurrent, "drafts of a verify step to train and measure for"),
        "--measure-every": (1000, "steps between measurements on held-out prompts"),
        "--seed": (0, "of answers and training"),
    }
    for flag, (default, text) in whole.items():
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} ({default})"
        )
    parser.add_argument("--minutes", type=float, metavar="M", help="of training, at the most")
    parser.add_argument(
        "--temperature", type=float, default=_ANSWERS.temperature, metavar="T",
        help=f"of all answers but the first ({_ANSWERS.temperature})",
    )  # fmt: skip
    parser.add_argument(
        "--learning-rate", type=float, default=_TRAINING.rate, metavar="R",
        help=f"the highest ({_TRAINING.rate})",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda if there is one")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the draft that is in --out"
    )


def _train(args: argparse.Namespace) -> int:
    began = time.monotonic()
    options = _options(args)
    training = [read_prompts(path) for path in args.text]
    held_out = [read_prompts(path) for path in args.held_out]
    device = _device(args.device)
    torch.manual_seed(args.seed)
    path = default_model() if args.model == NAME else Path(args.model)
    target = open_target(path, options.shape, device)
    positions = target.model.max_positions
    text = encoded(target.checkpoint, training, held_out, options, positions)

    def report(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {line}", flush=True)

    report(f"the draft has {target.shape.weights:,} weights; its file takes {target.shape.bytes:,}")
    result = train_draft(target, text, options, args.out, report)
    print(_summary(result, args.out, options))
    return 0


def _options(args: argparse.Namespace) -> TrainingOptions:
    for name in ("draft_vocab", "layers", "intermediate", "answers", "answer_tokens", "at_once",
                 "steps", "batch_tokens", "measure_every"):  # fmt: skip
        value = getattr(args, name)
        if value is not None and value < 1:
            raise CommandError(f"--{name.replace('_', '-')} is {value}; use at least 1")
    if not 1 <= args.draft_tokens <= 16:
        raise CommandError(f"--draft-tokens is {args.draft_tokens}; use 1 to 16")
    if args.minutes is not None and args.minutes <= 0:
        raise CommandError(f"--minutes is {args.minutes:g}; use more than 0")
    if args.learning_rate <= 0:
        raise CommandError(f"--learning-rate is {args.learning_rate:g}; use more than 0")
    if not 0 <= args.temperature <= 100:
        raise CommandError(f"--temperature is {args.temperature:g}; use 0 to 100")
    if args.answer_tokens < 2:
        raise CommandError("--answer-tokens is 1, and a draft predicts tokens after it; use more")
    size = None if args.max_size is None else parse_size(args.max_size)
    captures = None if args.capture is None else _layers(args.capture)
    return TrainingOptions(
        ShapeRequest(args.draft_vocab, args.layers, args.intermediate, captures, size),
        AnswerPlan(args.answer_tokens, args.answers, args.temperature, args.seed, args.at_once),
        TrainingPlan(
            steps=args.steps,
            minutes=args.minutes,
            rate=args.learning_rate,
            recurrent=args.draft_tokens,
            batch_tokens=args.batch_tokens,
            seed=args.seed,
        ),
        HeldOutPlan(draft_tokens=args.draft_tokens),
        args.resume,
        measure_every=args.measure_every,
    )


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
        lines += ["", _held_out(result.held_out, options.held_out.draft_tokens)]
    return "\n".join(lines)


def _held_out(rows: Sequence[HeldOut], drafts: int) -> str:
    header = ["held out", "prompts", "verify steps", f"tokens per step, {drafts} drafts"]
    cells = [
        [row.category, row.prompts, f"{row.steps:,}", f"{row.accept_length:.2f}"] for row in rows
    ]
    return table(header, cells)
