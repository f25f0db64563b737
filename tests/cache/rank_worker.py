"""What every rank of `test_ranks` plays, in a process of its own.

A scenario is a function of a `World`; what it promises is its name. Ranks make the same calls and
differ only in what happens to their copies.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from kvtide.cache import Bytes, Lease, Progress, Ranks, RanksDivergedError, Tier, Tokens
from kvtide.cache.cache import MAX_INFLIGHT
from kvtide.index import EveryPages, Prompt
from kvtide.spec import ModelMemory
from kvtide.tiers import capacity_pages
from kvtide.transfer.strided import Way
from tests.cache.rank_stand import CONFIG, PAGE, Counted, Stand, World
from tests.grids import everything
from tests.worlds import Scenario

# -- scenarios ------------------------------------------------------------------------------


def a_slow_rank_holds_all_ranks_back(world: World) -> None:
    stand = Stand(world, world.tensor_slice())
    prompt = stand.keep_on_host(range(25))
    if world.odd_one:
        stand.hold(Way.LOAD)
    lease = stand.leased(prompt)
    stand.cache.load(lease)
    stand.compute(lease, 25)
    if not world.odd_one:
        assert stand.copied(lease)
        stand.idle_lanes()
    for _ in range(5):
        assert stand.cache.poll() == Progress()
        assert lease.loading
        assert stand.cache.match(prompt, Tier.DEVICE).tokens == 0
        stand.agree()
    stand.let_go()
    assert stand.copied(lease)
    stand.idle_lanes()
    dist.barrier()
    assert stand.cache.poll() == Progress(landed=(lease,))
    assert stand.cache.match(prompt, Tier.DEVICE).tokens == 24
    stand.check(lease)
    stand.close()


def a_slow_backup_is_on_no_ranks_host(world: World) -> None:
    stand = Stand(world, world.tensor_slice())
    if world.odd_one:
        stand.hold(Way.BACKUP)
    stand.keep(range(25))
    stand.cache.poll()
    if not world.odd_one:
        stand.idle_lanes()
    for _ in range(3):
        stand.cache.poll()
        assert stand.resident(Tier.HOST) == 0
        stand.agree()
    stand.let_go()
    stand.idle_lanes()
    dist.barrier()
    stand.cache.poll()
    assert stand.resident(Tier.HOST) > 0
    assert stand.cache.stats().in_flight == 0
    stand.close()


def _a_failed_load_fails_everywhere(world: World, memory: ModelMemory, halfway: bool) -> None:
    stand = Stand(world, memory)
    prompt = stand.keep_on_host(range(25))
    if world.odd_one:
        stand.break_next(Way.LOAD, halfway)
    first, behind = stand.leased(stand.prompt(range(33))), stand.leased(prompt)
    stand.cache.load(first)
    stand.compute(first, 33)
    assert stand.copied(first) != world.odd_one
    stand.idle_lanes()
    dist.barrier()
    assert stand.cache.poll() == Progress(failed=(first, behind))
    assert first.failed and behind.failed and not first.loading
    assert ("another rank" in str(first.error)) != world.odd_one
    stand.agree()
    for lease in (first, behind):
        stand.release(lease)
    assert stand.resident(Tier.DEVICE) == 0, "what was computed on top of a failed load is gone"
    assert stand.cache.match(prompt).by_tier == {Tier.HOST: 24}
    stand.agree()
    again = stand.leased(prompt)
    stand.cache.load(again)
    assert stand.copied(again)
    stand.idle_lanes()
    dist.barrier()
    assert stand.cache.poll() == Progress(landed=(again,))
    stand.check(again)
    stand.close()


def a_load_that_fails_on_one_rank_fails_on_all_and_can_be_tried_again(world: World) -> None:
    _a_failed_load_fails_everywhere(world, world.tensor_slice(), halfway=False)


def a_load_that_breaks_halfway_on_one_rank_leaves_no_page_anywhere(world: World) -> None:
    _a_failed_load_fails_everywhere(world, world.tensor_slice(), halfway=True)


def pipeline_stages_agree_though_one_has_no_bytes_of_an_anchor(world: World) -> None:
    memory = world.stage()
    assert memory.part is not None
    first = memory.part.first_layer
    assert first == (0 if world.rank < world.ranks // 2 else 2)
    assert memory.slot_bytes("swa") == (0 if first else memory.slot_bytes("kv"))
    _a_failed_load_fails_everywhere(world, memory, halfway=True)


def a_backup_that_fails_on_one_rank_is_on_no_ranks_host(world: World) -> None:
    stand = Stand(world, world.tensor_slice())
    if world.odd_one:
        stand.break_next(Way.BACKUP)
    prompt = stand.keep(range(25))
    assert stand.cache.drain(10.0)
    assert stand.resident(Tier.HOST) == 0
    assert stand.cache.match(prompt).by_tier == {Tier.DEVICE: 24}
    stand.agree()
    # The next commit on the path takes all of it along.
    longer = stand.keep_on_host(range(33))
    assert stand.resident(Tier.HOST) > 0
    lease = stand.leased(longer)
    stand.cache.load(lease)
    assert stand.copied(lease)
    assert stand.cache.drain(10.0)
    stand.check(lease)
    stand.close()


def the_smallest_rank_decides_how_much_fits(world: World) -> None:
    memory = world.tensor_slice()
    device, host = (Bytes(n * memory.slot_bytes("kv") * 8) for n in (10, 30))
    if world.odd_one:
        device = Bytes(device.bytes // 2)
    if world.rank == 0:
        host = Bytes(host.bytes // 3)
    stand = Stand(world, memory, device_size=device, host_size=host)
    mine = {
        tier: capacity_pages(memory, size, tokens_per_checkpoint=CONFIG.tokens_per_checkpoint)
        for tier, size in ((Tier.DEVICE, device), (Tier.HOST, host))
    }
    all_ranks = world.gather(mine)
    assert any(one != mine for one in all_ranks)
    for (tier, anchor), pages in stand.cache.stats().pages.items():
        assert pages.capacity == min(one[tier][anchor] for one in all_ranks)
    prompt = stand.keep_on_host(range(25))
    lease = stand.leased(prompt)
    stand.cache.load(lease)
    assert stand.copied(lease)
    assert stand.cache.drain(10.0)
    stand.check(lease)
    stand.close()


def a_poll_with_nothing_in_flight_exchanges_nothing(world: World) -> None:
    agreement = Counted()
    stand = Stand(world, world.tensor_slice(), agreement)
    before = agreement.calls
    lease = stand.leased(stand.prompt(range(25)))
    for _ in range(5):
        stand.cache.poll()
    assert agreement.calls == before
    stand.compute(lease, 25)
    stand.cache.poll()
    assert agreement.calls == before, "what leaves in this poll is judged in the next one"
    stand.idle_lanes()
    dist.barrier()
    for _ in range(5):
        stand.cache.poll()
    assert agreement.calls == before + 1
    stand.close()


def more_transfers_than_one_exchange_holds_land_in_two(world: World) -> None:
    pages = MAX_INFLIGHT + 6
    stand = Stand(world, world.tensor_slice(), device_size=Tokens(3 * pages * PAGE))
    for number in range(pages):
        stand.keep([number] * (PAGE + 1))
    stand.cache.poll()
    stand.idle_lanes()
    dist.barrier()
    assert stand.cache.stats().in_flight == pages
    stand.cache.poll()
    assert stand.cache.stats().in_flight == pages - MAX_INFLIGHT
    stand.cache.poll()
    assert stand.cache.stats().in_flight == 0
    stand.close()


def a_load_that_is_late_on_one_rank_is_late_for_all(world: World) -> None:
    """Whether to wait for it, or to compute instead, must not depend on a rank's own clock."""
    stand = Stand(world, world.tensor_slice(), transfer_timeout_s=0.2)
    prompt = stand.keep_on_host(range(25))
    if world.odd_one:
        stand.hold(Way.LOAD)
    late = stand.leased(prompt)
    stand.cache.load(late)
    if not world.odd_one:
        assert stand.copied(late)
        stand.idle_lanes()
    time.sleep(0.3)
    dist.barrier()
    assert stand.cache.poll() == Progress(failed=(late,))
    assert "deadline" in str(late.error)
    assert stand.cache.stats().overdue == stand.cache.stats().in_flight == 1
    stand.release(late)
    other = stand.leased(stand.prompt(range(25)))
    assert other.cached_tokens == 0, "no request waits for a load that is late"
    stand.agree()
    stand.let_go()
    stand.idle_lanes()
    dist.barrier()
    assert stand.cache.poll() == Progress()
    assert stand.cache.match(prompt).by_tier == {Tier.DEVICE: 24}, "late, and right all the same"
    stand.check(stand.leased(prompt))
    stand.close()


def ranks_give_up_draining_together(world: World) -> None:
    """Clocks differ: here by what the ranks are given, elsewhere by when they started."""
    stand = Stand(world, world.tensor_slice())
    if world.odd_one:
        stand.hold(Way.BACKUP)
    stand.keep(range(25))
    assert not stand.cache.drain(0.1 if world.odd_one else 5.0)
    stand.agree()
    stand.close()


# -- ranks that went different ways ---------------------------------------------------------


def _diverging(world: World, timeout_s: float) -> Stand:
    """On a group of its own, since an exchange that not all ranks join leaves it unusable."""
    group = dist.new_group(timeout=timedelta(seconds=120))
    return Stand(world, world.tensor_slice(), Ranks(group, timeout_s=timeout_s))


def _expect_divergence(stand: Stand, within_s: float = 30.0) -> None:
    began, refusal = time.monotonic(), "nothing"
    try:
        stand.cache.poll()
    except RanksDivergedError as error:
        refusal = str(error)
    assert refusal.endswith("restart all ranks"), refusal
    assert time.monotonic() - began < within_s


def an_extra_transfer_on_one_rank_is_noticed_by_all(world: World) -> None:
    stand = _diverging(world, timeout_s=60.0)
    stand.keep(range(25))
    if world.odd_one:
        stand.keep(range(100, 125))
    stand.cache.poll()
    _expect_divergence(stand)


def an_extra_call_that_moved_nothing_is_noticed_by_all(world: World) -> None:
    stand = _diverging(world, timeout_s=60.0)
    if world.odd_one:
        stand.release(stand.leased(stand.prompt(range(100, 125))))
    stand.keep(range(25))
    stand.cache.poll()
    _expect_divergence(stand)


def a_rank_that_no_other_answers_does_not_hang(world: World) -> None:
    stand = _diverging(world, timeout_s=2.0)
    if world.odd_one:
        stand.keep(range(25))
        stand.cache.poll()
        _expect_divergence(stand)
    else:
        assert stand.cache.poll() == Progress()


# -- anything, in any order -----------------------------------------------------------------


@dataclass(slots=True)
class _Turn:
    lease: Lease
    committed: int
    limit: int


class RandomRun:
    """The same calls on every rank, from one seed; faults and delays from each rank's own."""

    def __init__(self, stand: Stand, seed: int) -> None:
        self.stand = stand
        self.turns: list[_Turn] = []
        self._rng = random.Random(seed)
        self._own = random.Random(1000 * seed + stand.world.rank)
        self._seen: list[list[int]] = [[]]
        self._steps: dict[Callable[[], None], float] = {
            self.begin: 9, self.commit: 12, self.grow: 2, self.release: 9, self.poll: 10,
            self.prefetch: 1, self.session: 1, self.flush: 1,
        }  # fmt: skip

    def step(self) -> None:
        self.fault()
        for verb in self._rng.choices(list(self._steps), list(self._steps.values()), k=4):
            verb()

    def fault(self) -> None:
        own, stand, ranks = self._own, self.stand, self.stand.world.ranks
        way = own.choice((Way.LOAD, Way.LOAD, Way.BACKUP))
        draw = own.random()
        if draw < 0.2 / ranks:
            stand.hold(way)
        elif draw < 0.32 / ranks:
            stand.break_next(way, halfway=own.random() < 0.5)
        elif draw < 0.5:
            stand.let_go()
        elif draw < 0.6:
            time.sleep(0.002)

    def _prompt(self) -> Prompt:
        """Most go on from an earlier prompt, or from a part of it."""
        rng = self._rng
        earlier = rng.choice(self._seen[-16:])[:32]
        earlier = earlier[
            : rng.choice((len(earlier), len(earlier), rng.randrange(len(earlier) + 1)))
        ]
        self._seen.append(earlier + [rng.randrange(3) for _ in range(rng.randrange(1, 9))])
        return self.stand.prompt(self._seen[-1])

    def begin(self) -> None:
        lease = self.stand.lease(self._prompt(), growth=self._rng.choice((0, 0, 2)))
        if lease is None:
            return
        self.turns.append(_Turn(lease, lease.cached_tokens, lease.prompt.tokens))
        if self._rng.random() < 0.8:
            self.stand.cache.load(lease)

    def commit(self) -> None:
        if self.turns:
            turn = self._rng.choice(self.turns)
            some = self._rng.randint(turn.committed, turn.limit)
            turn.committed = self._rng.choice((some, turn.limit))
            self.stand.compute(turn.lease, turn.committed, self._without())

    def _without(self) -> tuple[str, ...]:
        optional = self.stand.optional
        return self._rng.choice(((), optional)) if optional else ()

    def grow(self) -> None:
        if self.turns:
            turn = self._rng.choice(self.turns)
            turn.lease.append([self._rng.randrange(9) for _ in range(5)])
            if self.stand.cache.grow(turn.lease, turn.lease.prompt.tokens):
                turn.limit = turn.lease.prompt.tokens

    def release(self) -> None:
        if self.turns:
            turn = self.turns.pop(self._rng.randrange(len(self.turns)))
            self.stand.release(turn.lease)

    def poll(self) -> None:
        progress = self.stand.cache.poll()
        for lease in progress.landed:
            self.stand.check(lease)
        for turn in [turn for turn in self.turns if turn.lease in progress.failed]:
            self.turns.remove(turn)
            self.stand.release(turn.lease)

    def prefetch(self) -> None:
        self.stand.cache.prefetch(self._prompt())

    def session(self) -> None:
        name = self._rng.choice("abc")
        if self._rng.random() < 0.5:
            self.stand.cache.sessions.keep(name, self._prompt())
        else:
            self.stand.cache.sessions.forget(name)

    def flush(self) -> None:
        self.stand.cache.flush(self._rng.choice((*[Tier.DEVICE] * 9, Tier.HOST)))


def _random_calls(world: World, memory: ModelMemory, seed: int, policy: str) -> None:
    stand = Stand(
        world,
        memory,
        placement=EveryPages(1),
        write_policy=policy,
        device_size=Tokens(16 * PAGE),
        headroom=0.3,
        transfer_timeout_s=0.005,
    )
    run = RandomRun(stand, seed)
    for _ in range(200 if everything() else 100):
        run.step()
        stand.agree()
    stats = stand.cache.stats()
    reached = {end for end, count in stats.transfers.items() if count}
    ways = ("load", "backup")
    assert reached == {(way, end) for way in ways for end in ("landed", "failed")}, reached
    stand.let_go()
    for turn in run.turns:
        if not turn.lease.loading and not turn.lease.failed:
            stand.check(turn.lease)
    stand.close()


def random_calls_keep_tensor_ranks_together(world: World) -> None:
    _random_calls(world, world.tensor_slice(), seed=1, policy="write_through")


def random_calls_keep_pipeline_stages_together(world: World) -> None:
    _random_calls(world, world.stage(), seed=2, policy="write_back")


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        a_slow_rank_holds_all_ranks_back,
        a_slow_backup_is_on_no_ranks_host,
        a_load_that_fails_on_one_rank_fails_on_all_and_can_be_tried_again,
        a_load_that_breaks_halfway_on_one_rank_leaves_no_page_anywhere,
        pipeline_stages_agree_though_one_has_no_bytes_of_an_anchor,
        a_backup_that_fails_on_one_rank_is_on_no_ranks_host,
        the_smallest_rank_decides_how_much_fits,
        a_poll_with_nothing_in_flight_exchanges_nothing,
        more_transfers_than_one_exchange_holds_land_in_two,
        a_load_that_is_late_on_one_rank_is_late_for_all,
        ranks_give_up_draining_together,
        random_calls_keep_tensor_ranks_together,
        random_calls_keep_pipeline_stages_together,
        an_extra_transfer_on_one_rank_is_noticed_by_all,
        an_extra_call_that_moved_nothing_is_noticed_by_all,
        a_rank_that_no_other_answers_does_not_hang,
    )
}
