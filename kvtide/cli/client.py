"""A client of `kvtide serve`, and a server as a child process: what chat and bench share.

Every failure is a `ServerError`, whose message is a sentence:

    ServerError
    ├── AbsentError            no server listens at the URL
    ├── RequestRefusedError    the server answered with an error status
    └── CutError               a stream ended before its last chunk
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self
from urllib.parse import urlsplit

import aiohttp

import kvtide
from kvtide.cli.console import CommandError

Json = dict[str, Any]

KEY_VARIABLE = "KVTIDE_API_KEY"
CONNECT_S = 10.0
STOP_S = 40.0
"""A server drains and writes to storage for up to half a minute by default."""
RETRY_S = 5
"""The wait before a retry if an overloaded server sends no `Retry-After`."""


class ServerError(Exception):
    """A failed exchange with the server. The message is a sentence."""


class AbsentError(ServerError):
    def __init__(self, url: str) -> None:
        super().__init__(
            f"no server answers at {url}; run `kvtide serve` in another terminal, or name another "
            "one with --url"
        )


class RequestRefusedError(ServerError):
    """`retry_s`: when to retry, if the server is overloaded."""

    def __init__(self, status: int, message: str, retry_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_s = retry_s


class CutError(ServerError):
    def __init__(self, reason: str) -> None:
        super().__init__(f"the server ended the response early: {reason}")


# -- requests ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of a response; `by_tier` counts the cached prompt tokens of each tier.

    verify_steps  of its drafts; None if the server does not speculate
    """

    prompt_tokens: int
    by_tier: Mapping[str, int]
    first_token_ms: float | None
    saved_ms: float
    verify_steps: int | None = None
    accepted_drafts: int = 0
    rejected_drafts: int = 0

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - sum(self.by_tier.values())

    @classmethod
    def read(cls, usage: Json) -> Usage:
        """From the `usage` of a response to a request with `DETAILS`."""
        timing = usage.get("timing") or {}
        drafts = usage.get("completion_tokens_details") or {}
        return cls(
            prompt_tokens=usage["prompt_tokens"],
            by_tier=usage.get("cached_tokens_details") or {},
            first_token_ms=timing.get("time_to_first_token_ms"),
            saved_ms=timing.get("saved_ms") or 0.0,
            verify_steps=(usage.get("speculation") or {}).get("verify_steps"),
            accepted_drafts=drafts.get("accepted_prediction_tokens") or 0,
            rejected_drafts=drafts.get("rejected_prediction_tokens") or 0,
        )


DETAILS = {"stream": True, "return_cached_tokens_details": True}


class ServerClient:
    """A session with one server, from `open` to `close`, or as a context."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = base_url(url)
        self._key = api_key
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            read_bufsize=1 << 20,
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def close(self) -> None:
        assert self._session is not None
        await self._session.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def model(self) -> str:
        """The name of the served model."""
        async with self._request("GET", "/v1/models") as response:
            try:
                return str((await response.json(content_type=None))["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise RequestRefusedError(
                    response.status, f"the server at {self.url} is not OpenAI-compatible"
                ) from None

    async def stream(self, path: str, body: Json | None = None) -> AsyncIterator[Json]:
        """The chunks of a streamed response. A reader that stops aborts the request."""
        async with self._request("GET" if body is None else "POST", path, body) as response:
            try:
                async for line in response.content:
                    data = line.decode("utf-8", "replace").removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if data and not data.startswith(":"):  # A comment keeps a stream alive.
                        yield _chunk(data)
            except (aiohttp.ClientError, OSError):
                raise CutError("the connection was lost") from None
            raise CutError("the connection was closed")

    def _request(self, method: str, path: str, body: Json | None = None) -> _CheckedResponse:
        assert self._session is not None
        return _CheckedResponse(self.url, self._session.request(method, self.url + path, json=body))


class _CheckedResponse:
    """A response with status 200; entering it raises a `ServerError` for any other outcome."""

    def __init__(self, url: str, request: Any) -> None:
        self._url = url
        self._request = request

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response: aiohttp.ClientResponse = await self._request.__aenter__()
        except (aiohttp.ClientError, OSError):
            raise AbsentError(self._url) from None
        if response.status != 200:
            try:
                raise await _refusal(response)
            finally:
                response.close()
        return response

    async def __aexit__(self, *raised: object) -> None:
        await self._request.__aexit__(*raised)


def base_url(text: str) -> str:
    """The URL of a server, without the `/v1` that other clients need."""
    url = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CommandError(f"--url {text} is no address; write it like http://127.0.0.1:8000")
    return url


def _chunk(data: str) -> Json:
    try:
        chunk: Json = json.loads(data)
    except ValueError:
        raise CutError(f"'{data[:60]}' is no chunk of a response") from None
    if problem := chunk.get("error"):
        raise CutError(str(problem["message"] if isinstance(problem, dict) else problem))
    return chunk


async def _refusal(response: aiohttp.ClientResponse) -> RequestRefusedError:
    """The error of a response: OpenAI's error object, or the status."""
    if response.status == 401:
        return RequestRefusedError(
            401,
            f"the server needs its API key; pass it with --api-key or in {KEY_VARIABLE}",
        )
    text = await response.text(errors="replace")
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"the server answers with {response.status} {response.reason}"
    if response.status != 429:
        return RequestRefusedError(response.status, message)
    later = response.headers.get("Retry-After", "")
    return RequestRefusedError(429, message, int(later) if later.isdecimal() else RETRY_S)


# -- a server as a child ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """A server as a child process.

    described  its line about model, device and tiers
    stored     its line about the store
    """

    url: str
    described: str
    stored: str
    process: subprocess.Popen[str]


@contextmanager
def serving(arguments: Sequence[str] = (), api_key: str | None = None) -> Iterator[Server]:
    """`kvtide serve` with these arguments, on a free port; ended by SIGTERM on the way out."""
    here = str(Path(kvtide.__file__).resolve().parent.parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if api_key is not None:
        environment[KEY_VARIABLE] = api_key
    with _signals_unwind():
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvtide.cli.main", "serve", "--port", "0", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # So that Ctrl-C stops a response, not the server.
        )
        try:
            yield _listening(process)
        finally:
            _stop(process)


def _listening(process: subprocess.Popen[str]) -> Server:
    """The server, once it accepts requests. A thread reads its log as long as it runs."""
    lines: deque[str] = deque(maxlen=100)
    urls: list[str] = []
    known = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        with process.stderr as stream:
            for line in map(str.strip, stream):
                lines.append(line)
                if line.startswith("listening on ") and not urls:
                    urls.append(line.removeprefix("listening on "))
                    known.set()
        known.set()

    threading.Thread(target=read, name="kvtide-server-log", daemon=True).start()
    known.wait()
    last = [line for line in lines.copy() if line]
    if not urls:
        why = last[-1].removeprefix("kvtide serve: ") if last else "its log is empty"
        raise CommandError(f"the server did not start: {why}")
    described = next((line for line in last if "; ready after " in line), "")
    stored = next((line for line in last if line.startswith("pages are ")), "")
    return Server(urls[0], described, stored, process)


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `SystemExit` where they would end the process: `finally` runs."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    ending = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in ending:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)
