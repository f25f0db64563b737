"""The live page in a real browser. `./check --all` installs it.

`pytest --write-pictures tests/server/live/test_page.py::test_pictures` takes the documents'
pictures.
"""

from __future__ import annotations

import io
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.top.top_view import screen
from kvtide.server.settings import Settings
from tests.processes import free_port
from tests.server.live.watching import frames, hybrid, until
from tests.server.serving import PAGE, InProcess

IMAGES = Path(__file__).parents[3] / "docs" / "images"
MAX_PICTURE_BYTES = 200_000
PANELS = ("tiles", "occupancy", "flows", "storage", "sources", "ttft", "tree", "requests", "misses")
PICTURES = {(1280, "light"): "live.png", (390, "dark"): "live-phone.png"}
TERMINAL = "top.png"
SHAPES = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]

LOW_CONTRAST = """() => {
  const shade = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((c) => c / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (one) => {
    const colour = getComputedStyle(one).backgroundColor;
    return /^rgba.*, 0\\)$/.test(colour) ? ground(one.parentElement) : colour;
  };
  const found = [];
  for (const one of document.querySelectorAll("main *, header *")) {
    const own = [...one.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !one.checkVisibility()) continue;
    const [a, b] = [shade(getComputedStyle(one).color), shade(ground(one))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(getComputedStyle(one).fontSize);
    if (ratio < 4.5 || size < 11) found.push(`${one.textContent.slice(0, 20)}: ${ratio} ${size}`);
  }
  return found;
}"""
"""Texts that are too small, or stand out too little from what they stand on."""

CUT_OFF = """() => [...document.querySelectorAll("section, section *")]
  .filter((one) => one.clientWidth && one.scrollWidth > one.clientWidth + 1)
  .filter((one) => !one.closest(".cell"))
  .map((one) => one.className + one.textContent.slice(0, 30))"""
"""Parts that one would have to scroll sideways to read."""

HINTS = """() => [...document.querySelectorAll("#occupancy .pool")].map((one) => one.hint)"""
"""Of pools; a frame takes their place while a pointer moves to one."""

PAINTED = """(canvas) => {
  const { width, height } = canvas;
  const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  return new Set(new Uint32Array(data.buffer)).size;
}"""
"""How many colours a chart has."""

STAND_STILL = """() => {
  ReadableStreamDefaultReader.prototype.read = () => {
    document.body.dataset.still = "yes";
    return new Promise(() => {});
  };
}"""
"""The page takes in what it waits for and nothing more, and still takes itself for live."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed; ./check --all installs it")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


class Visit:
    """A page in the browser; nothing may go wrong in it, and nothing else may be asked."""

    def __init__(self, browser: Any, url: str, width: int = 1280, scheme: str = "light") -> None:
        self.page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.problems: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"{url}/")

    def frames(self) -> int:
        return int(self.page.locator("body").get_attribute("data-frames") or 0)

    def next_frame(self) -> None:
        before = self.frames()
        until(lambda: self.frames() > before)

    def text(self, query: str) -> str:
        return str(self.page.locator(query).inner_text())

    def close(self, url: str) -> None:
        assert self.problems == []
        assert [one for one in self.asked if not one.startswith((url, "data:", "about:"))] == []
        self.page.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    opened: list[tuple[Visit, str]] = []

    def open_page(url: str, **options: Any) -> Visit:
        opened.append((Visit(browser, url, **options), url))
        return opened[-1][0]

    yield open_page
    for page, url in opened:
        page.close(url)


NEVER = threading.Event()


def talk(
    server: InProcess, users: int = 4, turns: int = 5, enough: threading.Event = NEVER
) -> None:
    """Conversations with a common beginning at once, until they end or it is enough."""

    def user(number: int) -> None:
        dice = random.Random(number)
        tokens = [5] * 4 * PAGE + [6 + number % 3] * 3 * PAGE
        for turn in range(turns):
            if enough.wait(dice.random() if turn and enough is not NEVER else 0):
                return
            tokens += [dice.randrange(20, 300) for _ in range(30)]
            server.client.complete(tokens, max_tokens=8, session_id=f"user {number}")

    threads = [threading.Thread(target=user, args=(number,)) for number in range(users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.fixture
def busy(watched: Callable[..., Any]) -> InProcess:
    server: InProcess = watched(
        device_tokens=2048,
        host_tokens=4096,
        storage="memory:",
        prefetch_min_tokens=1,
        verify_restores=0.5,
        speculate="ngram",
    )
    server.app.live.publisher.interval_s = 0.25
    talk(server)
    return server


@pytest.mark.full
def test_every_panel_shows_what_the_server_did(busy: InProcess, visit: Any) -> None:
    seen = visit(busy.url)
    seen.next_frame()
    talk(busy, users=2, turns=2)
    until(lambda: "24 done" in seen.text("#tiles"))
    words = {
        "tiles": ("saved since start", "rank-seconds", "accept length", "restores checked"),
        "occupancy": ("device", "host", "kv", "of 128 pages"),
        "flows": ("backup", "load", "store", "fetch", "kB", "in flight", "queued"),
        "storage": ("memory:", "attached", "stored"),
        "sources": ("device", "computed", "in all"),
        "ttft": ("median", "95%", "device"),
        "tree": ("tokens in", "nodes", "storage", "none of them"),
        "requests": ("state", "prompt"),
        "misses": ("why not more", "no prompt with these tokens was kept"),
    }
    assert words.keys() == {*PANELS}
    for panel, parts in words.items():
        text = seen.text(f"#{panel}")
        for part in parts:
            assert part in text, f"{panel} lacks {part}: {text}"
    for chart in ("sources", "ttft"):
        assert seen.page.locator(f"#{chart} canvas").evaluate(PAINTED) > 4, f"{chart} is empty"
    assert seen.page.locator(".cell:visible").count() > 10


@pytest.mark.full
def test_a_branch_tells_its_hits_last_use_and_sessions(busy: InProcess, visit: Any) -> None:
    seen = visit(busy.url)
    seen.next_frame()
    seen.page.locator(".cell:visible").first.hover()
    until(lambda: "on device, host and storage" in seen.text("#tip"))
    text = seen.text("#tip")
    for part in ("tokens 0 to", r"hits: \d", r"last use: .* ago"):
        assert re.search(part, text), text
    assert re.search(r"pinned sessions: [1-4] \(user ", text), text


@pytest.mark.full
@pytest.mark.parametrize("width", [1280, 390])
def test_a_hybrids_pools_and_hot_buffers_are_shown(
    watched: Callable[..., Any], visit: Any, tmp_path: Path, width: int
) -> None:
    server = hybrid(watched, tmp_path)
    seen = visit(server.url, width=width)
    until(lambda: "0 running, 0 waiting, 2 done" in seen.text("#tiles").replace("\n", ", "))
    text = seen.text("#occupancy")
    for part in ("device\n", "device, hot buffers", "host\n", "kv", "swa", "c4", "0 of 3 requests"):
        assert part in text, f"{part!r} in {text}"
    hints = seen.page.evaluate(HINTS)
    assert any("with c4_index, c16" in hint for hint in hints)
    assert any(hint.startswith("Entries of c4 that running requests") for hint in hints)
    assert seen.page.evaluate(CUT_OFF) == [] and seen.page.evaluate(LOW_CONTRAST) == []
    until(lambda: seen.page.locator(".cell:visible").count() >= 2)


@pytest.mark.full
def test_running_requests_are_shown_and_updated(busy: InProcess, visit: Any) -> None:
    seen = visit(busy.url)
    asked = {"prompt": [3] * 40, "max_tokens": 900, "ignore_eos": True}
    running = busy.client.start("/v1/completions", **asked)
    until(lambda: "1 decode" in seen.text("#requests"))
    until(lambda: "1 running" in seen.text("#tiles"))
    running.leave()
    until(lambda: "0 running" in seen.text("#tiles"))


@pytest.mark.full
def test_it_survives_a_restart_of_the_server(model_folder: Path, visit: Any) -> None:
    settings = Settings(model=str(model_folder), port=free_port(), page_tokens=PAGE, storage="none")
    server = InProcess(settings)
    try:
        seen = visit(server.url)
        server.client.complete([5] * 40, max_tokens=2)
        until(lambda: "1 done" in seen.text("#tiles"))
        server.close()
        until(lambda: "does not answer" in seen.text("#status"))
        assert "1 done" in seen.text("#tiles"), "what was known stays"
        server = InProcess(settings)
        until(lambda: seen.text("#status") == "live" and "0 done" in seen.text("#tiles"))
        seen.next_frame()
    finally:
        server.close()


@pytest.mark.full
def test_it_asks_for_the_admin_key(watched: Any, visit: Any) -> None:
    server = watched(admin_key="sesame", api_key="another")
    seen = visit(server.url)
    for key in ("wrong", "another"):
        seen.page.locator("#ask input").fill(key)
        seen.page.locator("#ask button").click()
        until(lambda: "This key was refused." in seen.text("#why"))
    assert seen.frames() == 0
    seen.page.locator("#ask input").fill("sesame")
    seen.page.keyboard.press("Enter")
    until(lambda: seen.frames() > 1)
    assert not seen.page.locator("#ask").is_visible()
    seen.page.reload()
    until(lambda: seen.frames() > 1)


@pytest.mark.full
@pytest.mark.parametrize("show", [False, True])
def test_text_is_shown_only_where_it_may(watched: Any, visit: Any, show: bool) -> None:
    server = watched(show_text=show)
    server.client.complete("the cat sat on the mat " * 8, max_tokens=2)
    seen = visit(server.url)
    until(lambda: seen.page.locator(".cell:visible").count() == 1)
    seen.page.locator(".cell:visible").hover()
    assert ("the cat" in seen.text("#tip")) == show


@pytest.mark.full
@pytest.mark.parametrize(("width", "scheme"), SHAPES)
def test_it_is_readable(busy: InProcess, visit: Any, width: int, scheme: str) -> None:
    seen = visit(busy.url, width=width, scheme=scheme)
    seen.next_frame()
    assert seen.page.evaluate("document.documentElement.scrollWidth") == width
    assert seen.page.evaluate(CUT_OFF) == []
    assert seen.page.evaluate(LOW_CONTRAST) == []
    ground = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(13, 17, 23)") == (scheme == "dark")


@pytest.mark.full
def test_pictures(busy: InProcess, visit: Any, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    folder = IMAGES if pytestconfig.getoption("--write-pictures") else tmp_path
    enough = threading.Event()
    load = threading.Thread(target=talk, args=(busy, 8, 40, enough))
    load.start()
    try:
        for (width, scheme), name in PICTURES.items():
            seen = visit(busy.url, width=width, scheme=scheme)
            until(lambda seen=seen: seen.frames() > 20)
            _save(_whole(seen), folder / name)
            seen.page.goto("about:blank")
            until(lambda: not busy.app.live.publisher.viewers)
        with frames(busy) as events:
            snapshots = [*islice(events, 20)]
    finally:
        enough.set()
        load.join(60)
    terminal = visit("data:text/html,", width=1200)
    terminal.page.set_content(_terminal(snapshots))
    _save(terminal.page.locator("pre").screenshot(timeout=60_000), folder / TERMINAL)
    for name in (*PICTURES.values(), TERMINAL):
        assert 5_000 < (folder / name).stat().st_size < MAX_PICTURE_BYTES, name


def _whole(seen: Visit) -> bytes:
    """The whole page, which would be cut off if it grew while the picture is taken."""
    seen.page.evaluate(STAND_STILL)
    until(lambda: seen.page.locator("body").get_attribute("data-still"))
    picture: bytes = seen.page.screenshot(full_page=True, timeout=60_000)
    height = seen.page.evaluate("document.documentElement.scrollHeight")
    assert _size(picture)[1] == height
    return picture


def _size(picture: bytes) -> tuple[int, int]:
    from PIL import Image

    size: tuple[int, int] = Image.open(io.BytesIO(picture)).size
    return size


def _terminal(snapshots: list[Any]) -> str:
    """`kvtide top` as a web page."""
    from rich.console import Console
    from rich.terminal_theme import SVG_EXPORT_THEME

    console = Console(record=True, width=130, file=io.StringIO(), force_terminal=True)
    console.print(screen(snapshots[-1], [one["token_rates"] for one in snapshots], 130))
    body = (
        "<pre style='font: 13px/1.25 monospace; padding: 12px; width: max-content; "
        "color: {foreground}; background: {background}'>{code}</pre>"
    )
    return console.export_html(theme=SVG_EXPORT_THEME, inline_styles=True, code_format=body)


def _save(picture: bytes, path: Path) -> None:
    """With few colours: such pictures have few, and are half as large then."""
    from PIL import Image

    Image.open(io.BytesIO(picture)).convert("RGB").quantize(128).save(path, optimize=True)
