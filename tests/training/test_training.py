"""Answers, hidden states, and the loop: what a draft learns from is what the target says."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtide.engine import Engine, RequestParams
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.training.draft_shape import ShapeRequest, draft_shape
from kvtide.training.draft_training import (
    TrainingOptions,
    TrainingTarget,
    TrainingText,
    open_target,
    train_draft,
)
from kvtide.training.draft_vocabulary import choose_vocabulary
from kvtide.training.eagle3_training import PaddedBatch, TrainingPlan
from kvtide.training.features import TargetStates, target_logits, target_states
from kvtide.training.generate import (
    Answered,
    AnswerPlan,
    generate,
    load_answers,
    open_training_cache,
    save_answers,
)
from kvtide.training.held_out import HeldOutPlan, measure_held_out
from kvtide.training.prompts import EncodedPrompts, TrainingError
from tests.engine.speculation.lookup_pair import pair, walks
from tests.models.test_eagle3 import target_states as oracle_states
from tests.models.tiny import VOCABULARY, checkpoint, oracle, prompt

CPU = torch.device("cpu")
ASKED = ShapeRequest(vocabulary=64, captures=(0, 1, 2), intermediate=48)
PLAN = AnswerPlan(max_tokens=12, count=3, at_once=4)


def silent(line: str) -> None:
    pass


def prompts(count: int) -> list[tuple[int, ...]]:
    return [tuple(prompt(5 + 3 * number, number)) for number in range(count)]


@pytest.fixture(scope="module")
def target() -> TrainingTarget:
    torch.manual_seed(0)
    config = checkpoint("llama")
    return TrainingTarget(config, draft_shape(config.config, ASKED), CPU)


@pytest.fixture(scope="module")
def answered(target: TrainingTarget) -> list[Answered]:
    return generate(target.model, prompts(4), PLAN, frozenset(), silent)


def test_first_answers_are_greedy_and_the_others_sampled(
    target: TrainingTarget, answered: list[Answered]
) -> None:
    assert [one.prompt for one in answered] == [p for p in prompts(4) for _ in range(3)]
    model = oracle("llama")
    for one in answered[::3]:
        ids = torch.tensor([one.tokens])
        with torch.no_grad():
            said = model(ids, use_cache=False).logits[0].argmax(-1)
        assert tuple(said[len(one.prompt) - 1 : -1].tolist()) == one.answer
    sampled = [one.answer for number, one in enumerate(answered) if number % 3]
    assert len(set(sampled)) == len(sampled)
    again = generate(target.model, prompts(4), PLAN, frozenset(), silent)
    assert again == answered
    other = generate(target.model, prompts(4), replace(PLAN, seed=1), frozenset(), silent)
    assert [one.answer for one in other[::3]] == [one.answer for one in answered[::3]]
    assert not {one.answer for one in other} & set(sampled)


def test_answers_end_at_a_stop_token(target: TrainingTarget, answered: list[Answered]) -> None:
    stop = answered[0].answer[4]
    found = generate(target.model, prompts(1), PLAN, frozenset({stop}), silent)
    first = answered[0].answer.index(stop)
    assert found[0].answer == answered[0].answer[: first + 1]


def test_answers_of_another_label_are_not_loaded(answered: list[Answered], tmp_path: Path) -> None:
    file = tmp_path / "answers.safetensors"
    assert load_answers(file, "a") is None
    save_answers(file, answered, "a")
    assert load_answers(file, "a") == answered
    assert load_answers(file, "b") is None
    file.write_bytes(b"not answers")
    with pytest.raises(TrainingError, match=r"not readable as answers .*; remove it"):
        load_answers(file, "a")


def test_hidden_states_are_those_of_transformers(
    target: TrainingTarget, answered: list[Answered]
) -> None:
    found = target_states(target.model, (0, 1, 2), answered, silent)
    assert len(found) == len(answered)
    for one, states in zip(answered, found, strict=True):
        assert states.tokens.tolist() == list(one.tokens) and states.prompt == len(one.prompt)
        *wanted, last = oracle_states(list(one.tokens), (0, 1, 2, 3))
        assert torch.allclose(states.captured, torch.cat(wanted, -1), atol=2e-5)
        assert torch.allclose(states.last, last, atol=2e-5)
    with torch.no_grad():
        logits = oracle("llama")(found[0].tokens[None], use_cache=False).logits[0]
    assert torch.allclose(torch.cat(list(target_logits(target.model, found[0].last))), logits,
                          atol=2e-5)  # fmt: skip


def test_the_vocabulary_is_the_most_frequent_tokens_of_answers() -> None:
    said = [Answered((9, 9, 9, 9), (5, 5, 5, 2, 2, 7)), Answered((9,), (5, 7, 1))]
    found = choose_vocabulary(said, 3, 11)
    assert found is not None
    assert found.tokens.tolist() == [2, 5, 7]
    assert found.coverage == 8 / 9
    assert found.d2t.tolist() == [2, 4, 5]
    assert found.t2d.nonzero().squeeze(1).tolist() == [2, 5, 7]
    assert choose_vocabulary(said, None, 11) is None
    padded = choose_vocabulary(said, 6, 11)
    assert padded is not None and padded.tokens.tolist() == [0, 1, 2, 3, 5, 7]


def test_rows_count_whose_predicted_token_is_in_an_answer() -> None:
    states = [
        TargetStates(
            torch.arange(1, 1 + count), prompt, torch.zeros(count, 2), torch.zeros(count, 1)
        )
        for count, prompt in ((7, 4), (4, 1))
    ]
    batch = PaddedBatch.of(states)
    # A row at t predicts the token at t + 2 + step: those of answers are at 4..6, and at 1..3.
    assert batch.counted(0).nonzero().tolist() == [[0, 2], [0, 3], [0, 4], [1, 0], [1, 1]]
    assert batch.counted(1).nonzero().tolist() == [[0, 1], [0, 2], [0, 3], [1, 0]]
    assert batch.ahead(2).tolist() == [[3, 4, 5, 6, 7, 0, 0], [3, 4, 0, 0, 0, 0, 0]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk that is sure of what it says."""
    folder = tmp_path_factory.mktemp("saved")
    model = copy.deepcopy(oracle("llama"))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(folder)
    return folder


def options(steps: int) -> TrainingOptions:
    return TrainingOptions(
        ASKED,
        AnswerPlan(max_tokens=24, count=2),
        TrainingPlan(steps=steps, rate=3e-3, warm_up=5, batch_tokens=256),
        HeldOutPlan(max_tokens=16),
        report_every=10,
    )


def text() -> TrainingText:
    held_out = EncodedPrompts("held", tuple(tuple(prompt(9, seed)) for seed in (50, 51)))
    return TrainingText([EncodedPrompts("train", tuple(prompts(6)))], [held_out])


def test_training_lowers_the_loss_and_publishes_a_draft(saved: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    target, lines = open_target(saved, ASKED, CPU), []
    result = train_draft(target, text(), options(60), tmp_path, lines.append)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines if "loss" in line]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0], losses
    assert result.last.number == 60 and len(result.last.top_1) == 3
    assert [(one.category, one.prompts) for one in result.held_out] == [("held", 2)]
    assert 1 <= result.held_out[0].accept_length <= 4
    assert (tmp_path / "model.safetensors").stat().st_size == result.bytes

    resumed: list[str] = []
    again = open_target(saved, ASKED, CPU)
    more = train_draft(again, text(), replace(options(10), resume=True), tmp_path, resumed.append)
    assert "has" in resumed[0] and "goes on from the draft" in resumed[2]
    assert more.last.loss < 0.8 * losses[0]
    other = open_target(saved, replace(ASKED, layers=2), CPU)
    with pytest.raises(TrainingError, match="the draft there has another shape; train into"):
        train_draft(other, text(), replace(options(10), resume=True), tmp_path, silent)


def test_training_ends_after_its_minutes(saved: Path, tmp_path: Path) -> None:
    target = open_target(saved, ASKED, CPU)
    plan = replace(options(10_000), training=TrainingPlan(minutes=0.01, batch_tokens=256))
    result = train_draft(target, text(), plan, tmp_path, silent)
    assert 1 <= result.last.number < 1000


def test_a_model_that_says_nothing_is_refused(saved: Path, tmp_path: Path) -> None:
    target = open_target(saved, ASKED, CPU)
    mute = replace(text(), stop_ids=frozenset(range(VOCABULARY)))
    with pytest.raises(TrainingError, match="ends every answer at once"):
        train_draft(target, mute, options(1), tmp_path, silent)


def test_the_learning_rate_warms_up_and_falls() -> None:
    plan = TrainingPlan(rate=1.0, warm_up=4)
    assert [plan.rate_at(step, 0.0) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert plan.rate_at(9, 1.0) == pytest.approx(0.05)


def test_held_out_accept_length_is_that_of_a_count_by_hand() -> None:
    known = pair()
    asked = tuple(one.prompt for one in walks(3, pairs=10, seed=6))
    plan = HeldOutPlan(max_tokens=20, draft_tokens=3)
    file = EncodedPrompts("held", asked)
    (found,) = measure_held_out(known.target, known.draft, [file], plan, frozenset())
    steps = tokens = 0
    for one in asked:
        cache = open_training_cache(known.target, 256)
        drafter = ModelDrafter(known.draft, known.draft.captures, cache, known.target.vocabulary)
        drafter.cost = 0.0
        engine = Engine(known.target, cache, drafter=drafter, draft_tokens=3)
        request = engine.submit(RequestParams(one, 20))
        while not engine.idle:
            verified = bool(request.drafts)
            given = len(engine.step())
            steps, tokens = steps + verified, tokens + given * verified
        cache.close()
    assert (found.category, found.prompts) == ("held", 3)
    assert (found.steps, found.tokens) == (steps, tokens)
    assert found.accept_length == tokens / steps > 2


def test_reports_come_every_so_many_steps_and_at_the_end(saved: Path, tmp_path: Path) -> None:
    target, lines = open_target(saved, ASKED, CPU), []
    plan = replace(options(25), measure_every=20)
    train_draft(target, text(), plan, tmp_path, lines.append)
    assert [line.split(":")[0] for line in lines if line.startswith(("step", "held"))] == [
        "step 10", "step 20", "held out", "step 25",
    ]  # fmt: skip
