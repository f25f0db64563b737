"""`kvtide chat`: a conversation in the terminal, with cache statistics after every response.

Lines of a terminal or of a pipe are the user's turns. Ctrl-C stops a response; its text so far
stays part of the conversation. The client keeps the conversation: a server that has evicted it
computes it again.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from kvtide.cli.client import (
    DETAILS,
    KEY_VARIABLE,
    Json,
    RequestRefusedError,
    ServerClient,
    ServerError,
    Usage,
    serving,
)
from kvtide.cli.console import CommandError

DEFAULT_URL = "http://127.0.0.1:8000"
PROMPT = "> "
RESET, QUIT = "/reset", "/quit"

REFUSALS = (CommandError,)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"Inside: {RESET} begins a new conversation, {QUIT} or Ctrl-D ends, Ctrl-C stops a "
        "response. Lines of a pipe are turns too."
    )
    parser.allow_abbrev = False
    parser.add_argument("--url", help=f"the server's URL ({DEFAULT_URL})")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"the server's API key; else {KEY_VARIABLE}"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the longest response")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 for greedy decoding")
    parser.add_argument(
        "--session", metavar="NAME", help="pin the conversation in the cache between turns"
    )
    parser.add_argument(
        "--serve", action="store_true", help="start a server for this chat, and end it afterwards"
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="-- …", help="arguments of `kvtide serve`, with --serve"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.serve and args.url is not None:
        raise CommandError("--serve starts a server and --url names one; drop one of them")
    if args.arguments and not args.serve:
        raise CommandError(f"'{args.arguments[0]}' is for a server; add --serve, or drop it")
    key = args.api_key or os.environ.get(KEY_VARIABLE)
    try:
        if not args.serve:
            return _chat(args, args.url or DEFAULT_URL, key)
        _note("starting a server …")
        with serving(args.arguments, key) as server:
            _note(server.stored)
            return _chat(args, server.url, key)
    except KeyboardInterrupt:
        return 130


def _chat(args: argparse.Namespace, url: str, key: str | None) -> int:
    """Chat until the user quits; exit code 1 if a turn of a pipe failed."""
    with asyncio.Runner() as runner:
        client = runner.run(ServerClient(url, key).open())
        try:
            name = runner.run(client.model())
            _note(f"{name} at {client.url}: {RESET} begins anew, {QUIT} ends")
            failed = _Conversation(runner, client, args).run()
        except ServerError as error:
            raise CommandError(str(error)) from None
        finally:
            runner.run(client.close())
    return 1 if failed and not sys.stdin.isatty() else 0


@dataclass(slots=True)
class _Response:
    """A response as far as it has been streamed."""

    text: str = ""
    finish: str | None = None
    usage: Usage | None = None

    def add(self, chunk: Json) -> str:
        """Add a chunk; returns its text."""
        if chunk.get("usage"):
            self.usage = Usage.read(chunk["usage"])
        new = ""
        for choice in chunk.get("choices", ()):
            new += choice["delta"].get("content") or ""
            self.finish = choice.get("finish_reason") or self.finish
        self.text += new
        return new


@dataclass(slots=True)
class _Conversation:
    """The user's conversation. `messages` are those of the next request."""

    runner: asyncio.Runner
    client: ServerClient
    args: argparse.Namespace
    messages: list[Json] = field(default_factory=list)

    def run(self) -> int:
        """Run turns until the user quits; returns how many failed."""
        failed = 0
        self._reset()
        for line in _turns():
            if line == QUIT:
                break
            if line == RESET:
                self._reset()
                _note("a new conversation")
            elif line.startswith("/") and line[1:].isalpha():
                _note(f"there is no {line}; use {RESET} or {QUIT}")
            else:
                failed += not self._turn(line)
        return failed

    def _reset(self) -> None:
        system = self.args.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def _turn(self, line: str) -> bool:
        """Send a turn and print the response. A turn without a response is dropped."""
        messages = [*self.messages, {"role": "user", "content": line}]
        response, problem, stopped = _Response(), None, False
        try:
            self.runner.run(self._stream(messages, response))
        except KeyboardInterrupt:
            stopped = True
        except ServerError as error:
            problem = str(error)
        if response.text or response.finish:
            self.messages = [*messages, {"role": "assistant", "content": response.text}]
        self._close(response, "stopped" if stopped else problem)
        return problem is None

    async def _stream(self, messages: list[Json], response: _Response) -> None:
        """Stream the response; retry an overloaded server after its `Retry-After`."""
        while True:
            try:
                async for chunk in self.client.stream("/v1/chat/completions", self._body(messages)):
                    print(_plain(response.add(chunk)), end="", flush=True)
                return
            except RequestRefusedError as refusal:
                if refusal.retry_s is None:
                    raise
                _note(f"the server is full; trying again in {refusal.retry_s} s")
                await asyncio.sleep(refusal.retry_s)

    def _body(self, messages: list[Json]) -> Json:
        options = {
            "max_tokens": self.args.max_tokens,
            "temperature": self.args.temperature,
            "session_id": self.args.session,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return {"messages": messages, **DETAILS, **given}

    def _close(self, response: _Response, problem: str | None) -> None:
        """The lines after a response: its problem, if any, and its statistics."""
        if response.text:
            print()
        if problem is not None:
            forgotten = f"this turn is forgotten ({RESET} forgets the others too)"
            _note(f"{problem}; {'the text so far is kept' if response.text else forgotten}")
        elif response.finish == "length":
            _note("the response reached its longest; --max-tokens allows longer ones")
        if response.usage is not None:
            _note(_statistics(response.usage))


# -- terminal ---------------------------------------------------------------------------------


def _statistics(usage: Usage) -> str:
    """The prompt's tokens by tier, time to first token, time saved, and tokens per verify step."""
    tiers = ", ".join(f"{tier} {tokens:,}" for tier, tokens in usage.by_tier.items())
    parts = [f"{usage.prompt_tokens:,} prompt tokens: {tiers}, computed {usage.computed_tokens:,}"]
    if usage.first_token_ms is not None:
        parts.append(f"first token after {usage.first_token_ms:,.0f} ms")
    parts.append(f"about {usage.saved_ms:,.0f} ms saved")
    if usage.verify_steps:
        drafts = usage.accepted_drafts + usage.rejected_drafts
        length = 1 + usage.accepted_drafts / usage.verify_steps
        parts.append(
            f"{length:.2f} tokens per verify step, {usage.accepted_drafts:,} of {drafts:,} drafts "
            "accepted"
        )
    return "; ".join(parts)


def _plain(text: str) -> str:
    """Drops control characters: a model's output must not steer the terminal."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def _note(text: str) -> None:
    """Print a line that is no part of the conversation."""
    print(f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else f"[{text}]", flush=True)


def _turns() -> Iterator[str]:
    """The user's lines. Those of a pipe are echoed, as a terminal does."""
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):
            importlib.import_module("readline")  # Its import gives `input` keys for editing.
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    lines = _typed() if typed else iter(sys.stdin)
    for line in filter(None, map(str.strip, lines)):
        if not typed:
            print(f"\n{PROMPT}{line}", flush=True)
        yield line


def _typed() -> Iterator[str]:
    while True:
        try:
            yield input(f"\n{PROMPT}")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            _note(f"{QUIT} or Ctrl-D ends")
