"""Conversations whose prefix stays until the next turn, and requests that matter more."""

from __future__ import annotations

import pytest

from kvtide.cache import Namespace, Tier
from kvtide.cache.sessions import prompt_lines, session_pins
from kvtide.index import DEFAULT_NAMESPACE
from tests.cache.building import Rig, text
from tests.cache.memories import PAGE, WINDOW, every_memory


def keep(rig: Rig, session: str, tokens: list[int]) -> bool:
    return rig.cache.sessions.keep(session, rig.cache.prompt(tokens))


def press(rig: Rig, number: int = 90, requests: int = 6) -> None:
    """Requests that never come twice, one after another, enough to fill the device."""
    for other in range(number, number + requests):
        lease = rig.begin(text(other, 5))
        if lease is not None:
            rig.compute(lease)
            rig.cache.release(lease)
        rig.settle()


@every_memory
def test_a_kept_session_survives_pressure_and_a_flush(build, memory):
    rig = build(memory, host={pool.name: 16 if pool.hot else 0 for pool in memory.anchors})
    rig.remember(text(1, 4))
    assert keep(rig, "a", text(1, 4))
    press(rig)
    assert rig.found(text(1, 4)) == 4 * PAGE
    for tier in (Tier.DEVICE, Tier.HOST):
        rig.cache.flush(tier)
    lease = rig.started(text(1, 4))
    assert lease.cached_tokens == 4 * PAGE and rig.misread(lease) == []


def test_pressure_takes_what_no_session_keeps(build):
    rig = build(host=0)
    rig.remember(text(1, 4))
    press(rig)
    assert rig.found(text(1, 4)) == 0


def test_a_forgotten_session_can_go(build):
    rig = build(host=0)
    rig.remember(text(1, 4))
    keep(rig, "a", text(1, 4))
    assert rig.cache.sessions.forget("a")
    assert not rig.cache.sessions.forget("a")
    press(rig)
    assert rig.found(text(1, 4)) == 0


def test_the_next_turn_takes_the_place_of_the_last(build):
    rig = build(host=0)
    changed = [9999, *text(1, 4)[1:]]
    for tokens in (text(1, 2), text(1, 4), changed):
        rig.remember(tokens)
        keep(rig, "a", tokens)
        (state,) = rig.cache.sessions.states()
        assert (state.lines, state.pinned_tokens) == (1, len(tokens) // PAGE * PAGE)
    press(rig)
    assert rig.found(text(1, 4)) == 0
    assert rig.found(changed) == 4 * PAGE


def test_a_session_whose_prefix_is_on_the_host_keeps_it_there(build):
    rig = build(device=8, host=8, session_share=1.0)
    rig.remember_on_host(text(1, 4))
    keep(rig, "a", text(1, 4))
    press(rig)
    assert rig.found(text(1, 4)) == 4 * PAGE
    lease = rig.started(text(1, 4))
    rig.settle()
    assert rig.misread(lease) == []


def test_a_session_that_was_kept_while_its_prefix_arrives_survives_the_landing(build):
    rig = build()
    rig.remember_on_host(text(1, 4))
    lease = rig.started(text(1, 4))
    keep(rig, "a", text(1, 4))
    rig.settle()
    rig.cache.release(lease)
    rig.cache.flush(Tier.DEVICE)
    assert rig.found(text(1, 4)) == 4 * PAGE


def test_sessions_beyond_their_fraction_let_go_of_the_one_kept_longest_ago(build):
    rig = build(device=20, host=0, session_fraction=0.4)
    for number in (1, 2):
        rig.remember(text(number, 4))
        assert keep(rig, str(number), text(number, 4))
    assert keep(rig, "1", text(1, 4)), "the first is now the one kept last"
    rig.remember(text(3, 4))
    assert keep(rig, "3", text(3, 4))
    assert rig.cache.stats().sessions.pinned == 2
    rig.cache.flush(Tier.DEVICE)
    assert [rig.found(text(number, 4)) for number in (1, 2, 3)] == [4 * PAGE, 0, 4 * PAGE]


def test_of_a_session_that_is_larger_than_its_share_the_first_part_is_kept(build):
    rig = build(device=20, host=0, session_fraction=0.4)
    rig.remember(text(1, 4))
    rig.remember(text(2, 9))
    assert keep(rig, "small", text(1, 4))
    assert keep(rig, "large", text(2, 9))
    assert rig.cache.stats().sessions.pinned == 2
    rig.cache.flush(Tier.DEVICE)
    assert rig.found(text(1, 4)) == 4 * PAGE
    assert rig.found(text(2, 9)) == 4 * PAGE


def test_a_window_counts_for_no_more_than_it_reaches_back(build):
    """Two sessions of 4 pages of history, and of 2 pages of window each."""
    rig = build(WINDOW, device={"kv": 16, "swa": 8}, host=0, session_fraction=0.5)
    for number in (1, 2):
        rig.remember(text(number, 4))
        assert keep(rig, str(number), text(number, 4))
    assert rig.cache.stats().sessions.pinned == 2


def test_with_a_fraction_of_zero_nothing_is_kept(build):
    rig = build(session_fraction=0.0)
    rig.remember(text(1, 4))
    assert not keep(rig, "a", text(1, 4))
    assert rig.cache.stats().sessions.pinned == 0


def test_sessions_never_keep_a_request_out_for_good(build):
    rig = build(device=16, host=0, session_fraction=0.5)
    for number in range(1, 5):
        rig.remember(text(number, 4))
        keep(rig, str(number), text(number, 4))
    assert rig.begin(text(9, 7)) is not None


def test_closing_lets_all_sessions_go(build):
    rig = build()
    rig.remember(text(1, 4))
    keep(rig, "a", text(1, 4))
    rig.settle()
    rig.cache.close()
    assert rig.cache.stats().sessions.pinned == 0


# -- time ---------------------------------------------------------------------------------------


def test_a_session_ends_its_ttl_after_its_last_request(build):
    rig = build(host=0)
    sessions = rig.cache.sessions
    rig.remember(text(1, 4))
    sessions.tick(100.0)
    sessions.keep("a", rig.cache.prompt(text(1, 4)), ttl_s=10.0)
    assert sessions.next_expiry == 110.0
    sessions.tick(109.0)
    assert rig.cache.stats().sessions.pinned == 1
    sessions.asked("a", rig.cache.prompt(text(1, 4)), 10.0)
    sessions.tick(118.9)
    assert rig.cache.stats().sessions.pinned == 1, "a new request makes it last longer"
    sessions.tick(119.0)
    assert rig.cache.stats().sessions[:2] == (0, 0) and sessions.next_expiry is None
    assert rig.cache.stats().sessions.ended == {"expired": 1}
    press(rig)
    assert rig.found(text(1, 4)) == 0


def test_time_that_goes_back_changes_nothing(build):
    rig = build(host=0)
    rig.remember(text(1, 4))
    rig.cache.sessions.tick(50.0)
    rig.cache.sessions.tick(3.0)
    rig.cache.sessions.keep("a", rig.cache.prompt(text(1, 4)), ttl_s=1.0)
    assert rig.cache.sessions.next_expiry == 51.0


# -- fairness -----------------------------------------------------------------------------------


def test_a_namespace_that_floods_the_cache_with_sessions_takes_none_from_others(build):
    rig = build(device=32, host=0, session_fraction=0.5)
    shy, loud = Namespace(cache_salt="shy"), Namespace(cache_salt="loud")
    rig.remember(text(1, 4), namespace=shy)
    assert rig.cache.sessions.keep("shy", rig.cache.prompt(text(1, 4), shy))
    for number in range(2, 8):
        rig.remember(text(number, 4), namespace=loud)
        assert rig.cache.sessions.keep(f"loud {number}", rig.cache.prompt(text(number, 4), loud))
    rig.cache.flush(Tier.DEVICE)
    assert rig.found(text(1, 4), namespace=shy) == 4 * PAGE
    kept = [number for number in range(2, 8) if rig.found(text(number, 4), namespace=loud)]
    assert kept == [5, 6, 7], "the most recently used ones of the namespace"
    assert rig.cache.stats().sessions.ended == {"evicted": 3}


def test_pinned_pages_are_counted_once_by_tier(build):
    rig = build(device=16, host=16)
    rig.remember(text(1, 4))
    rig.settle()
    rig.cache.sessions.keep("a", rig.cache.prompt(text(1, 4)))
    rig.cache.sessions.keep("b", rig.cache.prompt(text(1, 2)))
    assert rig.cache.stats().sessions.pages == {(Tier.DEVICE, "kv"): 4}
    assert rig.cache.stats(session_pages=False).sessions.pages == {}
    rig.cache.sessions.forget_all()
    rig.cache.flush(Tier.DEVICE)
    rig.cache.sessions.keep("a", rig.cache.prompt(text(1, 4)))
    assert rig.cache.stats().sessions.pages == {(Tier.HOST, "kv"): 4}


def test_what_is_known_of_sessions_is_bounded(build, monkeypatch):
    monkeypatch.setattr(session_pins, "MAX_SESSIONS", 3)
    monkeypatch.setattr(session_pins, "MAX_REMEMBERED_TOKENS", 60)
    rig = build()
    for number in range(1, 6):
        rig.cache.sessions.asked(str(number), rig.cache.prompt(text(number, 2)))
        assert rig.cache.validate() == []
    assert [state.name for state in rig.cache.sessions.states()] == ["3", "4", "5"]
    rig.cache.sessions.asked("6", rig.cache.prompt(text(6, 12)))
    assert [state.name for state in rig.cache.sessions.states()] == ["5", "6"]
    assert rig.cache.validate() == []


# -- changes ------------------------------------------------------------------------------------


def asked(rig: Rig, tokens: list[int], namespace: Namespace = DEFAULT_NAMESPACE):
    return rig.cache.sessions.asked("a", rig.cache.prompt(tokens, namespace))


def test_a_prompt_that_changes_what_could_have_been_reused_is_noticed(build):
    rig = build()
    first = text(1, 4)
    assert asked(rig, first) is None
    assert asked(rig, [*first, 7, 8, 9]) is None, "a next turn"
    changed = [*first[:6], 9999, *first[7:]]
    change = asked(rig, changed)
    assert change is not None and change.at == 6
    assert change.before[6:8] == tuple(first[6:8]) and change.after[6:8] == (9999, first[7])
    assert asked(rig, changed) is None
    assert rig.cache.stats().sessions.changed == 1


def test_a_change_behind_the_last_whole_page_is_none(build):
    """Templates change the end of a prompt, and no page is lost by it."""
    rig = build()
    asked(rig, text(1, 4, extra=3))
    assert asked(rig, [*text(1, 4, extra=0), 7, 7, 7, 7, 7]) is None
    assert asked(rig, text(1, 2)) is None, "a shorter prompt loses nothing either"


def test_sessions_of_one_name_in_two_namespaces_do_not_see_each_other(build):
    rig = build()
    asked(rig, text(1, 4))
    assert asked(rig, text(2, 4), Namespace(cache_salt="other")) is None
    assert rig.cache.validate() == []


# -- lines of prompts ---------------------------------------------------------------------------


def turn(rig: Rig, tokens: list[int]) -> None:
    """A request of session `a` from its begin to its end; its prompt is no change of any other."""
    assert asked(rig, tokens) is None
    rig.remember(tokens)
    keep(rig, "a", tokens)
    assert rig.cache.validate() == []


def pinned(rig: Rig) -> int:
    return sum(state.pinned_tokens for state in rig.cache.sessions.states()) // PAGE


@every_memory
def test_requests_beside_a_conversation_take_no_pin_and_change_nothing(build, memory):
    """A main conversation and a sub-agent in turn, A, B, A, B, and a title in between."""
    host = {pool.name: 24 if pool.hot else 0 for pool in memory.anchors}
    rig = build(memory, device=24, host=host, session_share=1.0)
    main, agent, title = text(1, 2), text(2, 2), text(3, 1)
    for pages in (2, 3, 4):
        turn(rig, main := text(1, pages))
        turn(rig, title)
        turn(rig, agent := text(2, pages))
    assert rig.cache.stats().sessions.changed == 0
    assert rig.cache.sessions.states()[0].lines == 3
    rig.cache.flush(Tier.DEVICE)
    for tokens in (main, agent):
        assert rig.found(tokens) == 4 * PAGE
    assert rig.found(title) == PAGE
    assert rig.cache.stats().sessions.pinned == 1


def test_a_conversation_that_begins_like_another_one_is_no_change_of_it(build):
    """Sub-agents share tools with the main conversation, branches its first turns."""
    rig = build(device=32, host=0, session_share=1.0)
    turn(rig, text(1, 6))
    turn(rig, [*text(1, 3), *text(2, 3)])
    turn(rig, text(1, 6, extra=3))
    assert rig.cache.stats().sessions.changed == 0
    assert rig.cache.sessions.states()[0].lines == 2


def test_a_prompt_is_compared_with_the_line_that_it_repeats(build):
    rig = build(device=32)
    main, agent = text(1, 5), text(2, 5)
    for tokens in (main, agent):
        assert asked(rig, tokens) is None
    for tokens in (main, agent):
        change = asked(rig, [*tokens[:3], 9999, 9998, *tokens[4:], 7])
        assert change is not None and change.at == 3 and change.before[3] == tokens[3]
    assert rig.cache.stats().sessions.changed == 2
    assert rig.cache.sessions.states()[0].lines == 2


def test_a_flood_of_requests_that_come_once_leaves_the_conversation_alone(build):
    rig = build(device=20, host=0)
    turn(rig, text(1, 3))
    turn(rig, text(1, 4))
    for number in range(2, 20):
        turn(rig, text(number, 1))
    assert rig.cache.sessions.states()[0].lines == prompt_lines.MAX_LINES
    press(rig)
    assert rig.found(text(1, 4)) == 4 * PAGE
    assert asked(rig, text(1, 5)) is None
    assert rig.cache.sessions.states()[0].lines == prompt_lines.MAX_LINES


def test_the_lines_of_a_session_share_its_part(build):
    """It may pin 8 pages. What came once leaves them to what came twice."""
    rig = build(device=20, host=0, session_fraction=0.5, session_share=0.8)
    turn(rig, text(1, 5))
    turn(rig, text(2, 5))
    assert pinned(rig) == 8, "the second line has what the first one leaves"
    turn(rig, text(1, 6))
    assert pinned(rig) == 6, "the second one gave way"
    turn(rig, text(2, 6))
    assert pinned(rig) == 8
    turn(rig, text(1, 8))
    assert pinned(rig) == 8, "both came twice: the first one has what the second one leaves"
    rig.cache.flush(Tier.DEVICE)
    assert (rig.found(text(1, 8)), rig.found(text(2, 6))) == (6 * PAGE, 2 * PAGE)


def test_a_line_that_is_not_used_any_more_gives_way_in_the_end(build):
    """A client that sums up its conversation goes on with another one."""
    rig = build(device=20, host=0, session_fraction=0.5, session_share=0.8)
    turn(rig, text(1, 7))
    turn(rig, text(1, 8))
    held = []
    for extra in range(session_pins.STALE_PROMPTS):
        turn(rig, text(2, 4, extra=extra % 3 + 1))
        held.append(pinned(rig))
    assert held == [8] * (session_pins.STALE_PROMPTS - 1) + [4]
    rig.cache.flush(Tier.DEVICE)
    assert (rig.found(text(1, 8)), rig.found(text(2, 4))) == (0, 4 * PAGE)


def test_a_prompt_that_is_sent_again_counts_once(build):
    """As the choices of one request do."""
    rig = build(device=20, host=0, session_fraction=0.5, session_share=0.8)
    turn(rig, text(1, 7))
    turn(rig, text(1, 8))
    for _ in range(2 * session_pins.STALE_PROMPTS):
        turn(rig, text(2, 4))
    assert pinned(rig) == 8
    rig.cache.flush(Tier.DEVICE)
    assert (rig.found(text(1, 8)), rig.found(text(2, 4))) == (8 * PAGE, 0)


def test_a_prefetch_of_a_session_is_that_of_its_last_prompt(build):
    rig = build()
    turn(rig, text(1, 3))
    turn(rig, text(2, 2))
    assert rig.cache.sessions.prompt_of("a").tokens == len(text(2, 2))
    turn(rig, text(1, 4))
    assert rig.cache.sessions.prompt_of("a").tokens == len(text(1, 4))


# -- priorities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("important", [1, 2])
def test_pages_of_high_priority_outlive_those_of_low(build, important):
    rig = build(device=10, host=0, eviction="priority")
    for number in (1, 2):
        rig.remember(text(number, 4), priority=int(number == important))
    assert rig.begin(text(3, 4)) is not None
    assert rig.found(text(important, 4)) == 4 * PAGE
    assert rig.found(text(3 - important, 4)) < 4 * PAGE


def test_a_session_raises_the_priority_of_what_it_keeps(build):
    rig = build(device=10, host=0, eviction="priority", session_share=1.0)
    for number in (1, 2):
        rig.remember(text(number, 4))
    rig.cache.sessions.keep("a", rig.cache.prompt(text(1, 4)), priority=3)
    rig.cache.sessions.forget("a")
    rig.remember(text(2, 4))
    assert rig.begin(text(3, 4)) is not None
    assert rig.found(text(1, 4)) == 4 * PAGE
