"""Which transports have their library on this machine."""

from __future__ import annotations

from functools import cache

import pytest

from kvtide.transfer.peer.conformance.conformance_peer import Trial
from kvtide.transfer.peer.transport import TransportUnavailableError


def needs(transport: str) -> None:
    """Skip the test if the library of a transport is not installed here."""
    if refusal := _refusal(transport):
        pytest.skip(refusal)


@cache
def _refusal(transport: str) -> str:
    """Why a transport is not to be had; asked in another process, as a library writes to its
    environment, which processes of tests inherit."""
    trial = Trial(transport)
    try:
        trial.sender()
    except TransportUnavailableError as error:
        return str(error)
    finally:
        trial.close()
    return ""
