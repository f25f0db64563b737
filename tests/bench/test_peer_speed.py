"""The speed of transports: every case is there, beside its limit."""

from __future__ import annotations

import pytest

from kvtide.bench import peer_speed

MIB = 1 << 20


def test_every_case_is_measured_beside_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_speed, "ROUNDS", 2)
    found = peer_speed.measure("shm", [4096, 256 << 10], 4 * MIB)
    assert [(one.row_bytes, one.places) for one in found] == [
        (4096, "scattered"),
        (4096, "gathered"),
        (256 << 10, "scattered"),
        (256 << 10, "gathered"),
    ]
    assert all(one.bytes_s > 0 and one.limit_bytes_s > 0 and one.of_limit > 0 for one in found)


def test_the_command_names_what_is_missing_and_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_speed, "ROUNDS", 1)
    assert peer_speed.main(["pigeon", "shm", "--rows", "64KiB", "--total", "1MiB"]) == 0
    printed = capsys.readouterr()
    assert "transport pigeon: no such transport" in printed.err
    assert printed.out.count("shm") == 2
