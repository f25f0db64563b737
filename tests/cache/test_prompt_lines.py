"""Which line of a session a prompt continues, over prompts of the size that agents send."""

from __future__ import annotations

import numpy as np

from kvtide.cache.sessions.prompt_lines import PromptLine, find_line, first_to_go

PAGE = 64
CHANCE = np.random.default_rng(5)


def tokens(count: int) -> list[int]:
    return [int(token) for token in CHANCE.integers(0, 150_000, count)]


def packed(prompt: list[int]) -> bytes:
    return np.array(prompt, "<i4").tobytes()


def line(prompt: list[int], prompts: int = 2) -> PromptLine:
    return PromptLine(asked=packed(prompt), prompts=prompts)


TOOLS, SYSTEM, TALK = tokens(4000), tokens(2000), tokens(6000)
MAIN = [*TOOLS, *SYSTEM, *TALK]
AGENT = [*TOOLS[:1500], *tokens(1500), *tokens(5000)]
TITLE = [*SYSTEM[:20], *tokens(300), *TALK[:100]]


def found(prompt: list[int], *lines: PromptLine) -> tuple[int | None, int | None]:
    """The number of the line that a prompt continues, and where it changed."""
    continued, change = find_line(lines, packed(prompt), PAGE)
    at = None if change is None else change.at
    return (None if continued is None else lines.index(continued)), at


def test_each_request_continues_its_own_line() -> None:
    lines = line(MAIN), line(AGENT), line(TITLE)
    for number, prompt in enumerate((MAIN, AGENT, TITLE)):
        assert found([*prompt, *tokens(500)], *lines) == (number, None)
        assert found(prompt, *lines) == (number, None), "sent again"
        others = [each for each in lines if each is not lines[number]]
        assert found(prompt, *others) == (None, None)


def test_an_end_that_a_template_changes_is_no_change() -> None:
    assert found([*MAIN[:-3], 1, 2, 3, *tokens(200)], line(MAIN)) == (0, None)


def test_a_front_that_changes_its_length_is_a_change() -> None:
    for front in ([], [7], tokens(30)):
        changed = [*MAIN[:3], *front, *MAIN[5:], *tokens(500)]
        assert found(changed, line(AGENT), line(MAIN)) == (1, 3)


def test_a_result_that_a_client_clears_is_a_change() -> None:
    cleared = [*MAIN[:7000], 5, 6, *MAIN[8000:]]
    assert found(cleared, line(MAIN)) == (0, 7000)


def test_a_conversation_that_is_summed_up_is_a_new_line() -> None:
    assert found([*TOOLS, *SYSTEM, *tokens(800)], line(MAIN)) == (None, None)


def test_a_branch_is_a_new_line() -> None:
    assert found([*MAIN[:9000], *tokens(3000)], line(MAIN)) == (None, None)


def test_of_two_branches_the_one_that_goes_on_is_continued() -> None:
    branch = [*MAIN[:9000], *tokens(3000)]
    assert found([*branch, *tokens(100)], line(branch), line(MAIN)) == (0, None)
    assert found([*MAIN, *tokens(100)], line(branch), line(MAIN)) == (1, None)


def test_a_short_prompt_is_no_turn_of_a_long_one() -> None:
    assert found(tokens(10), line(MAIN)) == (None, None)
    assert found([*MAIN[:3], *tokens(10)], line(MAIN)) == (None, None)
    assert found(MAIN[:9], line(MAIN)) == (0, None), "its first words alone are"


def test_bytes_of_two_tokens_are_not_taken_for_one() -> None:
    """Tokens whose bytes repeat are found where they are, and not in between."""
    old = [0x01000000, 0x00000001] * 400
    assert found([5, *old[1:]], line(old)) == (0, 0)
    shifted = [0x00000100, 0x00010000] * 400
    assert found([5, *shifted[1:]], line(old)) == (None, None)


def test_lines_of_one_prompt_go_first() -> None:
    lines = [line(MAIN), line(TITLE, prompts=1), line(AGENT), line(tokens(5), prompts=1)]
    assert first_to_go(lines) is lines[1]
    assert first_to_go([lines[2], lines[0]]) is lines[2]
