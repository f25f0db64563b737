"""`kvtide serve --tp` and `--pp`: several processes that answer, end and break as one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.main import main
from kvtide.engine import RankTopology
from kvtide.server.ranks.rank_processes import RankProcesses, WorkerLostError
from kvtide.server.settings import Settings
from tests.processes import freeze
from tests.server.serving import PAGE, Child, ForkedChild, InProcess
from tests.server.talking import Client

PROMPTS = ["the cat sat on the mat and then the hat " * 3, "that is that, Grüße, 世界 " * 4]
FLAGS = ("--port", "0", "--page-tokens", str(PAGE), "--deterministic", "--prefetch-policy",
         "wait_complete", "--prefetch-min-tokens", "1", "--verify-restores", "1")  # fmt: skip

FORM: dict[str, Any] = {"regex": "[0-9]{3,6}x", "logit_bias": {"70": -100.0}}

Json = dict[str, Any]


def ask(client: Client, prompt: str, **fields: object) -> Json:
    return client.complete(
        prompt, max_tokens=8, temperature=0, return_cached_tokens_details=True, **fields
    )


def texts_of(answer: Json) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def brought(answer: Json) -> int:
    return int(answer["usage"]["cached_tokens_details"]["storage"])


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> Iterator[list[list[str]]]:
    """What one rank says, also by a grammar."""
    settings = Settings(
        model=str(model_folder), port=0, page_tokens=PAGE, storage="none", deterministic=True
    )
    server = InProcess(settings)
    yield [
        texts_of(ask(server.client, prompt, **form)) for form in ({}, FORM) for prompt in PROMPTS
    ]
    server.close()


def workers(child: Child) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(child.process.pid)], capture_output=True, text=True
    )
    return [int(pid) for pid in found.stdout.split()]


def gone(pid: int, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def ends_in_order(child: Child, worker: int) -> None:
    child.terminate()
    assert child.exit_code() == 0, child.printed
    assert gone(worker)
    assert re.search(r"of each of [24] ranks", child.printed) and "Traceback" not in child.printed


def ends_with_its_worker(child: Child, worker: int) -> None:
    os.kill(worker, signal.SIGKILL)
    assert child.exit_code() == 1, child.printed
    assert "rank 1 was ended by signal 9; all ranks end with it" in child.printed


def leaves_no_process_behind(child: Child, worker: int) -> None:
    child.process.kill()
    assert gone(worker)


@pytest.mark.quick(flags=[("--tp", "2")])
@pytest.mark.parametrize(
    ("flags", "ends"),
    [
        (("--tp", "2"), (ends_in_order, ends_with_its_worker)),
        (("--pp", "2"), (ends_in_order, leaves_no_process_behind)),
        (("--pp", "2", "--tp", "2"), (ends_in_order, ends_in_order)),
    ],
    ids=["tp", "pp", "both"],
)
def test_ranks_answer_as_one_go_on_from_storage_and_end_together(
    flags: tuple[str, ...],
    ends: Sequence[Callable[[Child, int], None]],
    model_folder: Path,
    tmp_path: Path,
    expected: list[list[str]],
) -> None:
    url = f"file://{tmp_path / 'pages'}?cap=1GB&floor=1MB"
    arguments = (str(model_folder), *FLAGS, *flags, "--storage", url)
    free, constrained = expected[: len(PROMPTS)], expected[len(PROMPTS) :]
    assert all(re.fullmatch("[0-9]{3,6}x", text) for (text,) in constrained)
    for life, (start, end) in enumerate(zip((Child, ForkedChild), ends, strict=True)):
        with start(arguments) as child:
            client = child.client()
            worker = workers(child)[0]
            answers = [ask(client, prompt, stop=["never written"]) for prompt in PROMPTS]
            assert [texts_of(answer) for answer in answers] == free
            assert all((brought(answer) > 0) == (life == 1) for answer in answers)
            again = [ask(client, prompt) for prompt in PROMPTS]
            assert [texts_of(answer) for answer in again] == free
            assert [texts_of(ask(client, prompt, **FORM)) for prompt in PROMPTS] == constrained
            assert client.get("/health").status == 200
            assert client.get("/admin/cache").json()["violations"] == []
            end(child, worker)


@pytest.mark.full
def test_every_shape_goes_on_from_what_all_others_stored(
    model_folder: Path, tmp_path: Path
) -> None:
    """A conversation, each turn of it with a server of another shape."""
    url = f"file://{tmp_path / 'pages'}?cap=1GB&floor=1MB"
    flags = [flag for flag in FLAGS if flag != "--deterministic"]
    turns = [" ".join(PROMPTS) + " and that is that" * 3 * turn for turn in range(5)]
    plain = Settings(model=str(model_folder), port=0, page_tokens=PAGE, storage="none")
    server = InProcess(plain)
    expected = [texts_of(ask(server.client, prompt)) for prompt in turns]
    server.close()
    shapes = [(), ("--tp", "2"), ("--pp", "2"), ("--pp", "2", "--tp", "2"), ()]
    before = 0
    for shape, prompt, wanted in zip(shapes, turns, expected, strict=True):
        with ForkedChild((str(model_folder), *flags, *shape, "--storage", url)) as child:
            answer = ask(child.client(), prompt)
            assert texts_of(answer) == wanted
            assert brought(answer) // PAGE == before // PAGE, shape
            before = answer["usage"]["prompt_tokens"]
            child.terminate()
            assert child.exit_code() == 0, child.texts_of


@pytest.mark.full
def test_a_store_is_attached_cleared_and_left_by_all_ranks(
    model_folder: Path, tmp_path: Path, expected: list[list[str]]
) -> None:
    url = f"file://{tmp_path}?cap=1GB&floor=1MB"
    with ForkedChild((str(model_folder), *FLAGS, "--tp", "2", "--storage", "none")) as child:
        client = child.client()
        (worker,) = workers(child)
        refused = client.send("PUT", "/admin/storage", b'{"url": "file:///dev/null/x"}')
        assert refused.status == 400
        reply = client.send("PUT", "/admin/storage", f'{{"url": "{url}"}}'.encode())
        assert reply.status == 200 and reply.json()["attached"]
        assert texts_of(ask(client, PROMPTS[0])) == expected[0]
        dropped = {}
        deadline = time.monotonic() + 60
        while not dropped.get("host") or client.get("/admin/storage").json()["waiting_pages"]:
            assert time.monotonic() < deadline
            dropped = client.post("/admin/flush?tier=all").json()["dropped_pages"]
        answer = ask(client, PROMPTS[0])
        assert texts_of(answer) == expected[0] and brought(answer) > 0
        assert client.post("/admin/storage/clear").json()["over"]
        assert client.send("DELETE", "/admin/storage").json() == {"attached": False}
        assert texts_of(ask(client, PROMPTS[1])) == expected[1]
        body = b'{"prompt": "the cat", "max_tokens": 3000, "stream": true}'
        client.open("POST", "/v1/completions", body)
        time.sleep(0.3)
        ends_with_its_worker(child, worker)


@pytest.mark.full
@pytest.mark.parametrize("waits_for", ["an answer", "the end of nothing"])
def test_a_worker_that_does_not_answer_cannot_hold_the_server_after_two_signals(
    waits_for: str, model_folder: Path
) -> None:
    with ForkedChild((str(model_folder), *FLAGS, "--tp", "2", "--storage", "none")) as child:
        client = child.client()
        (worker,) = workers(child)
        freeze(worker)
        body = b'{"prompt": "the cat", "max_tokens": 30, "stream": true}'
        request = client.open("POST", "/v1/completions", body)
        time.sleep(0.5)
        if waits_for != "an answer":
            request.leave()
        child.terminate()
        time.sleep(0.5)
        child.terminate()
        assert child.exit_code() == 1, child.printed
        assert "a rank does not answer" in child.printed
        assert gone(worker)


def test_one_rank_starts_no_process_and_listens_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(socket, "create_server", None)
    with RankProcesses(Settings()) as none:
        assert none.topology(Settings()) == (Settings(), RankTopology())


class EndsAtOnce(subprocess.Popen[str]):
    def __init__(self, arguments: list[str], **options: Any) -> None:
        super().__init__(["false"], **options)
        self.wait()


def test_a_worker_that_ends_before_its_first_command_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", EndsAtOnce)
    with (
        RankProcesses(Settings(tp=2)) as workers,
        pytest.raises(WorkerLostError, match="rank 1 ended with 1; all ranks end with it"),
    ):
        workers.check()


@pytest.mark.full
def test_a_worker_that_never_comes_ends_the_server_with_a_sentence(model_folder: Path) -> None:
    arguments = (str(model_folder), *FLAGS, "--tp", "2", "--storage", "none")
    with ForkedChild(arguments) as child:
        deadline = time.monotonic() + 60
        while not (found := workers(child)):
            assert time.monotonic() < deadline and child.process.poll() is None, child.printed
        os.kill(found[0], signal.SIGKILL)
        assert child.exit_code() in (1, 2), child.printed
        assert "rank 1 was ended by signal 9" in child.printed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tp", "3"), "tensor ranks"),
        (("--pp", "3"), "2 layers over 3 pipeline ranks; use 1 to 2"),
        (("--tp", "2", "--device", "cuda:1"), "use --device cuda"),
        (("--tp", "2", "--device", "gpu"), "--device gpu is not known; use cpu, cuda"),
        (("--tp", "2", "--pp", "50", "--device", "cuda"), "100 ranks need a GPU each"),
        (("--tp", "64", "--device", "cuda"), "or --rank-backend gloo, with which ranks share a"),
        (("--tp", "2", "--rank-backend", "nccl"), "--rank-backend nccl is for GPUs, and --device"),
        (("--tp", "4", "--deterministic"), "use --tp 2"),
    ],
)
def test_ranks_that_cannot_be_are_refused_before_they_are_started(
    flags: tuple[str, ...],
    words: str,
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(["serve", str(model_folder), "--port", "0", *flags]) == 2
    assert words in capsys.readouterr().err
