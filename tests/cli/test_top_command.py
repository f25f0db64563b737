"""`kvtide top`: the live page's parts in a terminal, and a sentence for whatever goes wrong."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvtide.cli import top_command
from kvtide.cli.client import CutError, RequestRefusedError
from kvtide.cli.main import main
from kvtide.cli.top.top_view import bar, count, screen, seconds
from tests.server.live.conftest import watched
from tests.server.live.watching import frame, hybrid
from tests.server.serving import PAGE

__all__ = ["watched"]


@pytest.fixture
def server(watched: Callable[..., Any]) -> Any:
    """It has answered one prompt twice."""
    opened = watched(device_tokens=512, host_tokens=1024, storage="memory:")
    for _ in range(2):
        opened.client.complete([5] * (3 * PAGE) + [6], max_tokens=2, session_id="chat")
    return opened


def rendered(snapshot: Any, width: int, **more: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system="truecolor", force_terminal=True)
    console.print(screen(snapshot, [snapshot["token_rates"]] * 300, width, **more))
    return out.getvalue()


def test_a_pipe_gets_one_snapshot(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", server.url]) == 0
    text = capsys.readouterr().out
    for part in (
        *("occupancy", "flows between tiers", "prompt tokens by origin", "TTFT", "prefix tree"),
        *("requests", "why no longer prefix", "storage", "memory: is attached", "restores checked"),
    ):
        assert part in text, part
    assert f"{3 * PAGE} tokens in 1 nodes" in text


def test_a_hybrids_pools_and_hot_buffers_are_rendered(
    watched: Callable[..., Any], tmp_path: Path
) -> None:
    text = rendered(frame(hybrid(watched, tmp_path)), 120)
    for part in ("kv", "swa", "c4", "0 of 3 requests", "rank-s"):
        assert part in text, part


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal(server: Any, width: int) -> None:
    plain = Console(file=io.StringIO(), width=width)
    plain.print(screen(frame(server), [], width))
    lines = plain.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    tiles = ("saved", "prompt cached", "requests", "accept length", "restores checked")
    first = next(number for number, line in enumerate(lines) if line.startswith("saved"))
    of_tiles = itertools.takewhile(lambda line: "occupancy" not in line, lines[first:])
    assert all(line.startswith(tiles) for line in of_tiles), "a tile is cut in two"


def test_tiers_have_their_colours(server: Any) -> None:
    text = rendered(frame(server, lambda seen: seen["tree"]["nodes"] == 1), 120)
    assert "\x1b[30;42m" in text, "the branch on the device is green"


def test_a_server_that_needs_its_key_says_so(
    watched: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVTIDE_ADMIN_KEY", raising=False)
    server = watched(admin_key="sesame")
    assert main(["top", server.url, "--once"]) == 2
    assert "pass it with --admin-key or in KVTIDE_ADMIN_KEY" in capsys.readouterr().err
    assert main(["top", server.url, "--once", "--admin-key", "sesame"]) == 0
    monkeypatch.setenv("KVTIDE_ADMIN_KEY", "sesame")
    assert main(["top", server.url]) == 0


def test_where_nothing_listens_a_sentence_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "http://127.0.0.1:9"]) == 2
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err


class Scripted:
    """A server that sends, breaks, and comes back."""

    def __init__(self, turns: Iterator[Any]) -> None:
        self._turns = turns

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *raised: object) -> None:
        pass

    async def stream(self, path: str) -> AsyncIterator[Any]:
        for turn in self._turns:
            if isinstance(turn, Exception):
                raise turn
            yield turn


def test_it_survives_a_restart_and_ends_with_a_refusal(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_command, "RETRY_S", 0.0)
    first = frame(server)
    second = {**first, "server": {**first["server"], "model": "after the restart"}}
    out = io.StringIO()
    console = Console(file=out, width=100, height=60, force_terminal=True)
    turns = iter([first, CutError("gone"), second, RequestRefusedError(401, "no key")])
    with pytest.raises(RequestRefusedError):
        asyncio.run(top_command._watch(Scripted(turns), console))  # type: ignore[arg-type]
    text = out.getvalue()
    assert text.index("no answer; trying again") < text.index("after the restart")


def test_numbers_are_short() -> None:
    assert [seconds(value) for value in (None, 0.0042, 0.25, 5, 65, 600, 9000)] == [
        *("–", "4.2 ms", "250 ms", "5.00 s", "65.0 s", "10.0 min", "2.5 h")
    ]
    assert [count(value) for value in (7, 1500, 250_000, 3e6, 4e9)] == [
        *("7", "1.5k", "250k", "3.0M", "4.0G")
    ]


def test_a_bar_is_as_long_as_asked() -> None:
    assert bar([("green", 1), ("blue", 1)], 4, 8).plain == "████────"
    assert bar([], 0, 3).plain == "───"
