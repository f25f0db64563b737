"""Kill processes that use a folder, at any moment, and see that nothing acknowledged is lost.

    python -m tests.storage.kill_loop --kills 200

Every round starts one or two processes on a folder and kills one with SIGKILL: while it opens the
folder (and merges journals), while it writes, while it evicts, while it renews its journal. They
tell through a pipe what was acknowledged. Then the folder is opened again, and by now every
object that was acknowledged and not removed has to be there, and every object that is there has
to be whole. An object's bytes follow from its key, so any other byte is found.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtide.storage import open_store
from kvtide.storage.file import file_store as file_store
from kvtide.storage.store import MISSING, Store

SPACES = [bytes([number]) * 32 for number in (1, 2)]
LARGE_CAP, SMALL_CAP = 1 << 30, 3 << 20
ROUNDS_PER_FOLDER = 8
MAX_OBJECTS = 400


def content(key: bytes) -> bytes:
    words = np.frombuffer(key, np.uint32)
    length = int(words[0]) % 40_000
    return np.random.Generator(np.random.PCG64(words.tolist())).bytes(length)


def open_folder(folder: Path, cap: int, number: int) -> Store:
    return open_store(f"file://{folder}?cap={cap}&floor=0&threads=3&segment=1MiB", SPACES[number])


# ── the process that is killed ────────────────────────────────────────────────────────────────


def use(folder: Path, cap: int, number: int, seed: int, say: int) -> None:
    """Write, read and remove until killed. Says `+` what was acknowledged, `-` what it is about to
    remove, `!` what it read wrongly."""
    # So short that all of it happens all the time.
    file_store.SYNC_EVERY_S = file_store.LOG_USES_EVERY_S = 0.01
    file_store.LONGEST_JOURNAL_BYTES = 8 << 10
    file_store.RECORDS_PER_OBJECT = 0
    dice = random.Random(seed)
    store = open_folder(folder, cap, number)
    os.write(say, b"= open\n")
    mine: list[bytes] = []
    for _ in range(MAX_OBJECTS):
        keys = [dice.randbytes(32) for _ in range(dice.randint(1, 6))]
        done = store.write(keys, [memoryview(content(key)) for key in keys])
        new = [key for key, is_there in zip(keys, done, strict=True) if is_there]
        tell(say, "+", new)
        mine += new
        some = dice.sample(mine, min(3, len(mine)))
        tell(say, "!", [key for key, good in check(store, some).items() if good is False])
        if dice.random() < 0.2:
            gone = [mine.pop(dice.randrange(len(mine))) for _ in range(min(2, len(mine)))]
            tell(say, "-", gone)
            store.remove(gone)
    os.write(say, b"= done\n")
    signal.pause()


def tell(say: int, what: str, keys: list[bytes]) -> None:
    if keys:
        os.write(say, "".join(f"{what} {key.hex()}\n" for key in keys).encode())


def check(store: Store, keys: list[bytes]) -> dict[bytes, bool | None]:
    """For each key: True if it is there and right, False if wrong, None if it is not there."""
    targets = [memoryview(bytearray(40_000)) for _ in keys]
    lengths = store.read(keys, targets)
    return {
        key: None if length == MISSING else bytes(target[:length]) == content(key)
        for key, target, length in zip(keys, targets, lengths, strict=True)
    }


# ── the one that kills ────────────────────────────────────────────────────────────────────────


class Child:
    def __init__(self, folder: Path, cap: int, number: int, seed: int) -> None:
        self.number = number
        self._hear, say = os.pipe()
        self._heard = b""
        self._pid = os.fork()
        if not self._pid:
            os.close(self._hear)
            try:
                use(folder, cap, number, seed, say)
            except BaseException as error:
                os.write(say, f"! {error!r}\n".encode())
            os._exit(1)
        os.close(say)

    def wait_until_open(self) -> None:
        while b"= open" not in self._heard and (heard := os.read(self._hear, 1 << 16)):
            self._heard += heard

    def kill(self) -> list[tuple[str, str]]:
        """End it, and what it wrote."""
        os.kill(self._pid, signal.SIGKILL)
        while heard := os.read(self._hear, 1 << 16):
            self._heard += heard
        os.close(self._hear)
        os.waitpid(self._pid, 0)
        # The last line may have been cut off by the kill.
        lines = self._heard.decode().splitlines(keepends=True)
        return [(line[0], line[2:-1]) for line in lines if line.endswith("\n")]


@dataclass
class Loop:
    dice: random.Random
    kills: int = 0
    acknowledged: int = 0
    violations: list[str] = field(default_factory=list)
    kept: list[set[bytes]] = field(default_factory=lambda: [set(), set()])
    gone: list[set[bytes]] = field(default_factory=lambda: [set(), set()])

    def folder(self, kills: int, deadline: float) -> None:
        """Some rounds on one folder."""
        self.kept, self.gone = [set(), set()], [set(), set()]
        cap = self.dice.choice([LARGE_CAP, LARGE_CAP, SMALL_CAP])
        folder = Path(tempfile.mkdtemp(prefix="kill-loop-"))
        try:
            for _ in range(ROUNDS_PER_FOLDER):
                if self.kills < kills and time.monotonic() < deadline:
                    self.round(folder, cap)
        finally:
            shutil.rmtree(folder)

    def round(self, folder: Path, cap: int) -> None:
        seeds = [self.dice.getrandbits(32) for _ in range(2)]
        first = Child(folder, cap, 0, seeds[0])
        second = Child(folder, cap, self.dice.randint(0, 1), seeds[1]) if seeds[1] % 2 else None
        if self.dice.random() < 0.3:
            time.sleep(self.dice.uniform(0, 0.02))  # Most likely it is still opening the folder.
        else:
            first.wait_until_open()
            time.sleep(self.dice.uniform(0, 0.25))
        self.hear(first)
        if second:
            self.verify(folder, cap, 0, other=second.number)
            self.hear(second)
        for number in (0, 1):
            self.verify(folder, cap, number)

    def hear(self, child: Child) -> None:
        self.kills += 1
        for what, text in child.kill():
            if what == "!":
                self.violations.append(f"a process reports: {text}")
            elif what == "+":
                self.kept[child.number].add(bytes.fromhex(text))
                self.acknowledged += 1
            elif what == "-":
                self.kept[child.number].discard(bytes.fromhex(text))
                self.gone[child.number].add(bytes.fromhex(text))

    def verify(self, folder: Path, cap: int, number: int, other: int | None = None) -> None:
        """Open the folder and look at everything. `other`: a process that still writes there."""
        store = open_folder(folder, cap, number)
        try:
            kept = list(self.kept[number])
            for start in range(0, len(kept), 256):
                for key, good in check(store, kept[start : start + 256]).items():
                    if good is False:
                        self.violations.append(f"{key.hex()} has other bytes than were written")
                    elif good is None and cap == LARGE_CAP:
                        self.violations.append(f"{key.hex()} was acknowledged and is lost")
            for key, good in check(store, list(self.gone[number])).items():
                if good is False:
                    self.violations.append(f"{key.hex()} was removed and has other bytes")
            self.look(store, cap, other)
        finally:
            store.close()

    def look(self, store: Store, cap: int, other: int | None) -> None:
        status = store.status()
        lost = [note for note in status.notes if "lost" in note or "damaged" in note]
        if lost:
            self.violations.append(f"notes: {lost}")
        if other is None and status.all_bytes is not None and status.all_bytes > cap:
            self.violations.append(f"{status.all_bytes} bytes are more than the cap of {cap}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=random.getrandbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    loop = Loop(random.Random(options.seed))
    deadline = time.monotonic() + options.seconds
    while loop.kills < options.kills and time.monotonic() < deadline:
        loop.folder(options.kills, deadline)
    for violation in loop.violations[:20]:
        print(violation)
    print(
        f"{loop.kills} kills, {loop.acknowledged} objects acknowledged, "
        f"{len(loop.violations)} violations"
    )
    return 1 if loop.violations or not loop.acknowledged else 0


if __name__ == "__main__":
    sys.exit(main())
