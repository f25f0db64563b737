"""`kvtide serve` as processes that end, one way or another, and find their pages again."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.server.serving import PAGE, Child, ForkedChild
from tests.server.talking import Client, Json

PAGES = 12
PROMPT = [5 + n % 90 for n in range(PAGES * PAGE + 1)]


def child(model: Path, *flags: str, **environment: str) -> Child:
    arguments = (str(model), "--port", "0", "--page-tokens", str(PAGE), "--deterministic", *flags)
    return ForkedChild(arguments, environment)


def complete(client: Client) -> Json:
    return client.complete(
        PROMPT, max_tokens=8, temperature=0, logprobs=2, return_cached_tokens_details=True
    )


def until_stored(client: Client, pages: int) -> None:
    deadline = time.monotonic() + 60
    while client.get("/admin/storage").json()["stored_pages"] < pages:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pages_outlive_the_process_however_it_ends(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default in the user's cache directory: ended, killed, and ended again."""
    monkeypatch.delenv("KVTIDE_STORAGE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    with child(model_folder) as first:
        client = first.client()
        folder = tmp_path / "caches" / "kvtide" / "pages"
        assert f"pages are stored in file://{folder}, up to 20GB" in first.printed
        expected = complete(client)
        assert expected["usage"]["cached_tokens_details"]["storage"] == 0
        first.terminate()
        assert first.exit_code() == 0
        assert "Traceback" not in first.printed
    with child(model_folder) as second:
        client = second.client()
        answer = complete(client)
        assert answer["choices"] == expected["choices"]
        assert answer["usage"]["cached_tokens_details"]["storage"] >= PAGES * PAGE
        client.complete([9, *PROMPT], max_tokens=1)
        until_stored(client, PAGES)
        running = client.start("/v1/completions", prompt=[8, *PROMPT], max_tokens=500)
        second.process.send_signal(signal.SIGKILL)
        second.exit_code()
        running.leave()
    with child(model_folder) as third:
        client = third.client()
        answer = complete(client)
        assert answer["choices"] == expected["choices"]
        assert answer["usage"]["cached_tokens_details"]["storage"] >= PAGES * PAGE
        usage = client.complete([9, *PROMPT], max_tokens=1, return_cached_tokens_details=True)
        assert usage["usage"]["cached_tokens_details"]["storage"] >= PAGES * PAGE
        third.terminate()
        assert third.exit_code() == 0


@pytest.mark.full
def test_a_signal_lets_what_is_in_line_be_written(model_folder: Path, tmp_path: Path) -> None:
    url = f"tests.server.stores:slow?path={tmp_path / 'pages'}"
    with child(model_folder, "--storage", url) as serving:
        client = serving.client()
        complete(client)
        report = client.get("/admin/cache").json()["storage"]
        assert report["stored_pages"] == 0, "the store is not slow enough for this test"
        serving.terminate()
        assert serving.exit_code() == 0
        assert "Traceback" not in serving.printed
    with child(model_folder, "--storage", f"file://{tmp_path / 'pages'}") as serving:
        details = complete(serving.client())["usage"]["cached_tokens_details"]
        assert details["storage"] >= PAGES * PAGE


@pytest.mark.full
@pytest.mark.parametrize("signals", [1, 2])
def test_a_frozen_store_does_not_keep_the_process(model_folder: Path, signals: int) -> None:
    url = "tests.server.stores:Frozen?calls=write,read,status"
    drain_s = 1.0 if signals == 1 else 60.0
    with child(model_folder, "--storage", url, "--drain-seconds", str(drain_s)) as serving:
        client = serving.client()
        complete(client)
        assert client.get("/admin/cache").json()["storage"]["waiting_pages"] > 0
        began = time.monotonic()
        serving.terminate()
        if signals == 2:
            time.sleep(0.5)
            assert serving.process.poll() is None, "it gave up at once"
            serving.terminate()
        assert serving.exit_code() == 0
        assert time.monotonic() - began < 40
        assert f"{PAGES} pages were still queued for storage" in serving.printed
        assert "storage has not closed in time; the process exits without it" in serving.printed
        assert "Traceback" not in serving.printed
