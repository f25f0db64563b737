"""Two machines in one: network namespaces with a cable between them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.server.forking import ForkedCommand
from tests.server.serving import Child

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Namespace:
    """A machine's network: its name, and its address on the cable."""

    name: str
    address: str

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", "-n", self.name, *words], check=True, capture_output=True)

    def pull_the_cable(self) -> None:
        self.ip("link", "set", "cable", "down")

    def inside(self, call: Callable[[], T]) -> T:
        """The call's result; the sockets that it opens are this machine's."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            with Path(f"/run/netns/{self.name}").open() as place:
                if libc.setns(place.fileno(), _CLONE_NEWNET):
                    errors.append(OSError(ctypes.get_errno(), "setns"))
                    return
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


@contextmanager
def two_namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Skips the test where the machine does not allow them."""
    pair = tuple(
        Namespace(f"kvtide-{os.getpid()}-{number}", f"10.77.0.{number}") for number in (1, 2)
    )
    try:
        for one in pair:
            _create(["ip", "netns", "add", one.name])
        first, second = pair
        ends = ["peer", "name", "cable", "netns", second.name]
        _create(["ip", "link", "add", "cable", "netns", first.name, "type", "veth", *ends])
        for one in pair:
            one.ip("addr", "add", f"{one.address}/24", "dev", "cable")
            one.ip("link", "set", "cable", "up")
            one.ip("link", "set", "lo", "up")
        yield first, second
    finally:
        for one in pair:
            if Path(f"/run/netns/{one.name}").exists():
                subprocess.run(["ip", "netns", "del", one.name], check=True)


def _create(command: Sequence[str]) -> None:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip")
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")


@dataclass
class NodeChild(Child):
    """`kvtide serve` in a namespace."""

    namespace: Namespace | None = None

    def _start(
        self, words: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str] | ForkedCommand:
        assert self.namespace is not None
        code = f"{self.before}\nimport sys\nfrom kvtide.cli.main import main\nsys.exit(main())"
        prefix = ["ip", "netns", "exec", self.namespace.name]
        return subprocess.Popen(
            [*prefix, sys.executable, "-c", code, *words],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
