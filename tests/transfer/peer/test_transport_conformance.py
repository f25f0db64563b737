"""The kit passes sound transports, and each check finds the faults that it is there for."""

from __future__ import annotations

from itertools import product

import pytest

from kvtide.testing import faulty_transport
from kvtide.transfer.peer.conformance import transport_conformance
from kvtide.transfer.peer.conformance.failure_checks import FAILURE_CHECKS
from kvtide.transfer.peer.conformance.sound_checks import SOUND_CHECKS
from kvtide.transfer.peer.conformance.transport_conformance import CHECKS, name_of, run_check
from tests.transfer.peer.libraries import needs

FAULTY = "kvtide.testing.faulty_transport"
NO_REVOCATION = "it declares that it cannot revoke"

BYTES = "bytes arrive in their place alone"
FROZEN = "a frozen receiver holds no write past its deadline"
DURING = "a receiver frozen during a write is reported truly"
LATE = "no byte of a failed write lands after a revocation"
FAULTS = {
    "DropsTheLastRow": BYTES,
    "WritesToAWrongOffset": BYTES,
    "WritesPastTheEnd": BYTES,
    "KnowsOneRegion": BYTES,
    "SwapsRowsOfLargeBatches": "thousands of small rows arrive",
    "JoinsRowsByTheirTargetsAlone": "rows may lie together on one side only",
    "CutsLongRows": "large batches arrive",
    "MixesUpReceivers": "links do not mix up their receivers",
    "ReportsBeforeBytesAreThere": "a write that ended has landed",
    "RepeatsOldWrites": "later writes win",
    "IgnoresTheQuota": "the quota holds",
    "FailsOnEmptyBatches": "empty batches do nothing",
    "WritesTheGoodRowsOfABadBatch": "batches outside the memory are refused whole",
    "RefusesWithoutSilence": "batches outside the memory are refused whole",
    "OpensAnyDescriptor": "wrong descriptors are refused",
    "CrashesOnWrongDescriptors": "wrong descriptors are refused",
    "ClosesOnce": "closing twice is fine",
    "WritesOverAClosedLink": "a link may be closed during a write",
    "WritesToTheDead": "a killed receiver fails writes",
    "WaitsForTheDead": "a receiver killed during a write fails it",
    "WritesByAnotherProcess": "a killed sender leaves a sound receiver",
    "OutlivesItsSender": "no byte of a killed sender lands once it is silent",
    "SilentButLate": FROZEN,
    "IgnoresTheDeadline": FROZEN,
    "AliveAfterALateWrite": DURING,
    "BlocksItsCaller": "a frozen receiver holds up no other",
    "RevokesNothing": "an old link is dead after a revocation",
    "RevokesNothingOverANetwork": LATE,
}
SECOND = {
    "SilentButLate": DURING,
    "RevokesNothing": "no byte of a frozen sender lands after a revocation",
}
"""Faults that a second check finds as well."""
SOUND = {name_of(check) for check in SOUND_CHECKS}


def _found_by() -> list[object]:
    """Faults that need killed or frozen peers take seconds each."""
    pairs = [*FAULTS.items(), *SECOND.items()]
    quick = {"SilentButLate", "RevokesNothing"}
    return [
        pytest.param(f, c, marks=() if c in SOUND or (f in quick and FAULTS[f] == c) else slow)
        for f, c in pairs
    ]


slow = pytest.mark.full


@pytest.mark.parametrize(("fault", "check"), _found_by())
def test_a_fault_is_found_by_its_check(fault: str, check: str) -> None:
    (found_by,) = (one for one in CHECKS if name_of(one) == check)
    result = run_check(found_by, f"{FAULTY}:{fault}")
    assert result.violations, f"{fault} was not found: {result}"


def test_every_check_has_a_fault_that_it_finds() -> None:
    assert {name_of(one) for one in CHECKS} == {*FAULTS.values(), *SECOND.values()}
    defined = {
        name
        for name, one in vars(faulty_transport).items()
        if isinstance(one, type) and issubclass(one, faulty_transport.FaultyTransport)
    }
    assert defined - {"FaultyTransport", "AsOverANetwork"} == FAULTS.keys()


def _sound() -> list[object]:
    """A process needs a second to load Mooncake, and several to load NIXL."""
    quick = {"shm": SOUND_CHECKS, "mooncake": SOUND_CHECKS[:3], "nixl": SOUND_CHECKS[:2]}
    pairs = product(quick, SOUND_CHECKS)
    return [pytest.param(t, c, marks=() if c in quick[t] else slow) for t, c in pairs]


@pytest.mark.parametrize(
    ("transport", "check"), _sound(), ids=lambda one: one if isinstance(one, str) else name_of(one)
)
def test_a_transport_is_sound(transport: str, check: transport_conformance.TransportCheck) -> None:
    needs(transport)
    assert not run_check(check, transport).violations


REVOCATION = {name_of(check) for check in FAILURE_CHECKS[-3:]}


@pytest.mark.parametrize("check", FAILURE_CHECKS, ids=name_of)
@pytest.mark.parametrize(
    "transport",
    [
        "shm",
        pytest.param("mooncake", marks=slow),
        pytest.param("nixl", marks=slow),
        pytest.param(f"{FAULTY}:AsOverANetwork", marks=slow),
    ],
)
def test_a_transport_survives_peers_that_are_killed_or_frozen(
    transport: str, check: transport_conformance.TransportCheck
) -> None:
    needs(transport)
    result = run_check(check, transport)
    assert not result.violations
    if name_of(check) in REVOCATION:
        assert result.left_out == ("" if transport in ("mooncake", "nixl") else NO_REVOCATION)


@pytest.mark.full
@pytest.mark.quick(transport=["mooncake"])
@pytest.mark.parametrize("transport", ["mooncake", "nixl"])
def test_no_byte_lands_after_a_revocation(transport: str) -> None:
    needs(transport)
    (check,) = (one for one in CHECKS if name_of(one) == LATE)
    result = run_check(check, transport)
    assert not result.violations
    assert not result.left_out


def test_the_command_prints_every_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_conformance, "CHECKS", CHECKS[:1])
    assert transport_conformance.main("shm") == 0
    assert transport_conformance.main(f"{FAULTY}:DropsTheLastRow") == 1
    assert transport_conformance.main("carrier-pigeon") == 2
    printed = capsys.readouterr()
    assert "ok" in printed.out
    assert "WRONG" in printed.out
    assert "a row of 1 B: 1 bytes are wrong, the first at offset 5 of region 1" in printed.out
    assert "no such transport; use shm, mooncake, nixl" in printed.err
