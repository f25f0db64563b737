"""Ranks that freeze, and steps that do not end: the server ends with a sentence, and no rank stays.

A long step is neither.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtide.server.ranks.step_watch import StepClock, StepWatch, StuckStep
from tests.processes import freeze
from tests.server.serving import ForkedChild
from tests.server.test_ranks import FLAGS, PROMPTS, ask, expected, gone, texts_of, workers

__all__ = ["expected"]

SILENCE_S = 3
WITHIN_S = 60.0
TP = ("--tp", "2", "--storage", "none", "--rank-timeout-seconds", str(SILENCE_S))
STREAM = b'{"prompt": "the cat", "max_tokens": 3000, "stream": true}'

HOLDING = """
import os, sys, threading, time

def hold():
    while not hasattr(sys.modules.get("kvtide.engine.engine"), "Engine"):
        time.sleep(0.001)
    engine = sys.modules["kvtide.engine.engine"].Engine
    inner = engine.step

    def step(self):
        while os.path.exists(os.environ["HOLD"]):
            time.sleep(0.01)
        return inner(self)

    engine.step = step
    open(os.environ["HOLD"] + "-ready", "w").close()

if sys.argv[:1] == ["-m"]:
    threading.Thread(target=hold, daemon=True).start()
"""
"""Every Python that finds this first runs it: a worker's steps last as long as a file exists."""


def until(wanted: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not wanted():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(HOLDING)
    return tmp_path / "hold"


def held(child_of: Path) -> dict[str, str]:
    path = os.pathsep.join([str(child_of.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"HOLD": str(child_of), "PYTHONPATH": path}


@pytest.mark.parametrize("streaming", [False, True], ids=["idle", "in a step"])
@pytest.mark.quick(streaming=[True])
def test_a_frozen_worker_ends_the_server(model_folder: Path, streaming: bool) -> None:
    with ForkedChild((str(model_folder), *FLAGS, *TP)) as child:
        client = child.client()
        (worker,) = workers(child)
        request = client.open("POST", "/v1/completions", STREAM) if streaming else None
        freeze(worker)
        assert child.exit_code() == 1, child.printed
        assert f"rank 1: no sign of life for {SILENCE_S} s; all ranks end with it" in child.printed
        assert gone(worker)
        if request is not None:
            request.leave()


@pytest.mark.full
def test_workers_of_a_frozen_leader_end_by_themselves(model_folder: Path) -> None:
    with ForkedChild((str(model_folder), *FLAGS, *TP)) as child:
        child.client()
        (worker,) = workers(child)
        freeze(child.process.pid)
        until(lambda: _has_ended(worker), "the worker is still there")
        ends = f"rank 1 ends: the leader: no sign of life for {SILENCE_S} s"
        until(lambda: ends in child.printed, child.printed)
        child.process.send_signal(signal.SIGCONT)
        assert child.exit_code() == 1, child.printed
        assert "rank 1 ended with 3: the leader: no sign of life" in child.printed


def _has_ended(pid: int) -> bool:
    """How it ended is not read: its parent is frozen."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.full
def test_a_rank_that_thaws_in_time_is_not_missed(
    model_folder: Path, expected: list[list[str]]
) -> None:
    flags = (*TP[:-1], "60")
    with ForkedChild((str(model_folder), *FLAGS, *flags)) as child:
        client = child.client()
        for process in (*workers(child), child.process.pid):
            freeze(process)
            time.sleep(1.0)
            os.kill(process, signal.SIGCONT)
            assert texts_of(ask(client, PROMPTS[0])) == expected[0]
        child.terminate()
        assert child.exit_code() == 0, child.printed


@pytest.mark.full
def test_a_long_step_is_no_silence(
    model_folder: Path, expected: list[list[str]], hold: Path
) -> None:
    with ForkedChild((str(model_folder), *FLAGS, *TP), held(hold)) as child:
        client = child.client()
        until((hold.parent / "hold-ready").exists, "the worker's steps are not held")
        hold.touch()
        threading.Timer(2 * SILENCE_S, hold.unlink).start()
        began = time.monotonic()
        assert texts_of(ask(client, PROMPTS[0])) == expected[0]
        assert time.monotonic() - began > SILENCE_S
        child.terminate()
        assert child.exit_code() == 0, child.printed


@pytest.mark.full
def test_a_step_that_does_not_end_ends_the_server(model_folder: Path, hold: Path) -> None:
    flags = (*TP, "--step-timeout-seconds", "4")
    with ForkedChild((str(model_folder), *FLAGS, *flags), held(hold)) as child:
        client = child.client()
        (worker,) = workers(child)
        until((hold.parent / "hold-ready").exists, "the worker's steps are not held")
        hold.touch()
        request = client.open("POST", "/v1/completions", STREAM)
        assert child.exit_code() == 1, child.printed
        # The leader waits for it, and is not named.
        assert "rank 1 is in RunStep.apply (engine_commands.py:" in child.printed
        assert "s; all ranks end with it" in child.printed
        request.leave()
        assert gone(worker)


# -- the watch -----------------------------------------------------------------------------------


def found(step: Callable[[], None], limit_s: float = 0.05) -> StuckStep:
    """What a watch reports of a step on another thread."""
    clock, reports = StepClock(), list[StuckStep]()

    def run() -> None:
        with clock:
            step()

    watch = StepWatch(clock, limit_s, reports.append)
    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: reports, "nothing was reported")
    watch.close()
    thread.join()
    (report,) = reports
    return report


def _in_module(name: str, body: str) -> Callable[..., None]:
    scope: dict[str, object] = {"__name__": name}
    exec(compile(body, f"/x/{name}.py", "exec"), scope)
    step = scope["step"]
    assert callable(step)
    return step


def test_a_report_tells_a_wait_for_other_ranks_from_work() -> None:
    work = _in_module("kvtide.layers.x", "import time\ndef step(): time.sleep(1)")
    report = found(work)
    assert report.place == "step (kvtide.layers.x.py:2)" and not report.waits
    assert report.seconds > 0.05
    wait = _in_module("torch.distributed.x", "import time\ndef step(): time.sleep(1)")
    call = _in_module("kvtide.layers.y", "def step(wait): wait()")
    report = found(lambda: call(wait))
    assert report.place == "step (kvtide.layers.y.py:1)" and report.waits


def test_a_clock_runs_during_steps_only() -> None:
    clock = StepClock()
    assert clock.stuck(0.0) is None
    with clock:
        until(lambda: clock.stuck(0.0), "the step takes no time")
        assert clock.stuck(3600.0) is None
    assert clock.stuck(0.0) is None
    with pytest.raises(ValueError, match="of a step"), clock:
        raise ValueError("of a step")
    assert clock.stuck(0.0) is None, "a step that fails has ended too"
