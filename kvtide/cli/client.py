"""A client of `kvtide serve`, and a server of one's own to talk to: what chat and bench share.

Whatever a server does that was not asked for is a `ServerError`, whose message is a sentence:

    ServerError
    ├── AbsentError     nobody answers there
    ├── RefusedError    the server says no, and why
    └── CutError        an answer ended before its end
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
"""A server that drains, and writes to storage, takes up to half a minute by default."""
RETRY_S = 5
"""How long to wait with the next try if a server that is full does not say."""


class ServerError(Exception):
    """The server did not do as asked. The message is a sentence."""


class AbsentError(ServerError):
    def __init__(self, url: str) -> None:
        super().__init__(
            f"no server answers at {url}; run `kvtide serve` in another terminal, or name another "
            "one with --url"
        )


class RequestRefusedError(ServerError):
    """`retry_s`: when to come again, if the server is only full."""

    def __init__(self, status: int, message: str, retry_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_s = retry_s


class CutError(ServerError):
    def __init__(self, reason: str) -> None:
        super().__init__(f"the server ended the answer early: {reason}")


# -- what is asked and answered ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer took; `by_tier` says where the prompt's tokens came from."""

    prompt_tokens: int
    by_tier: Mapping[str, int]
    first_token_ms: float | None
    saved_ms: float

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - sum(self.by_tier.values())

    @classmethod
    def read(cls, said: Json) -> Usage:
        """From the `usage` of an answer that was asked for with `DETAILS`."""
        timing = said.get("timing") or {}
        return cls(
            prompt_tokens=said["prompt_tokens"],
            by_tier=said.get("cached_tokens_details") or {},
            first_token_ms=timing.get("time_to_first_token_ms"),
            saved_ms=timing.get("saved_ms") or 0.0,
        )


DETAILS = {"stream": True, "return_cached_tokens_details": True}


class ServerClient:
    """Talks to one server, from `open` to `close`, or as long as it is entered."""

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
        """What the model that is served is called."""
        async with self._asked("GET", "/v1/models") as response:
            try:
                return str((await response.json(content_type=None))["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise RequestRefusedError(
                    response.status, f"what answers at {self.url} is no OpenAI-compatible server"
                ) from None

    async def stream(self, path: str, body: Json) -> AsyncIterator[Json]:
        """The chunks of an answer as they come. Whoever stops reading aborts it."""
        async with self._asked("POST", path, body) as response:
            try:
                async for line in response.content:
                    data = line.decode("utf-8", "replace").removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if data:
                        yield _chunk(data)
            except (aiohttp.ClientError, OSError):
                raise CutError("the connection was lost") from None
            raise CutError("the connection was closed")

    def _asked(self, method: str, path: str, body: Json | None = None) -> _Asked:
        assert self._session is not None
        return _Asked(self.url, self._session.request(method, self.url + path, json=body))


class _Asked:
    """A response whose server was there and did not refuse."""

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
    """Where a server is, without the `/v1` that other clients want."""
    url = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CommandError(f"--url {text} is no address; write it like http://127.0.0.1:8000")
    return url


def _chunk(data: str) -> Json:
    try:
        chunk: Json = json.loads(data)
    except ValueError:
        raise CutError(f"'{data[:60]}' is no chunk of an answer") from None
    if problem := chunk.get("error"):
        raise CutError(str(problem["message"] if isinstance(problem, dict) else problem))
    return chunk


async def _refusal(response: aiohttp.ClientResponse) -> RequestRefusedError:
    """What the server says in OpenAI's words, or in any."""
    if response.status == 401:
        return RequestRefusedError(
            401,
            f"the server takes only those who have its API key; pass it with --api-key or in "
            f"{KEY_VARIABLE}",
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


# -- a server of one's own --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """A child process that serves. `described` is what it says of itself, `stored` where its pages
    are stored.
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
            start_new_session=True,  # So that Ctrl-C ends an answer, and not the server.
        )
        try:
            yield _listening(process)
        finally:
            _stop(process)


def _listening(process: subprocess.Popen[str]) -> Server:
    """The server, once it takes requests. What it says is read as long as it lives."""
    lines: deque[str] = deque(maxlen=100)
    said: list[str] = []
    known = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        with process.stderr as stream:
            for line in map(str.strip, stream):
                lines.append(line)
                if line.startswith("listening on ") and not said:
                    said.append(line.removeprefix("listening on "))
                    known.set()
        known.set()

    threading.Thread(target=read, name="kvtide-server-log", daemon=True).start()
    known.wait()
    last = [line for line in lines.copy() if line]
    if not said:
        why = last[-1].removeprefix("kvtide serve: ") if last else "it said nothing"
        raise CommandError(f"the server did not start: {why}")
    described = next((line for line in last if "; ready after " in line), "")
    stored = next((line for line in last if line.startswith("pages are ")), "")
    return Server(said[0], described, stored, process)


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process by way of everybody's `finally`, if they end it."""

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
