"""The decode side of handoffs: it asks a prefill server for missing pages, and receives them.

A request that comes with a `HandoffSource` waits until its fetch from storage is over. Then it is
matched against the tiers, and slots are taken for all pages that are missing, or the request goes
on waiting. The peer gets the slots, and writes pages there in any order. Each page is adopted when
it has landed. The first token comes as soon as the peer has sampled it, and goes to the client at
once. When the last page and the tail have landed, the request is admitted with all of its prompt
computed.

All ranks are given the same messages in the same order, and decide alike. One rank, the leader,
has an `outbox`: its `server.handoff.prefill_connection` turns deadlines and lost connections into
messages (`Failed`, `Silent`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from kvtide.cache import Receipt, TieredCache
from kvtide.engine.handoff.handoff_state import DecodeHandoff, HandoffState
from kvtide.engine.handoff.messages import (
    Ask,
    Complete,
    Done,
    Failed,
    First,
    HandoffMessage,
    PagePlaces,
    Reserve,
    Silent,
    StopWriting,
    Written,
)
from kvtide.engine.handoff.request_fields import prompt_digest, request_fields
from kvtide.engine.request import Request
from kvtide.engine.sampling.sampler import SampledToken
from kvtide.index import Prompt
from kvtide.spec import ALL

Outbox = Callable[[str, HandoffMessage], None]
"""Sends a message to a peer, by its address. It never blocks."""


class DecodeHandoffs:
    """`min_tokens`: a prompt that misses fewer is prefilled here. `drafts`: a draft of this side
    needs its own state of a request's tokens. `on_first`: a first token has come. `on_over`: a
    handoff has ended.

    outbox  for the leader; other ranks send nothing
    takes_tails  False: the tokens behind the last whole page are computed here; for benchmarks
    ended   handoffs by their last state
    handed_tokens  in pages of whole handoffs; landed_bytes: in all pages that have landed
    """

    def __init__(
        self,
        cache: TieredCache,
        min_tokens: int,
        drafts: Callable[[Request], bool],
        on_first: Callable[[Request, SampledToken], None],
        on_over: Callable[[Request], None],
    ) -> None:
        self.outbox: Outbox = _nowhere
        self.takes_tails = True
        self.ended: Counter[HandoffState] = Counter()
        self.handed_tokens = self.landed_bytes = 0
        self._min_tokens, self._drafts = min_tokens, drafts
        self._on_first, self._on_over = on_first, on_over
        self._cache, self._receiving = cache, cache.receiving
        anchors = enumerate(cache.memory.anchors)
        self._history = next((n for n, one in anchors if one.reuse.reach is ALL), None)
        """The anchor whose pages count as tokens. Without one, few pages stand for all tokens."""
        kept = cache.memory.at_rest
        self._page_bytes = [kept.slot_bytes(each.name) for each in cache.memory.anchors]
        self._requests: dict[int, Request] = {}
        self._by_epoch: dict[int, Request] = {}
        self._quarantined: dict[int, Receipt] = {}
        self._unsent: list[Request] = []

    # -- from the engine --------------------------------------------------------------------

    def offer(self, request: Request) -> None:
        """A request that another server may prefill was queued."""
        source = request.params.handoff_from
        assert source is not None
        request.handoff = DecodeHandoff(source)
        self._requests[request.number] = request

    def poll(self) -> None:
        """Take slots for requests that wait for them, once per step; send what may be sent.

        The first that finds no room has it before all others: small prompts do not overtake it.
        Those behind are looked at once, since they may need nothing, and then when there is room.
        """
        offered = [each for each in self._requests.values() if self._may_reserve(each)]
        has_room = True
        for request in sorted(offered, key=lambda each: (-each.params.priority, each.number)):
            if has_room:
                has_room = self._try_to_reserve(request)
            elif not _of(request).tried:
                self._needs_no_slots(request)
        for request in [each for each in self._unsent if _receipt(each).ready]:
            self._unsent.remove(request)
            self._send_reserve(request)

    def _may_reserve(self, request: Request) -> bool:
        """It is offered, and waits for neither storage nor another handoff."""
        handoff = _of(request)
        is_behind = handoff.behind is not None and handoff.behind in self._by_epoch
        return handoff.state is HandoffState.OFFERED and request.settled and not is_behind

    def resume(self, request: Request) -> bool:
        """The request was admitted: copy its tail to the lease's slots, if it fits what was found.

        Whether it does. Otherwise the prompt's last tokens are computed here.
        """
        handoff, receipt = _of(request), _receipt(request)
        assert handoff.state is HandoffState.LANDED
        lease, page = request.held, self._cache.memory.page_tokens
        fits = lease.cached_tokens == receipt.boundary * page
        fits = fits and handoff.whole and self.takes_tails
        fits = fits and self._cache.grow(lease, len(request.params.tokens))
        if fits:
            anchors = [anchor.name for anchor in self._cache.memory.anchors]
            slots = {a: int(self._cache.page_table(lease, a)[receipt.boundary]) for a in anchors}
            assert min(slots.values()) >= 0, "the open page has a slot in every anchor"
            self._receiving.copy_tail(receipt, slots)
        else:
            self._receiving.drop_tail(receipt)
        self._end(request, HandoffState.DECODING)
        return fits

    def abort(self, request: Request) -> None:
        """The request has ended before its handoff."""
        if request.number in self._requests:
            self._give_up(request, HandoffState.ABORTED, "the request ended", silent=False)

    @property
    def by_state(self) -> Counter[HandoffState]:
        """Open handoffs."""
        return Counter(_of(request).state for request in self._requests.values())

    @property
    def open(self) -> Mapping[int, Request]:
        """Requests whose handoff is not over, by number."""
        return self._requests

    @property
    def quarantined(self) -> Mapping[int, Receipt]:
        """Slots that a peer may still write to, by epoch."""
        return self._quarantined

    # -- from the peer ----------------------------------------------------------------------

    def receive(self, message: HandoffMessage) -> None:
        """News of a handoff; those of an epoch that is over are ignored, but for `Silent`."""
        match message:
            case Silent():
                self._silent(message.epoch)
            case Failed() if message.epoch in self._quarantined and message.silent:
                self._silent(message.epoch)
            case Written() if message.epoch in self._by_epoch:
                self._written(self._by_epoch[message.epoch], message)
            case First() if message.epoch in self._by_epoch:
                self._first(self._by_epoch[message.epoch], message)
            case Complete() if message.epoch in self._by_epoch:
                self._complete(self._by_epoch[message.epoch], message)
            case Failed() if message.epoch in self._by_epoch:
                request, reason = self._by_epoch[message.epoch], message.reason
                self._give_up(request, HandoffState.FAILED, reason, silent=message.silent)
            case _:
                pass

    def _written(self, request: Request, message: Written) -> None:
        handoff, receipt = _of(request), _receipt(request)
        numbers = [n for n in dict.fromkeys(message.numbers) if n not in receipt.landed]
        if not all(0 <= number < len(receipt.places) for number in numbers):
            reason = "the peer wrote pages that were not asked for"
            return self._give_up(request, HandoffState.FAILED, reason, silent=False)
        without = {name: set(absent) for name, absent in message.absent.items()}
        absent = [tuple(s for s in without if number in without[s]) for number in numbers]
        self._receiving.land(receipt, numbers, absent)
        anchors = [receipt.places[n].cell % len(self._page_bytes) for n in numbers]
        self.landed_bytes += sum(self._page_bytes[anchor] for anchor in anchors)
        landed = sum(anchor == self._history for anchor in anchors)
        handoff.tokens += landed * self._cache.memory.page_tokens
        if handoff.state is HandoffState.RESERVED:
            handoff.move(HandoffState.STREAMING)
        return None

    def _first(self, request: Request, message: First) -> None:
        handoff = _of(request)
        if handoff.first is None:
            handoff.first = SampledToken(message.token, message.logprob, message.top)
            handoff.cached = dict(message.cached)
            self._on_first(request, handoff.first)

    def _complete(self, request: Request, message: Complete) -> None:
        handoff, receipt = _of(request), _receipt(request)
        if handoff.first is None or not receipt.complete:
            what = "all pages" if handoff.first is not None else "a first token"
            reason = f"the peer ended before {what} had come"
            return self._give_up(request, HandoffState.FAILED, reason, silent=True)
        handoff.whole = message.tail or not self._drafts(request)
        handoff.captured = message.captured if message.tail else b""
        if self._history is None:
            page = self._cache.memory.page_tokens
            handoff.tokens = receipt.boundary * page - receipt.held_tokens
        self._receiving.finish(receipt)
        del self._by_epoch[receipt.epoch]
        handoff.move(HandoffState.LANDED)
        self.handed_tokens += handoff.tokens
        self.outbox(handoff.source.peer, Done(handoff.source.room, receipt.epoch))
        if handoff.is_last:
            self._receiving.drop_tail(receipt)
            self._end(request, HandoffState.DECODING)
        return None

    def _silent(self, epoch: int) -> None:
        receipt = self._quarantined.pop(epoch, None)
        if receipt is not None:
            self._receiving.silent(receipt)

    # -- the steps --------------------------------------------------------------------------

    def _try_to_reserve(self, request: Request) -> bool:
        """Take slots, if the request needs any; False if there is no room for them."""
        if self._needs_no_slots(request):
            return True
        receipt = self._receiving.begin(request.prompt)
        if receipt is None:
            return False
        handoff = _of(request)
        handoff.receipt = receipt
        handoff.move(HandoffState.RESERVED)
        self._by_epoch[receipt.epoch] = request
        self._unsent.append(request)
        return True

    def _needs_no_slots(self, request: Request) -> bool:
        """The request declines its handoff, or waits for another one that brings some of it."""
        handoff, receiving, prompt = _of(request), self._receiving, request.prompt
        handoff.tried = True
        missing = receiving.missing_tokens(prompt)
        if missing < max(1, self._min_tokens):
            self._decline(request, f"{missing} tokens are missing here")
        elif request.params.alone or not receiving.can_ever_fit(prompt):
            self._decline(request, "the prompt cannot be received here")
        elif (other := self._bringing(prompt)) is not None:
            handoff.behind = other.epoch
        else:
            return False
        return True

    def _bringing(self, prompt: Prompt) -> Receipt | None:
        """Another handoff that brings a part of the prompt: after it, the rest is asked for."""
        receipts = (_receipt(request) for request in self._by_epoch.values())
        return next((one for one in receipts if self._receiving.brings(one, prompt)), None)

    def _decline(self, request: Request, reason: str) -> None:
        handoff = _of(request)
        handoff.reason = reason
        if not handoff.source.asks:
            self.outbox(handoff.source.peer, Done(handoff.source.room))
        self._end(request, HandoffState.DECLINED)

    def _send_reserve(self, request: Request) -> None:
        handoff, receipt = _of(request), _receipt(request)
        peer, room, asks = handoff.source
        if asks:
            self.outbox(peer, Ask(room, request_fields(request.params)))
        names, prompt = self._cache.index.anchor_names, prompt_digest(request.params)
        places: list[PagePlaces] = []
        of_anchors: dict[str, list[int]] = {}
        for number, place in enumerate(receipt.places):
            of_anchors.setdefault(names[place.cell % len(names)], []).append(number)
        for anchor, numbers in of_anchors.items():
            taken = [receipt.places[number] for number in numbers]
            pages = np.array([place.page for place in taken], np.int32)
            slots = np.array([place.slot for place in taken], np.int32)
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            places.append(PagePlaces(anchor, numbers[0], pages, slots))
        assert receipt.tail_row is not None
        self.outbox(
            peer,
            Reserve(room, receipt.epoch, prompt, receipt.boundary, tuple(places), receipt.tail_row),
        )

    def _give_up(self, request: Request, state: HandoffState, reason: str, *, silent: bool) -> None:
        """End a handoff early: its slots are quarantined until the peer is silent."""
        handoff, receipt = _of(request), _of(request).receipt
        (peer, room, asks), unsent = handoff.source, request in self._unsent
        handoff.reason = reason
        if receipt is not None and handoff.state is HandoffState.LANDED:
            self._receiving.drop_tail(receipt)
        elif receipt is not None:
            del self._by_epoch[receipt.epoch]
            self._receiving.abandon(receipt)
            self._quarantined[receipt.epoch] = receipt
            if unsent:
                self._unsent.remove(request)
            if silent or unsent:
                self._silent(receipt.epoch)
        if receipt is None or unsent:
            if not asks:  # A router has sent the prompt to the peer.
                self.outbox(peer, Done(room))
        elif handoff.state is not HandoffState.LANDED:
            self.outbox(peer, (Done if silent else StopWriting)(room, receipt.epoch))
        self._end(request, state)

    def _end(self, request: Request, state: HandoffState) -> None:
        handoff = _of(request)
        handoff.move(state)
        self.ended[state] += 1
        del self._requests[request.number]
        self._on_over(request)


def _of(request: Request) -> DecodeHandoff:
    assert request.handoff is not None
    return request.handoff


def _receipt(request: Request) -> Receipt:
    receipt = _of(request).receipt
    assert receipt is not None
    return receipt


def _nowhere(peer: str, message: HandoffMessage) -> None:
    """A rank that is not the leader sends nothing."""
