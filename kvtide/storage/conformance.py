"""Does a store keep the rules? Checks for any store, yours too, without a test framework.

    from kvtide.storage import conformance, open_store

    found = conformance.violations(lambda space: open_store("file:///tmp/pages", space))
    assert not found, "\\n".join(found)

or `kvtide storage check file:///tmp/pages`. Every check opens the store for spaces of its own,
named at random, so that it never meets other objects, and these spaces are cleared after it. A
check yields a sentence for everything that it finds wrong. All of them together need 64 MB.

A store whose objects are gone when it is closed, as those of `memory:` are, says so with an
attribute `forgets = True`. Checks that open a store anew are then left out.
"""

from __future__ import annotations

import mmap
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

from kvtide.storage.store import KEY_BYTES, MISSING, Removed, Store
from kvtide.storage.trial import (
    PAGE,
    Objects,
    content_of,
    differences,
    find_all,
    in_memory,
    kinds,
    memories,
    new_keys,
    new_objects,
    new_space,
    together,
    write_all,
)

OpenSpace = Callable[[bytes], Store]
StoreCheck = Callable[[OpenSpace], Iterator[str]]

MIB = 1 << 20
SIZES = (1, 100, 4096, 70_001, MIB, 8 * MIB)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a check. `left_out`: the reason why it was skipped."""

    check: str
    violations: tuple[str, ...] = ()
    left_out: str = ""
    seconds: float = 0.0


class LeftOutError(Exception):
    """A check that has no meaning for a store; the message names the reason."""


def violations(open_space: OpenSpace) -> list[str]:
    """Everything that is wrong with a store, in sentences that begin with the check's name."""
    results = (run_check(check, open_space) for check in CHECKS)
    return [f"{result.check}: {text}" for result in results for text in result.violations]


def name_of(check: StoreCheck) -> str:
    return check.__name__.replace("_", " ")


def run_check(check: StoreCheck, open_space: OpenSpace) -> Result:
    spaces: set[bytes] = set()

    def remember_space(space: bytes) -> Store:
        spaces.add(space)
        return open_space(space)

    start, left_out = time.monotonic(), ""
    found: list[str] = []
    try:
        found += check(remember_space)
    except LeftOutError as reason:
        left_out = str(reason)
    except Exception as error:  # The store is a stranger's: whatever it raises is the finding.
        found.append(f"raised {type(error).__name__}: {error}")
    finally:
        found += _clean(open_space, spaces)
    return Result(name_of(check), tuple(found), left_out, time.monotonic() - start)


def _clean(open_space: OpenSpace, spaces: Iterable[bytes]) -> Iterator[str]:
    for space in spaces:
        try:
            with closing(open_space(space)) as store:
                store.clear()
        except Exception as error:  # As above.
            yield f"clearing up afterwards raised {type(error).__name__}: {error}"


# -- checks: one store ----------------------------------------------------------------------


def an_empty_store_has_nothing(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        keys = new_keys(5)
        if not isinstance(store.name, str) or not store.name:
            yield f"its name is {store.name!r}, which is not readable in a log"
        if (answer := store.exists(keys)) != [False] * 5:
            yield f"exists returns {answer} of five keys that were never written"
        if (lengths := store.read(keys, memories([64] * 5))) != [MISSING] * 5:
            yield f"read returns {lengths} of five keys that were never written, not MISSING"
        if (count := store.remove(keys)) != 0:
            yield f"remove returns {count} for five keys that were never written"
        if (removed := store.clear()).objects != 0:
            yield f"clear reports that it removed {removed.objects} objects where there were none"


def what_is_written_is_there_at_once(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        for _ in range(20):
            objects = new_objects([1000] * 3)
            yield from write_all(store, objects)
            yield from find_all(store, objects)


def objects_of_any_size_come_back(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        objects = new_objects(SIZES)
        yield from write_all(store, objects)
        yield from find_all(store, objects)
        for key, content in objects.items():  # Alone, too: batches may hide a wrong order.
            yield from find_all(store, {key: content})


def large_batches_come_back(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        objects = new_objects([100 + 7 * n for n in range(700)])
        yield from write_all(store, objects)
        yield from find_all(store, objects)
        backwards = dict(reversed(objects.items()))
        yield from find_all(store, backwards)


def empty_batches_do_nothing(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        answers = (store.exists([]), store.read([], []), store.write([], []), store.remove([]))
        if answers != ([], [], [], 0):
            yield f"exists, read, write and remove answer {answers} to empty batches"


def present_and_missing_are_distinguished(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        objects = new_objects([500] * 60)
        written = {key: content for n, (key, content) in enumerate(objects.items()) if n % 3}
        yield from write_all(store, written)
        expected = [key in written for key in objects]
        if (answer := store.exists(list(objects))) != expected:
            yield f"exists is wrong for {differences(answer, expected)} of {len(objects)} keys"
        targets = memories([500] * len(objects))
        lengths = store.read(list(objects), targets)
        if (expected_lengths := [500 if there else MISSING for there in expected]) != lengths:
            yield f"read is wrong for {differences(lengths, expected_lengths)} of {len(objects)}"
        yield from find_all(store, written)


def answers_are_plain_lists(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        objects = new_objects([100] * 3)
        keys = list(objects)
        yield from kinds("write", store.write(keys, in_memory(objects)), bool, 3)
        yield from kinds("exists", store.exists(keys), bool, 3)
        yield from kinds("read", store.read(keys, memories([100] * 3)), int, 3)
        if type(count := store.remove(keys)) is not int:
            yield f"remove answers {count!r}, which is not an int"
        if not isinstance(removed := store.clear(), Removed):
            yield f"clear answers {removed!r}, which is not Removed"


def what_was_there_stays(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        objects = new_objects([3000] * 4)
        yield from write_all(store, objects)
        others = dict(zip(objects, new_objects([3000, 2000, 3000, 5000]).values(), strict=True))
        if (answer := store.write(list(others), in_memory(others))) != [True] * 4:
            yield f"write returns {answer} of objects that were there, not True"
        yield from find_all(store, objects)


def keys_may_repeat_in_a_batch(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        objects = new_objects([900] * 2)
        (one, two), placed = objects, in_memory(objects)
        keys, sources = [one, two, one], [*placed, placed[0]]
        if (answer := store.write(keys, sources)) != [True] * 3:
            yield f"write returns {answer} of a batch with a key twice, not True"
        targets = memories([900] * 3)
        if (lengths := store.read(keys, targets)) != [900] * 3:
            yield f"read returns {lengths} of a batch with a key twice"
        elif any(bytes(t) != objects[key] for key, t in zip(keys, targets, strict=True)):
            yield "read mixes up objects in a batch with a key twice"


def longer_targets_are_fine(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        objects = new_objects([1, 100, 4096, 70_001])
        yield from write_all(store, objects)
        for extra in (1, 511, 5000, MIB):
            yield from find_all(store, objects, extra)


def shorter_targets_are_misses(open_space: OpenSpace) -> Iterator[str]:
    """And fail no others of their batch, nor touch the memory behind them."""
    with closing(open_space(new_space())) as store:
        objects = new_objects([5000, 5000, 300_000, 300_000, 5000])
        yield from write_all(store, objects)
        capacities = [5000, 4999, 300_000, 4096, 5000]
        whole = memories([300_000] * 5)
        for memory in whole:
            memory[:] = b"\xa5" * len(memory)
        targets = [memory[:size] for memory, size in zip(whole, capacities, strict=True)]
        lengths = store.read(list(objects), targets)
        if lengths != [5000, MISSING, 300_000, MISSING, 5000]:
            yield f"read returns {lengths}; the second and fourth target are too short, so MISSING"
        for n, (content, target) in enumerate(zip(objects.values(), targets, strict=True)):
            if n not in (1, 3) and target != content:
                yield f"object {n} is wrong, in a batch where others are too long for their target"
        for n, (memory, size) in enumerate(zip(whole, capacities, strict=True)):
            if memory[size:] != b"\xa5" * (len(memory) - size):
                yield f"the memory behind target {n} was written to"
        yield from find_all(store, objects)


def memory_need_not_be_aligned(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        for shift in (1, 16, 512, PAGE - 1):
            objects = new_objects([4096, 70_001, 2 * MIB])
            yield from write_all(store, objects, shift)
            yield from find_all(store, objects, 0, shift)


def lent_memory_works(open_space: OpenSpace) -> Iterator[str]:
    """And other memory beside it."""
    block = memoryview(mmap.mmap(-1, 4 * MIB))
    with closing(open_space(new_space())) as store:
        store.lend(block)
        objects = new_objects([4096, 70_001, MIB])
        offsets = (0, 100 * PAGE, MIB + 7)
        places = [block[o : o + len(c)] for o, c in zip(offsets, objects.values(), strict=True)]
        for place, content in zip(places, objects.values(), strict=True):
            place[:] = content
        if (answer := store.write(list(objects), places)) != [True] * 3:
            yield f"write returns {answer} of objects in lent memory"
        yield from find_all(store, objects)
        block[:] = bytes(len(block))
        lengths = store.read(list(objects), places)
        if lengths != [len(content) for content in objects.values()]:
            yield f"read returns {lengths} of objects in lent memory"
        elif any(p != c for p, c in zip(places, objects.values(), strict=True)):
            yield "objects read into lent memory are wrong"


def memory_is_the_callers_again(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        objects = new_objects([100, 4096, 70_001, 2 * MIB])
        sources = in_memory(objects)
        store.write(list(objects), sources)
        for source in sources:
            source[:] = bytes(len(source))
        yield from find_all(store, objects)
        targets = memories([len(content) for content in objects.values()])
        store.read(list(objects), targets)
        for target in targets:
            target[:] = bytes(len(target))
        time.sleep(0.05)
        if any(any(target) for target in targets):
            yield "memory was written to after read had returned"


def keys_may_hold_any_byte(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        keys = [bytes([value]) * KEY_BYTES for value in range(256)]
        keys += [b"\r\n" * 16, b"../" * 10 + b"..", b"%2F*?[]{}" + bytes(23), b"\0" * 31 + b" "]
        objects = {key: content_of(key, 50) for key in keys}
        yield from write_all(store, objects)
        yield from find_all(store, objects)


def removed_objects_are_gone(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        objects = new_objects([800, 70_001] * 20)
        keys = list(objects)
        yield from write_all(store, objects)
        gone = keys[::2]
        if (count := store.remove([*gone, *new_keys(3)])) != len(gone):
            yield f"remove returns {count}; of the keys it was given {len(gone)} were there"
        if (answer := store.exists(gone)) != [False] * len(gone):
            yield f"{sum(answer)} of {len(gone)} removed objects still exist"
        lengths = store.read(gone, memories([70_001] * len(gone)))
        if lengths != [MISSING] * len(gone):
            yield "removed objects can still be read"
        yield from find_all(store, {key: objects[key] for key in keys[1::2]})
        yield from write_all(store, {key: objects[key] for key in gone})
        yield from find_all(store, objects)


def status_counts_what_is_there(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        objects = new_objects([1000, 70_001, 5000])
        yield from write_all(store, objects)
        status, min_bytes = store.status(), sum(map(len, objects.values()))
        own_bytes, all_bytes = status.bytes, status.all_bytes
        if status.objects not in (None, 3):
            yield f"status counts {status.objects} objects; there are 3"
        if own_bytes is not None and own_bytes < min_bytes:
            yield f"status counts {own_bytes:,} B; what was written has {min_bytes:,} B"
        if own_bytes is not None and all_bytes is not None and all_bytes < own_bytes:
            yield f"all spaces have {all_bytes:,} B, but this one has {own_bytes:,} B"
        if not all(isinstance(note, str) for note in status.notes):
            yield f"status notes {status.notes!r}, which are not sentences"


def closing_twice_is_fine(open_space: OpenSpace) -> Iterator[str]:
    store = open_space(new_space())
    yield from write_all(store, new_objects([100]))
    store.close()
    store.close()


def calls_in_any_order_agree_with_a_dictionary(open_space: OpenSpace) -> Iterator[str]:
    seed = secrets.randbits(32)
    chance, model = random.Random(seed), dict[bytes, bytes]()
    keys = new_keys(40)
    with closing(open_space(new_space())) as store:
        for step in range(60):
            some = chance.sample(keys, chance.randint(1, 20))
            verb = chance.choice(("write", "write", "read", "exists", "remove"))
            if not _do(store, verb, some, model):
                yield f"{verb} of {len(some)} keys, in step {step} with seed {seed}"
                return


def _do(store: Store, verb: str, keys: list[bytes], model: dict[bytes, bytes]) -> bool:
    """Do the same to the store and to a dictionary; whether they agree."""
    if verb == "write":
        new = {key: content_of(key, 1 + key[0] * 37) for key in keys}
        model.update(new)
        return store.write(keys, in_memory(new)) == [True] * len(keys)
    if verb == "exists":
        return store.exists(keys) == [key in model for key in keys]
    if verb == "remove":
        there = [model.pop(key, None) for key in keys]
        return store.remove(keys) == len(there) - there.count(None)
    targets = memories([10_000] * len(keys))
    lengths = store.read(keys, targets)
    found = [bytes(t[:n]) if n != MISSING else None for t, n in zip(targets, lengths, strict=True)]
    return found == [model.get(key) for key in keys]


# -- checks: several spaces, several openings, several threads ------------------------------


def spaces_never_meet(open_space: OpenSpace) -> Iterator[str]:
    first, second = new_space(), new_space()
    spaces = [first, second, first[:-1] + bytes([first[-1] ^ 1]), bytes([first[0] ^ 1]) + first[1:]]
    keys = new_keys(3)
    stores: list[Store] = []
    try:
        for number, space in enumerate(spaces):
            stores.append(store := open_space(space))
            if any(store.exists(keys)):
                yield f"space {number} has objects that were written to another"
            if store.read(keys, memories([5000] * 3)) != [MISSING] * 3:
                yield f"space {number} reads objects that were written to another"
            yield from write_all(store, {key: content_of(space + key, 2000) for key in keys})
        for space, store in zip(spaces, stores, strict=True):
            yield from find_all(store, {key: content_of(space + key, 2000) for key in keys})
        stores[0].remove(keys)
        for space, store in zip(spaces[1:], stores[1:], strict=True):
            yield from find_all(store, {key: content_of(space + key, 2000) for key in keys})
    finally:
        for store in stores:
            store.close()


def clear_empties_its_space_alone(open_space: OpenSpace) -> Iterator[str]:
    ours, theirs = new_objects([2000] * 250), new_objects([2000] * 5)
    with closing(open_space(new_space())) as store, closing(open_space(new_space())) as other:
        yield from write_all(store, ours)
        yield from write_all(other, theirs)
        removed = store.clear()
        if removed.objects != len(ours):
            yield f"clear reports that it removed {removed.objects} objects; there were {len(ours)}"
        if removed.bytes is not None and removed.bytes < 2000 * len(ours):
            yield f"clear reports that it removed {removed.bytes:,} B of {2000 * len(ours):,}"
        if any(store.exists(list(ours))):
            yield "objects exist after clear"
        yield from find_all(other, theirs)
        yield from write_all(store, ours)
        yield from find_all(store, ours)


def what_was_acknowledged_is_found_again(open_space: OpenSpace) -> Iterator[str]:
    """A reader that opens the store anew finds them, while the writer has it open and after."""
    space = new_space()
    objects = new_objects([*SIZES, *[300] * 200])
    with closing(open_space(space)) as store:
        if getattr(store, "forgets", False):
            raise LeftOutError("its objects are gone when it is closed, as it declares")
        yield from write_all(store, objects)
        with closing(open_space(space)) as other:
            yield from find_all(other, objects)
        gone = list(objects)[-5:]
        store.remove(gone)
    kept = {key: content for key, content in objects.items() if key not in gone}
    for _ in range(2):
        with closing(open_space(space)) as store:
            yield from find_all(store, kept)
            if any(store.exists(gone)):
                yield "removed objects are back when the store is opened anew"


def threads_do_not_disturb_each_other(open_space: OpenSpace) -> Iterator[str]:
    with closing(open_space(new_space())) as store:
        known = new_objects([3000] * 40)
        yield from write_all(store, known)

        def write_and_read(_: int) -> list[str]:
            own = new_objects([100, 5000, 70_001] * 5)
            return [*write_all(store, own), *find_all(store, own), *_remove_all(store, own)]

        def read_known(_: int) -> list[str]:
            return [text for _ in range(5) for text in find_all(store, known)]

        yield from dict.fromkeys(together([write_and_read, read_known] * 4))


def _remove_all(store: Store, objects: Objects) -> Iterator[str]:
    if (count := store.remove(list(objects))) != len(objects):
        yield f"remove returns {count} of {len(objects)} objects, with other threads at work"


def nothing_is_seen_before_it_is_whole(open_space: OpenSpace) -> Iterator[str]:
    """Readers look for large objects while they are written, and read what exists at once."""
    with closing(open_space(new_space())) as store:
        objects = new_objects([4 * MIB] * 3)
        written = threading.Event()

        def write(_: int) -> list[str]:
            try:
                return [t for k, c in objects.items() for t in write_all(store, {k: c})]
            finally:
                written.set()

        def watch(_: int) -> list[str]:
            found: list[str] = []
            waiting = dict(objects)
            while waiting:
                last_look = written.is_set()
                seen = store.exists(list(waiting))
                new = {k: waiting[k] for k, there in zip(list(waiting), seen, strict=True) if there}
                found += find_all(store, new)
                waiting = {key: content for key, content in waiting.items() if key not in new}
                if last_look:
                    break
            return found

        yield from dict.fromkeys(together([write, watch, watch]))


CHECKS: tuple[StoreCheck, ...] = (
    an_empty_store_has_nothing,
    empty_batches_do_nothing,
    answers_are_plain_lists,
    what_is_written_is_there_at_once,
    objects_of_any_size_come_back,
    large_batches_come_back,
    present_and_missing_are_distinguished,
    what_was_there_stays,
    keys_may_repeat_in_a_batch,
    keys_may_hold_any_byte,
    longer_targets_are_fine,
    shorter_targets_are_misses,
    memory_need_not_be_aligned,
    lent_memory_works,
    memory_is_the_callers_again,
    removed_objects_are_gone,
    status_counts_what_is_there,
    closing_twice_is_fine,
    calls_in_any_order_agree_with_a_dictionary,
    spaces_never_meet,
    clear_empties_its_space_alone,
    what_was_acknowledged_is_found_again,
    threads_do_not_disturb_each_other,
    nothing_is_seen_before_it_is_whole,
)
