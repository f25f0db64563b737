"""Where a server publishes KV events, and how it names blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from kvtide.server.setting_values import SettingsError

REPLAY_BATCHES = 10_000
BEACON_S = 1.0
_ENDPOINT = re.compile(r"tcp://(?P<host>\*|\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")


class BlockNames(Enum):
    VLLM = "vllm"
    PAGE_KEYS = "page_keys"


def parse_endpoint(value: str) -> str:
    found = _ENDPOINT.fullmatch(value)
    if found is None or int(found["port"]) > 65535:
        raise SettingsError(f"is '{value}'; use tcp://ADDRESS:PORT, or tcp://*:PORT")
    return value


@dataclass(frozen=True, slots=True)
class KVEventSettings:
    """`endpoint` is where batches are published, `replay` where consumers ask for missed ones.

    Without `replay` it is the next port. Port 0 is any that is free. An idle server sends its last
    number again after `beacon_s`.
    """

    endpoint: str
    replay: str | None = None
    topic: str = ""
    names: BlockNames = BlockNames.VLLM
    replay_batches: int = REPLAY_BATCHES
    beacon_s: float = BEACON_S

    @property
    def replay_endpoint(self) -> str:
        if self.replay is not None:
            return self.replay
        address, _, port = self.endpoint.rpartition(":")
        if int(port) == 65535:
            raise SettingsError(
                f"--kv-events {self.endpoint} leaves no next port for replays; name one with "
                "--kv-events-replay"
            )
        return f"{address}:{int(port) + 1 if int(port) else 0}"
