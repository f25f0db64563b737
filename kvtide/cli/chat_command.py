"""`kvtide chat`: a conversation in the terminal, and after every answer what the cache did for it.

Lines of a terminal or of a pipe are the user's turns. Ctrl-C ends an answer; what was said of it
stays part of the conversation. The conversation lives here: a server that forgets it costs time,
and nothing else.
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
        f"Inside: {RESET} begins a new conversation, {QUIT} or Ctrl-D ends, Ctrl-C stops an "
        "answer. Lines of a pipe are turns too."
    )
    parser.allow_abbrev = False
    parser.add_argument("--url", help=f"where the server is ({DEFAULT_URL})")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"what the server was given; else {KEY_VARIABLE}"
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told beforehand")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the longest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 for the likeliest words")
    parser.add_argument(
        "--session", metavar="NAME", help="keep the conversation in the cache between turns"
    )
    parser.add_argument(
        "--serve", action="store_true", help="start a server for this chat, and end it afterwards"
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="-- …", help="what `kvtide serve` is told, with --serve"
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
    """Talk until the user has enough; 1 if a turn failed that nobody was there to repeat."""
    with asyncio.Runner() as runner:
        client = runner.run(ServerClient(url, key).open())
        try:
            name = runner.run(client.model())
            _note(f"{name} at {client.url}: {RESET} begins anew, {QUIT} ends")
            failed = _Talk(runner, client, args).go()
        except ServerError as error:
            raise CommandError(str(error)) from None
        finally:
            runner.run(client.close())
    return 1 if failed and not sys.stdin.isatty() else 0


@dataclass(slots=True)
class _Answer:
    """What has come of an answer so far."""

    text: str = ""
    finish: str | None = None
    usage: Usage | None = None

    def add(self, chunk: Json) -> str:
        """The text that this chunk brings."""
        if chunk.get("usage"):
            self.usage = Usage.read(chunk["usage"])
        new = ""
        for choice in chunk.get("choices", ()):
            new += choice["delta"].get("content") or ""
            self.finish = choice.get("finish_reason") or self.finish
        self.text += new
        return new


@dataclass(slots=True)
class _Talk:
    """One user's conversations. `messages` is the present one, as the server is sent it."""

    runner: asyncio.Runner
    client: ServerClient
    args: argparse.Namespace
    messages: list[Json] = field(default_factory=list)

    def go(self) -> int:
        """Turn by turn until the user leaves. Returns how many turns failed."""
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
        told = self.args.system
        self.messages = [{"role": "system", "content": told}] if told else []

    def _turn(self, line: str) -> bool:
        """Ask, and show the answer as it comes. A turn without any answer did not happen."""
        asked = [*self.messages, {"role": "user", "content": line}]
        answer, problem, stopped = _Answer(), None, False
        try:
            self.runner.run(self._stream(asked, answer))
        except KeyboardInterrupt:
            stopped = True
        except ServerError as error:
            problem = str(error)
        if answer.text or answer.finish:
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        self._close(answer, "stopped" if stopped else problem)
        return problem is None

    async def _stream(self, messages: list[Json], answer: _Answer) -> None:
        """Fill the answer in. A server that is full is asked again when it said."""
        while True:
            try:
                async for chunk in self.client.stream("/v1/chat/completions", self._body(messages)):
                    print(_plain(answer.add(chunk)), end="", flush=True)
                return
            except RequestRefusedError as refusal:
                if refusal.retry_s is None:
                    raise
                _note(f"the server is full; trying again in {refusal.retry_s} s")
                await asyncio.sleep(refusal.retry_s)

    def _body(self, messages: list[Json]) -> Json:
        chosen = {
            "max_tokens": self.args.max_tokens,
            "temperature": self.args.temperature,
            "session_id": self.args.session,
        }
        said = {name: value for name, value in chosen.items() if value is not None}
        return {"messages": messages, **DETAILS, **said}

    def _close(self, answer: _Answer, problem: str | None) -> None:
        """The lines after an answer: what was not as it should be, and what it took."""
        if answer.text:
            print()
        if problem is not None:
            forgotten = f"this turn is forgotten ({RESET} forgets the others too)"
            _note(f"{problem}; {'what was said is kept' if answer.text else forgotten}")
        elif answer.finish == "length":
            _note("the answer was cut at its longest; --max-tokens allows longer ones")
        if answer.usage is not None:
            _note(_took(answer.usage))


# -- words ------------------------------------------------------------------------------------


def _took(usage: Usage) -> str:
    """Where the prompt came from, and what that was worth."""
    tiers = ", ".join(f"{tier} {tokens:,}" for tier, tokens in usage.by_tier.items())
    parts = [f"{usage.prompt_tokens:,} prompt tokens: {tiers}, computed {usage.computed_tokens:,}"]
    if usage.first_token_ms is not None:
        parts.append(f"first token after {usage.first_token_ms:,.0f} ms")
    parts.append(f"about {usage.saved_ms:,.0f} ms saved")
    return "; ".join(parts)


def _plain(text: str) -> str:
    """A model may say anything, but it does not steer the terminal."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def _note(text: str) -> None:
    """What is said beside the conversation."""
    print(f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else f"[{text}]", flush=True)


def _turns() -> Iterator[str]:
    """What the user says, line by line. From a pipe it is shown, as a terminal shows it."""
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
