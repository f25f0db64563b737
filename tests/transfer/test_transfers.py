"""How long anything was open, for reports."""

from __future__ import annotations

from kvtide.transfer.transfers import BusyTime


def test_overlapping_work_counts_once() -> None:
    now = 0.0
    busy = BusyTime(lambda: now)
    for at, change in ((1.0, busy.begin), (2.0, busy.begin), (4.0, busy.end), (5.0, busy.end)):
        now = at
        change()
    assert (busy.open, busy.seconds) == (0, 4.0)
    now = 7.0
    assert busy.seconds == 4.0
    busy.begin()
    now = 9.0
    assert (busy.open, busy.seconds) == (1, 6.0)
