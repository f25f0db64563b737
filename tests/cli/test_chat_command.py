"""`kvtide chat`: a conversation through a pipe, and a sentence for whatever goes wrong."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.client import Server, serving
from kvtide.cli.main import main
from tests.server import tiny_model

TOOK = re.compile(
    r"\[(\d+) prompt tokens: device (\d+), host (\d+), storage (\d+), computed (\d+); "
    r"first token after [\d,]+ ms; about [\d,]+ ms saved\]"
)
CHAT = [sys.executable, "-m", "kvtide.cli.main", "chat"]
KEY = "open-sesame"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving([str(folder), "--page-tokens", "8"], KEY) as started:
        yield started


Say = Callable[..., int]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Chat, with these lines from a pipe."""

    def chat(lines: list[str], *options: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return main(["chat", *options])

    return chat


# -- a real server --------------------------------------------------------------------------


def test_every_turn_says_where_its_prompt_came_from(server: Server, say: Say, capsys) -> None:
    options = ["--url", server.url, "--api-key", KEY, "--max-tokens", "12", "--temperature", "0"]
    assert say(["Hello, tides!", "", "And again?"], *options, "--session", "s") == 0
    printed = capsys.readouterr().out
    assert printed.index("> Hello, tides!") < printed.index("> And again?")
    first, second = [list(map(int, found)) for found in TOOK.findall(printed)]
    assert first == [16, 0, 0, 0, 16]  # Thirteen letters, the role, the end, the next role.
    tokens, device, host, storage, computed = second
    assert device >= 16 and (host, storage) == (0, 0) and computed == tokens - device


def test_reset_begins_a_new_conversation_and_quit_ends(server: Server, say: Say, capsys) -> None:
    options = ["--url", server.url + "/v1/", "--api-key", KEY, "--max-tokens", "4"]
    lines = ["one", "/reset", "one", "/what", "/quit", "never asked"]
    assert say(lines, *options, "--system", "Be kind.") == 0
    printed = capsys.readouterr().out
    tokens = [int(found[0]) for found in TOOK.findall(printed)]
    assert len(tokens) == 2 and tokens[0] == tokens[1] == len("Be kind.one") + 5
    assert "there is no /what; use /reset or /quit" in printed and "never asked" not in printed
    assert "reached its longest" in printed


def test_the_key_may_come_from_the_environment(server: Server, say: Say, monkeypatch) -> None:
    monkeypatch.setenv("KVTIDE_API_KEY", KEY)
    assert say(["hi"], "--url", server.url, "--max-tokens", "1") == 0


def test_a_wrong_key_is_refused_before_the_first_message(server: Server, say: Say, capsys) -> None:
    assert say(["hi"], "--url", server.url, "--api-key", "wrong") == 2
    assert "API key; pass it with --api-key" in capsys.readouterr().err


def test_a_turn_that_cannot_be_served_is_forgotten(server: Server, say: Say, capsys) -> None:
    options = ["--url", server.url, "--api-key", KEY, "--max-tokens", "4"]
    assert say(["x" * 5000, "hi"], *options) == 1
    printed = capsys.readouterr().out
    assert "shorten one of them; this turn is forgotten" in printed
    assert [int(found[0]) for found in TOOK.findall(printed)] == [5]


def test_ctrl_c_stops_the_answer_and_keeps_what_came(server: Server) -> None:
    with _chatting("--url", server.url, "--api-key", KEY) as chat:
        assert chat.stdin is not None and chat.stdout is not None
        chat.stdin.write("first\n")
        chat.stdin.flush()
        _read_until(chat, "> first\n")
        assert chat.stdout.read(20)  # The answer has begun.
        chat.send_signal(signal.SIGINT)
        chat.stdin.write("second\n")
        chat.stdin.flush()
        _read_until(chat, "stopped; the text so far is kept")
        _read_until(chat, "> second\n")
        assert chat.stdout.read(5)
        chat.send_signal(signal.SIGINT)
        printed = chat.communicate()[0]
    assert "stopped" in printed and chat.returncode == 0
    _wait_until_nothing_runs(server)


def _chatting(*options: str) -> subprocess.Popen[str]:
    """With answers that go on until they are stopped; chance could end one at any word.

    A shell that starts the tests in the background has them ignore SIGINT, and so would a child.
    """
    return subprocess.Popen(
        [*CHAT, "--max-tokens", "3900", "--temperature", "0", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def _read_until(chat: subprocess.Popen[str], wanted: str) -> str:
    """The line that has it."""
    assert chat.stdout is not None
    while (line := chat.stdout.readline()) and wanted not in line:
        pass
    assert line, f"it ended, with {chat.wait(20)}, before it printed {wanted!r}"
    return line


def _wait_until_nothing_runs(server: Server) -> None:
    """The server notices that its clients have gone."""
    request = urllib.request.Request(
        f"{server.url}/admin/cache", headers={"Authorization": f"Bearer {KEY}"}
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with urllib.request.urlopen(request) as response:
            requests = json.load(response)["requests"]
        if requests["running"] == requests["waiting"] == 0:
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {requests}")


@pytest.mark.full
def test_sigterm_ends_the_server_too(folder: Path) -> None:
    with _chatting("--serve", "--", str(folder)) as chat:
        assert chat.stdin is not None and chat.stdout is not None
        chat.stdin.write("first\n")
        chat.stdin.flush()
        url = re.search(r"127.0.0.1:(\d+)", _read_until(chat, "127.0.0.1:"))
        assert url is not None and chat.stdout.read(30)
        chat.terminate()
        assert chat.wait(20) == 128 + signal.SIGTERM
    _check_that_the_port_is_free(int(url[1]))


def test_serve_starts_a_server_for_the_chat_and_ends_it(tmp_path, say: Say, capsys) -> None:
    mute = tiny_model.save(tmp_path, template=None)
    assert say(["hi"], "--serve", "--", str(mute), "--name", "mute") == 1
    printed = capsys.readouterr().out
    assert "this model has no chat template" in printed
    url = re.search(r"\[mute at http://127.0.0.1:(\d+): /reset begins anew", printed)
    assert url is not None
    _check_that_the_port_is_free(int(url[1]))


def _check_that_the_port_is_free(port: int) -> None:
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.full
def test_a_server_that_speculates_says_what_a_step_gave(folder: Path, say: Say, capsys) -> None:
    server = ["--", str(folder), "--speculate", "ngram", "--storage", "none"]
    assert (
        say(["aaaaaaaaaaaaaaaa"], "--serve", "--max-tokens", "40", "--temperature", "0", *server)
        == 0
    )
    found = re.search(
        r"saved; (\d\.\d\d) tokens per verify step, (\d+) of (\d+) drafts accepted\]",
        capsys.readouterr().out,
    )
    assert found is not None
    assert 1 <= float(found[1]) <= 4 and 0 < int(found[2]) <= int(found[3])


# -- what else may go wrong -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--serve", "--url", "http://x"], "drop one of them"),
        (["--url", "ftp://x"], "write it like http://127.0.0.1:8000"),
        (["--", "--device-tokens", "64"], "'--device-tokens' is for a server; add --serve"),
        (["--serve", "--", "/nowhere"], "the server did not start: "),
    ],
)
def test_what_cannot_work_is_refused(options: list[str], sentence: str, say: Say, capsys) -> None:
    assert say(["hi"], *options) == 2
    assert sentence in capsys.readouterr().err


def test_no_server_is_a_sentence_with_the_remedy(say: Say, capsys) -> None:
    with socket.socket() as taken:  # Bound and not listening: no other process gets the port.
        taken.bind(("127.0.0.1", 0))
        assert say(["hi"], "--url", f"127.0.0.1:{taken.getsockname()[1]}") == 2
    assert "run `kvtide serve` in another terminal" in capsys.readouterr().err


Handler = Callable[[BaseHTTPRequestHandler], None]


class Scripted(ThreadingHTTPServer):
    """Answers questions with the given answers in turn; `asked` are their bodies."""

    def __init__(self, *answers: Handler) -> None:
        self.answers, self.asked = list(answers), list[dict[str, Any]]()
        super().__init__(("127.0.0.1", 0), _Script)

    def __enter__(self) -> Scripted:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Script(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        _send(self, 200, json.dumps({"data": [{"id": "scripted"}]}))

    def do_POST(self) -> None:
        assert isinstance(self.server, Scripted)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(json.loads(body))
        self.server.answers.pop(0)(self)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _send(handler: BaseHTTPRequestHandler, status: int, body: str, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body.encode())


def _delta(text: str, finish: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def answer(*parts: str) -> Handler:
    return lambda handler: _send(handler, 200, "".join(parts))


def full(handler: BaseHTTPRequestHandler) -> None:
    _send(handler, 429, json.dumps({"error": {"message": "full"}}), Retry_After="1")


def lost(handler: BaseHTTPRequestHandler) -> None:
    """A server that dies in the midst of a chunk."""
    _send(handler, 200, "5\r\ndata", Transfer_Encoding="chunked")
    handler.connection.shutdown(socket.SHUT_RDWR)


DONE = "data: [DONE]\n\n"
ERROR = f"data: {json.dumps({'error': {'message': 'the engine has stopped'}})}\n\n"


def test_a_full_server_is_asked_again(say: Say, capsys) -> None:
    with Scripted(full, answer(_delta("Hi.", "stop"), DONE)) as server:
        began = time.monotonic()
        assert say(["hi"], "--url", server.url) == 0
    assert time.monotonic() - began >= 1
    printed = capsys.readouterr().out
    assert "the server is full; trying again in 1 s" in printed and "Hi.\n" in printed


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        (answer(_delta("So far"), ERROR), "the engine has stopped"),
        (answer(_delta("So far")), "the connection was closed"),
        (answer(_delta("So far"), "data: {oh\n\n"), "'{oh' is no chunk of a response"),
    ],
)
def test_an_answer_that_was_cut_is_kept(cut: Handler, reason: str, say: Say, capsys) -> None:
    with Scripted(cut, answer(_delta("Yes", "stop"), DONE)) as server:
        assert say(["hi", "go on"], "--url", server.url) == 1
    printed = capsys.readouterr().out
    assert f"ended the response early: {reason}; the text so far is kept" in printed
    assert [m["content"] for m in server.asked[1]["messages"]] == ["hi", "So far", "go on"]


def test_comments_that_keep_a_stream_alive_are_no_text(say: Say, capsys) -> None:
    alive = ": keep-alive\n\n"
    with Scripted(answer(alive, _delta("Hi "), alive, _delta("you.", "stop"), DONE)) as server:
        assert say(["hi"], "--url", server.url) == 0
    assert "Hi you.\n" in capsys.readouterr().out


def test_a_turn_without_an_answer_did_not_happen(say: Say, capsys) -> None:
    with Scripted(lost, answer(_delta("Yes", "stop"), DONE)) as server:
        assert say(["hi", "hello"], "--url", server.url) == 1
    assert "this turn is forgotten" in capsys.readouterr().out
    assert [m["content"] for m in server.asked[1]["messages"]] == ["hello"]


def test_an_answer_does_not_steer_the_terminal(say: Say, capsys) -> None:
    with Scripted(answer(_delta("a\x1b[2Jb\x07\tc\n", "stop"), DONE)) as server:
        assert say(["hi"], "--url", server.url) == 0
    assert "a[2Jb\tc\n" in capsys.readouterr().out


# -- a terminal -----------------------------------------------------------------------------


def test_in_a_terminal_lines_are_typed_and_notes_are_dim() -> None:
    with Scripted(answer(_delta("Hi.", "stop"), DONE)) as server:
        ours, theirs = pty.openpty()
        chat = subprocess.Popen(
            [*CHAT, "--url", server.url], stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        seen = _until(ours, b"\n> ")
        os.write(ours, b"hello\n")
        seen += _until(ours, b"\n> ")
        os.write(ours, b"\x04")
        assert chat.wait(20) == 0
        os.close(ours)
    assert b"\x1b[2mscripted at " in seen and b"Hi.\r\n" in seen


def _until(terminal: int, end: bytes) -> bytes:
    seen = b""
    while end not in seen:
        seen += os.read(terminal, 1024)
    return seen
