"""Answers, hidden states, and the loop: what a draft learns from is what the target says."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtide.engine import Engine, RequestParams
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.models.draft_checkpoint import open_draft
from kvtide.models.eagle3 import target_tokens
from kvtide.training.batches import PaddedBatch
from kvtide.training.draft_shape import HeadFormat, ShapeRequest, draft_shape
from kvtide.training.draft_training import (
    TrainingOptions,
    TrainingTarget,
    TrainingText,
    open_target,
    train_draft,
)
from kvtide.training.draft_vocabulary import choose_vocabulary, extended_vocabulary
from kvtide.training.eagle3_training import DraftTraining, TrainingPlan
from kvtide.training.features import TargetStates, target_logits, target_states
from kvtide.training.generate import (
    Answered,
    AnswerFile,
    AnswerPlan,
    generate,
    open_training_cache,
)
from kvtide.training.held_out import HeldOutPlan, measure_held_out
from kvtide.training.prompts import EncodedPrompts, TrainingError
from kvtide.training.starting_weights import extended_rows
from kvtide.training.time_budget import TimeBudget
from kvtide.training.trainable_eagle3 import TrainableEagle3
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
            greedy = model(ids, use_cache=False).logits[0].argmax(-1)
        assert tuple(greedy[len(one.prompt) - 1 : -1].tolist()) == one.answer
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
    file = AnswerFile(tmp_path / "made" / "answers.safetensors")
    assert file.read_if("a") is None
    file.write(answered, b"model", "a")
    assert file.read_if("a") == answered
    assert file.read_if("b") is None
    assert file.read(b"model") == answered
    with pytest.raises(TrainingError, match="another model gave these answers; answer the prompts"):
        file.read(b"another")
    file.path.write_bytes(b"not answers")
    with pytest.raises(TrainingError, match=r"not readable as answers .*; remove it"):
        file.read_if("a")


def test_answers_end_in_time(target: TrainingTarget, answered: list[Answered]) -> None:
    """What is cut off is the beginning of the whole answer, and first answers come first."""
    engine_steps = 0

    class Clock:
        def monotonic(self) -> float:
            nonlocal engine_steps
            engine_steps += 1
            return engine_steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtide.training.generate.time", Clock())
        found = generate(target.model, prompts(4), PLAN, frozenset(), silent, until=20)
    assert [one.prompt for one in found] == prompts(4)
    for one, whole in zip(found, answered[::3], strict=True):
        assert 1 <= len(one.answer) < len(whole.answer)
        assert one.answer == whole.answer[: len(one.answer)]
    assert not generate(target.model, prompts(4), PLAN, frozenset(), silent, until=0)


def test_hidden_states_are_those_of_transformers(
    target: TrainingTarget, answered: list[Answered]
) -> None:
    found = target_states(target.model, (0, 1, 2), answered, silent)
    assert len(found) == len(answered)
    logits = torch.cat(list(target_logits(target.model, found.last)))
    for number, one in enumerate(answered):
        first, end = found.starts[number], found.starts[number] + found.lengths[number]
        assert found.tokens[first:end].tolist() == list(one.tokens)
        assert found.prompts[number] == len(one.prompt)
        *wanted, last = oracle_states(list(one.tokens), (0, 1, 2, 3))
        assert torch.allclose(found.captured[first:end], torch.cat(wanted, -1), atol=2e-5)
        assert torch.allclose(found.last[first:end], last, atol=2e-5)
        with torch.no_grad():
            expected = oracle("llama")(found.tokens[None, first:end], use_cache=False).logits[0]
        assert torch.allclose(logits[first:end], expected, atol=2e-5)
    late = target_states(target.model, (0, 1, 2), answered, silent, until=0.0)
    assert len(late) == len(answered), "all that fit into one step"
    assert torch.equal(late.states, found.states)


def test_the_vocabulary_is_the_most_frequent_tokens_of_answers() -> None:
    answered = [Answered((9, 9, 9, 9), (5, 5, 5, 2, 2, 7)), Answered((9,), (5, 7, 1))]
    found = choose_vocabulary(answered, 3, 11)
    assert found is not None
    assert found.tokens.tolist() == [2, 5, 7]
    assert found.coverage == 8 / 9
    assert found.d2t.tolist() == [2, 4, 5]
    assert found.t2d.nonzero().squeeze(1).tolist() == [2, 5, 7]
    assert choose_vocabulary(answered, None, 11) is None
    padded = choose_vocabulary(answered, 6, 11)
    assert padded is not None and padded.tokens.tolist() == [0, 1, 2, 3, 5, 7]
    more = extended_vocabulary(answered, torch.tensor([4, 7]), 4, 11)
    assert more.tokens.tolist() == [2, 4, 5, 7] and more.coverage == 8 / 9
    assert more.d2t.tolist() == [2, 3, 3, 4]
    same = extended_vocabulary(answered, torch.tensor([4, 7]), 2, 11)
    assert same.tokens.tolist() == [4, 7] and same.coverage == 2 / 9


def test_rows_count_whose_predicted_token_is_in_an_answer() -> None:
    tokens = torch.tensor([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4])
    states = TargetStates(tokens, tokens[:, None].repeat(1, 3), 1, (0, 7), (7, 4), (4, 1))
    batch = PaddedBatch.of(states, [0, 1])
    assert batch.captured.shape == (2, 7, 2) and batch.last.shape == (2, 7, 1)
    assert batch.last[1, :4, 0].tolist() == [1, 2, 3, 4]
    # A row at t predicts the token at t + 2 + step: those of answers are at 4..6, and at 1..3.
    assert batch.counted(0).nonzero().tolist() == [[0, 2], [0, 3], [0, 4], [1, 0], [1, 1]]
    assert batch.counted(1).nonzero().tolist() == [[0, 1], [0, 2], [0, 3], [1, 0]]
    assert batch.before_answers.nonzero().tolist() == [
        [0, 3], [0, 4], [0, 5], [1, 0], [1, 1], [1, 2],
    ]  # fmt: skip
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
    more = train_draft(
        again, text(), replace(options(10), resume=tmp_path), tmp_path, resumed.append
    )
    assert "has" in resumed[0] and "goes on from the draft" in resumed[1]
    assert more.last.loss < 0.8 * losses[0]
    other = open_target(saved, replace(ASKED, layers=2), CPU)
    with pytest.raises(TrainingError, match="the draft there has another shape; train a new"):
        train_draft(other, text(), replace(options(10), resume=tmp_path), tmp_path / "x", silent)
    fewer = open_target(saved, replace(ASKED, vocabulary=63), CPU)
    with pytest.raises(TrainingError, match="has 64 tokens, and 63 were asked for; ask for as"):
        train_draft(fewer, text(), replace(options(10), resume=tmp_path), tmp_path / "x", silent)
    assert not (tmp_path / "x").exists()


def test_a_target_in_16_bits_is_trained_for(tmp_path: Path) -> None:
    """Its weights stay packed on a CPU that has a compiler, also while the draft is trained."""
    copy.deepcopy(oracle("llama")).bfloat16().save_pretrained(tmp_path / "target")
    target = open_target(tmp_path / "target", ASKED, CPU)
    result = train_draft(target, text(), options(2), tmp_path / "draft", silent)
    assert result.last.number == 2 and result.last.loss > 0


@pytest.fixture(scope="module")
def first(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained draft, to go on from."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("drafts") / "first"
    train_draft(open_target(saved, ASKED, CPU), text(), options(30), folder, silent)
    return folder


@pytest.mark.parametrize("count", [100, VOCABULARY], ids=["more-tokens", "all-tokens"])
def test_a_resumed_draft_keeps_its_weights_and_gets_more_tokens(
    count: int, saved: Path, first: Path, tmp_path: Path
) -> None:
    """Published as fp8, into another folder, after a step that changes next to nothing."""
    torch.manual_seed(0)
    second, before = tmp_path / "second", open_draft(first)
    known = target_tokens(before.weights)
    assert known is not None and len(known) == 64
    still = replace(options(1), resume=first, training=TrainingPlan(steps=1, rate=1e-12))
    asked, lines = replace(ASKED, vocabulary=count, lm_head=HeadFormat.FP8), list[str]()
    target = open_target(saved, asked, CPU)
    result = train_draft(target, text(), still, second, lines.append)
    assert f"goes on from the draft in {first}, of 64 tokens" in lines[1]
    assert result.bytes <= target.shape.bytes

    after = open_draft(second)
    own = target_tokens(after.weights)
    tokens = torch.arange(VOCABULARY) if own is None else own
    assert (own is None) == (count == VOCABULARY) and len(tokens) == count
    assert torch.equal(tokens, tokens.unique()) and torch.isin(known, tokens).all()
    if own is not None:
        assert torch.equal(after.weights.get("t2d").nonzero().squeeze(1), own)
        answers = AnswerFile(second / "answers.safetensors").read(target.checkpoint.fingerprint())
        counts = torch.bincount(torch.tensor([t for one in answers for t in one.answer]))
        new, left = own[~torch.isin(own, known)], counts.clone()
        left[own] = 0
        assert counts[new].min() >= left.max()

    trained, head = (one.weights.get("lm_head.weight").float() for one in (before, after))
    places = torch.searchsorted(tokens, known)
    assert torch.allclose(head[places], trained, rtol=1 / 16, atol=1e-4)
    fc = [one.weights.get("fc.weight") for one in (before, after)]
    assert torch.equal(*fc)
    # New rows are near the target's, and nearer than the rows of other tokens are.
    new = ~torch.isin(tokens, known)
    rows = target.model.head.weight
    alike = torch.cosine_similarity(head[new][:, None], rows[None], dim=-1)
    assert torch.equal(alike.argmax(1), tokens[new])


def test_new_rows_of_a_head_move_as_the_known_ones_have() -> None:
    torch.manual_seed(0)
    head = torch.randn(400, 12)
    turn, shift = torch.eye(12) + 0.2 * torch.randn(12, 12), torch.randn(12)
    known, tokens = torch.arange(0, 400, 2), torch.arange(0, 300)
    trained = head[:300:2] @ turn + shift
    rows = extended_rows(trained, known[:150], tokens, head)
    assert torch.equal(rows[::2], trained)
    wanted = head[1:300:2] @ turn + shift
    assert (rows[1::2] - wanted).norm() < 0.2 * (head[1:300:2] - wanted).norm()


@pytest.mark.full
def test_training_ends_after_its_minutes(saved: Path, tmp_path: Path) -> None:
    target = open_target(saved, ASKED, CPU)
    began = time.monotonic()
    result = train_draft(target, text(), options(10**6), tmp_path, silent, (), TimeBudget(0.05))
    assert 1 <= result.last.number < 1000
    assert time.monotonic() - began < 10


def test_a_model_that_says_nothing_is_refused(saved: Path, tmp_path: Path) -> None:
    target = open_target(saved, ASKED, CPU)
    mute = replace(text(), stop_ids=frozenset(range(VOCABULARY)))
    with pytest.raises(TrainingError, match="ends every answer at once"):
        train_draft(target, mute, options(1), tmp_path, silent)


@pytest.mark.parametrize("known", [None, 64], ids=["all-tokens", "some-tokens"])
def test_the_loss_is_that_of_a_count_by_hand(
    known: int | None, target: TrainingTarget, answered: list[Answered]
) -> None:
    """Cross-entropy at rows whose greedy token the draft has; a step on, 0.8 of it."""
    model, some = target.model, answered[:3]
    vocabulary = choose_vocabulary(answered, known, VOCABULARY)
    tokens = torch.arange(VOCABULARY) if vocabulary is None else vocabulary.tokens
    shape = replace(target.shape, vocabulary=known)
    torch.manual_seed(1)
    draft = TrainableEagle3(shape)
    states = target_states(model, shape.captures, some, silent)
    given = None if vocabulary is None else vocabulary.tokens
    found = DraftTraining(draft, model, given, TrainingPlan(recurrent=2)).loss(
        PaddedBatch.of(states, range(len(states)))
    )
    wanted, hits = [0.0, 0.0], [0, 0]
    counts, rows = [0, 0], [0, 0]
    for start, length, prompted in zip(states.starts, states.lengths, states.prompts, strict=True):
        span = slice(start, start + length)
        (logits,) = target_logits(model, states.last[span])
        known_tokens = states.tokens[span].tolist()
        ahead = [torch.tensor([*known_tokens[1 + s :], *[0] * (1 + s)]) for s in (0, 1)]
        with torch.no_grad():
            hidden = draft(states.captured[None, span], [model.embedding(a)[None] for a in ahead])
            log_probs = [draft.logits(step)[0].log_softmax(-1) for step in hidden]
        for step in (0, 1):
            for predicted in range(max(prompted, 2 + step), length):
                row, best = predicted - 2 - step, int(logits[predicted - 1].argmax())
                rows[step] += 1
                hits[step] += int(tokens[log_probs[step][row].argmax()]) == best
                if best in tokens:
                    share = logits[predicted - 1][tokens].softmax(-1)
                    wanted[step] -= float((share * log_probs[step][row]).sum())
                    counts[step] += 1
    assert min(counts) > 0 and (known is None) == (counts == rows)
    by_hand = wanted[0] / counts[0] + 0.8 * wanted[1] / counts[1]
    assert found.loss.item() == pytest.approx(by_hand, rel=1e-5)
    assert found.top_1.tolist() == pytest.approx([hits[s] / rows[s] for s in (0, 1)])


def test_the_learning_rate_warms_up_and_falls() -> None:
    plan = TrainingPlan(rate=1.0, warm_up=4)
    assert [plan.rate_at(step, 0.0) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert plan.rate_at(9, 1.0) == pytest.approx(0.02)


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
        engine = Engine(known.target, cache, drafter=drafter, draft_tokens=3, fixed_drafts=True)
        request = engine.submit(RequestParams(one, 20))
        while not engine.idle:
            verified = bool(request.drafts)
            given = len(engine.step())
            steps, tokens = steps + verified, tokens + given * verified
        cache.close()
    assert (found.category, found.prompts) == ("held", 3)
    assert (found.steps, found.tokens) == (steps, tokens)
    assert found.accept_length == tokens / steps > 2


@pytest.mark.full
def test_reports_come_every_so_many_steps_and_at_the_end(saved: Path, tmp_path: Path) -> None:
    target, lines = open_target(saved, ASKED, CPU), []
    plan = replace(options(25), predict_every=20)
    train_draft(target, text(), plan, tmp_path, lines.append)
    assert [line.split(":")[0] for line in lines if line.startswith(("step", "held"))] == [
        "step 10", "step 20", "held out", "step 25",
    ]  # fmt: skip
