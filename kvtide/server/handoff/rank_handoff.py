"""One rank's part in handoffs: its memory as peers see it, its transports, its sender.

The decode side exposes its memory once for every peer, so that the memory can be taken back from
one of them. The prefill side pairs with every peer that connects, and writes from then on.

The leader's sender reports what it has written directly. The other ranks report over a channel
that they open to the leader when they start.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from kvtide.engine import Engine, RankTopology
from kvtide.engine.handoff.messages import HandoffMessage
from kvtide.engine.handoff.own_memory import source_memory, target_memory
from kvtide.engine.handoff.page_writer import PageWriter
from kvtide.engine.handoff.rank_exchange import exchange
from kvtide.engine.handoff.reports import RankReport, RankReports
from kvtide.server.handoff.handoff_settings import HandoffSettings
from kvtide.tiers.manifest import ManifestError, MemoryManifest
from kvtide.tiers.pairing import PairingError
from kvtide.transfer.peer.channel import Channel, Listener, connect
from kvtide.transfer.peer.page_sender import PageSender
from kvtide.transfer.peer.process_watch import ProcessIdentity
from kvtide.transfer.peer.transport import (
    Descriptor,
    Transport,
    TransportError,
    TransportSettings,
)
from kvtide.transfer.peer.transport_registry import open_transport

Json = dict[str, Any]
LEADER = 0
SENDER_CLOSE_S = 5.0


class RankHandoff:
    """`processes` are those of all ranks here, `manifests` what they expose to peers.

    sends  where the leader's messages to peers go, by room; set when the server listens
    """

    def __init__(self, engine: Engine, topology: RankTopology, settings: HandoffSettings) -> None:
        self._engine, self._topology, self._settings = engine, topology, settings
        self.sends: Callable[[str, HandoffMessage], None] = _unheard
        self.processes = self._exchanged(ProcessIdentity.own().to_json())
        self.manifests: list[Json] = []
        self._exposed: dict[str, Transport] = {}
        self.writer: PageWriter | None = None
        self.reports: RankReports | None = None
        self._listener: Listener | None = None
        self._to_leader: Channel | None = None
        if settings.receives:
            self._target = target_memory(engine.cache)
            self.manifests = self._exchanged(self._target.manifest.to_json())
        if settings.listens:
            self._open_writer()

    def _exchanged(self, mine: Json) -> list[Json]:
        """What all ranks have to say, on every rank."""
        every = exchange(self._topology, json.dumps(mine).encode())
        return [json.loads(each) for each in every]

    def _transport(self) -> Transport:
        given = self._settings
        device = self._engine.cache.config.torch_device
        settings = TransportSettings(given.host, given.protocol, given.devices, device)
        return open_transport(given.transport, settings)

    # -- the decode side --------------------------------------------------------------------

    def expose(self, peer: str) -> list[Descriptor]:
        """Let a peer write to the memory of all ranks. All ranks call it at the same time."""
        if peer not in self._exposed:
            self._exposed[peer] = self._transport()
        return self._exchanged(self._exposed[peer].expose(self._target.regions))

    def revoke(self, peer: str) -> list[Descriptor] | None:
        """End all of a peer's writes for good; None where only its own end does that."""
        mine = self._exposed[peer].revoke() if peer in self._exposed else None
        every = self._exchanged({"descriptor": mine})
        found = [each["descriptor"] for each in every]
        return None if None in found else found

    def conceal(self, peer: str) -> None:
        """Close what was exposed to a peer that has nothing more to write."""
        if (transport := self._exposed.pop(peer, None)) is not None:
            with suppress(TransportError):
                transport.close()

    # -- the prefill side -------------------------------------------------------------------

    def _open_writer(self) -> None:
        source = source_memory(self._engine.cache)
        manifests = [
            MemoryManifest.from_json(each) for each in self._exchanged(source.manifest.to_json())
        ]
        own, ranks = self._topology.rank, self._topology.ranks
        sender = PageSender(bytes_per_s=self._settings.bytes_per_s)
        self.writer = PageWriter(
            manifests, own, source.regions, self._transport(), sender, self._settings.timeout_s
        )
        outgoing = self._engine.handoffs.prefill
        outgoing.writer, outgoing.report = self.writer, self._report_to_leader
        if own == LEADER:
            self.reports = RankReports(ranks, lambda room, message: self.sends(room, message))
            outgoing.report, outgoing.on_computed = self.reports.add, self.reports.computed
        if ranks > 1:
            self._meet_ranks()

    def _meet_ranks(self) -> None:
        """The other ranks connect to the leader, with a secret of this run alone."""
        place: Json = {}
        secret = secrets.token_hex(16)
        host = self._settings.host
        if self._topology.rank == LEADER:
            self._listener = Listener(
                host, 0, lambda hello: {}, self._hear_rank, secret=secret.encode()
            )
            place = {"host": host, "port": self._listener.port, "secret": secret}
        place = self._exchanged(place)[LEADER]
        if self._topology.rank != LEADER:
            known = place["secret"].encode()
            self._to_leader = connect(place["host"], place["port"], {}, secret=known)
            self._to_leader.start(lambda message: None, lambda reason: None)

    def _hear_rank(self, channel: Channel) -> None:
        reports = self.reports
        assert reports is not None
        channel.start(
            lambda message: reports.add(RankReport.from_json(message)), lambda reason: None
        )

    def _report_to_leader(self, report: RankReport) -> None:
        if self._to_leader is not None:
            self._to_leader.send(report.to_json())

    def pair(
        self, peer: str, manifests: Sequence[Json], descriptors: Sequence[Descriptor]
    ) -> str | None:
        """Pair with a peer and connect to its memory: None, or the sentence that refuses it.

        All ranks call it at the same time, and pair or refuse together.
        """
        problem = ""
        try:
            assert self.writer is not None, "a server that listens has a writer"
            targets = [MemoryManifest.from_json(each) for each in manifests]
            self._check_transports(descriptors)
            self.writer.add_peer(peer, targets, descriptors)
        except (ManifestError, PairingError, TransportError, ValueError) as error:
            problem = str(error)
        problems = [each["problem"] for each in self._exchanged({"problem": problem})]
        found = next(filter(None, problems), None)
        if found and self.writer is not None:
            self.writer.drop_peer(peer)
        return found

    def _check_transports(self, descriptors: Sequence[Descriptor]) -> None:
        here = self._settings.transport
        for there in (str(each.get("transport")) for each in descriptors):
            if there != here:
                raise ValueError(
                    f"the decode server receives over the transport {there}, and this one writes "
                    f"over {here}; start both with the same --handoff-transport"
                )

    def close(self) -> None:
        """Write and expose no more. Bytes of peers may come until their end is known."""
        if self.writer is not None:
            self.writer.close(SENDER_CLOSE_S)
        for channel in filter(None, (self._to_leader,)):
            channel.close()
        if self._listener is not None:
            self._listener.close()
        for transport in self._exposed.values():
            with suppress(TransportError):
                transport.close()


def _unheard(room: str, message: HandoffMessage) -> None:
    """No peer is connected yet."""
