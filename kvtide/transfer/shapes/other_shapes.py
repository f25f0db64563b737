"""Pages that ranks of another shape stored, as pages of this rank.

Every rank stores its slice of a page as an object of its own. To a rank of another shape these
objects are *parts*: it reads those that have rows or heads of its own, and copies them to where
they belong on its host (`tiers.pairing`).

    stored with --tp 2    rank 0 │ k0 k1 v0 v1 │   rank 1 │ k2 k3 v2 v3 │     of each entry
    read with --tp 1             │ k0 k1 k2 k3 v0 v1 v2 v3 │

All slices follow from the whole memory. A look-up asks for the first page that is missing, in those
shapes whose mark the store has (`shape_marks`). That page decides, since no prefix can be resumed
without all pages of its histories before.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from kvtide.spec import ALL, ModelMemory, RankShape, SpecError
from kvtide.storage.objects import ObjectFormat, object_formats
from kvtide.tiers.layout import Arrangement, Layout
from kvtide.tiers.manifest import PAGES, RUNNING, Area, MemoryKind, MemoryManifest
from kvtide.tiers.pairing import pair
from kvtide.tiers.row_copies import RowCopy
from kvtide.transfer.shapes.shape_marks import ShapeMarks, StoreCall
from kvtide.transfer.storage_requests import SoughtPage

MAX_RANKS = 16
"""Of a shape whose pages are looked for. Its tensor ranks are a power of two."""

Exists = Callable[[Sequence[bytes]], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class PagePart:
    """What one rank of another shape stored of a page, and which rows here it fills."""

    format: ObjectFormat
    copies: tuple[RowCopy, ...]


class OtherShapes:
    """The shapes in which pages of this rank's model may be stored, but its own.

    `any_tensor_ranks`: with another number of tensor ranks, too. Those compute the same numbers
    but for their last bits; stages compute the same to the last bit.
    """

    def __init__(
        self,
        host: Arrangement,
        space: bytes,
        draft_fingerprint: bytes = b"",
        *,
        any_tensor_ranks: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._memory = host.memory
        self._space = space
        self._draft_fingerprint = draft_fingerprint
        self._any_tensor_ranks = any_tensor_ranks
        required = [anchor for anchor in self._memory.anchors if anchor.reuse.required]
        self._histories = {anchor.name for anchor in required if anchor.reuse.reach is ALL}
        self._parts: dict[RankShape, Mapping[str, Sequence[PagePart]]] = {}
        self._own: dict[RankShape, bool] = {}
        self._marks = ShapeMarks(self._marked, self._marked_others, space, clock)
        self._lock = threading.Lock()

    def parts(self, shape: RankShape, pool: str) -> Sequence[PagePart]:
        """The parts that make up this rank's object of that pool."""
        with self._lock:
            if shape not in self._parts:
                self._parts[shape] = self._paired(shape)
            return self._parts[shape].get(pool, ())

    def missing_marks(self, call: StoreCall) -> Mapping[bytes, memoryview]:
        """Objects by key, to be stored beside pages: they show that there are pages of a shape."""
        return self._marks.missing(call)

    # -- looking up -------------------------------------------------------------------------

    def find(
        self, pages: Sequence[SoughtPage], found: Sequence[bool], call: StoreCall
    ) -> dict[int, RankShape]:
        """Shapes that have all parts of pages which were not found, by the page's number."""
        exists = partial(call, "exists")
        missing = [number for number, there in enumerate(found) if not there]
        shapes: dict[int, RankShape] = {}
        known = self._marks.known(call) if self._decisive(pages, missing) else ()
        untried = {shape: self._first_ranks[shape] for shape in known if not self._is_own(shape)}
        while untried and (decisive := self._decisive(pages, missing)):
            asked = [pages[number] for number in decisive]
            holders = self._holders(asked, untried, exists)
            if not holders:
                break
            shape = min(holders, key=self._preference)
            del untried[shape]
            whole = self._whole_pages(shape, [pages[number] for number in missing], exists)
            there = zip(missing, whole, strict=True)
            shapes |= dict.fromkeys((number for number, has in there if has), shape)
            missing = [number for number in missing if number not in shapes]
        return shapes

    def object_keys(self, pages: Iterable[tuple[bytes, bytes]], exists: Exists) -> list[bytes]:
        """The keys of all parts of these pages that the store has, drafts included.

        A page is its key and the packed tokens of the holdback behind it.
        """
        known = list(pages)
        anchors = [anchor.name for anchor in self._memory.anchors]
        asked = [(*page, anchor) for page in known for anchor in anchors]
        keys: list[bytes] = []
        for shape, first in self._first_ranks.items():
            there = exists([first[anchor].key(key) for key, _, anchor in asked])
            for (key, after, anchor), has in zip(asked, there, strict=True):
                if has:
                    pools = (anchor, *self._memory.optional_sidecars(anchor))
                    parts = (part for pool in pools for part in self.parts(shape, pool))
                    keys += [part.format.key(key, after) for part in parts]
        return keys

    def _decisive(self, pages: Sequence[SoughtPage], missing: Iterable[int]) -> list[int]:
        """The first missing page of each history; all pages in a model without a history. The
        first sidecar decides for all."""
        if not self._histories:
            return list(missing)
        first: dict[str, int] = {}
        for number in missing:
            first.setdefault(pages[number].pool, number)
        return [
            number
            for pool, number in first.items()
            if pool in self._histories or pages[number].sidecar is not None
        ]

    def _holders(
        self,
        pages: Sequence[SoughtPage],
        shapes: Mapping[RankShape, Mapping[str, ObjectFormat]],
        exists: Exists,
    ) -> set[RankShape]:
        """The shapes whose first rank has stored any of these pages."""
        asked = [
            (shape, formats[page.anchor].key(page.key))
            for page in pages
            for shape, formats in shapes.items()
        ]
        there = exists([key for _, key in asked])
        return {shape for (shape, _), has in zip(asked, there, strict=True) if has}

    def _preference(self, shape: RankShape) -> tuple[bool, int]:
        """Pages that are equal to the last bit come first, then those of few parts."""
        return shape.tensor_ranks != self._tensor_ranks, shape.ranks

    def _whole_pages(
        self, shape: RankShape, pages: Sequence[SoughtPage], exists: Exists
    ) -> list[bool]:
        """Of which of these pages the store has all parts."""
        asked = [
            (number, part.format.key(page.key, page.after))
            for number, page in enumerate(pages)
            for part in self.parts(shape, page.pool)
        ]
        whole = [True] * len(pages)
        if asked:
            there = exists([key for _, key in asked])
            for (number, _), has in zip(asked, there, strict=True):
                whole[number] &= has
        return whole

    # -- slices -----------------------------------------------------------------------------

    @property
    def _tensor_ranks(self) -> int:
        return self._memory.part.tensor_ranks if self._memory.part else 1

    def _shapes(self) -> Iterator[RankShape]:
        powers = [1 << n for n in range(MAX_RANKS.bit_length())]
        tensor_ranks = powers if self._any_tensor_ranks else [self._tensor_ranks]
        for ranks in tensor_ranks:
            stages = min(MAX_RANKS // ranks, self._memory.layers)
            yield from (RankShape(count, ranks) for count in range(1, stages + 1))

    @cached_property
    def _first_ranks(self) -> Mapping[RankShape, Mapping[str, ObjectFormat]]:
        """The objects of the first rank of every shape that divides the model."""
        found = {}
        for shape in self._shapes():
            try:
                memory = self._memory.whole.first_rank(shape).at_rest
            except SpecError:  # So many ranks cannot serve this model.
                continue
            if memory.part != self._memory.part:
                found[shape] = self._formats(memory)
        return found

    def _is_own(self, shape: RankShape) -> bool:
        """Whether this rank is one of that shape, whose objects have been looked for already."""
        if shape not in self._own:
            ranks = self._memory.whole.ranks(shape)
            self._own[shape] = any(memory.part == self._memory.part for memory in ranks)
        return self._own[shape]

    @property
    def _marked(self) -> ObjectFormat | None:
        """The objects by which the mark of this shape is known."""
        part, anchor = self._memory.part, self._memory.anchors[0].name
        is_first = part is None or not (part.first_layer or part.tensor_rank)
        return self._formats(self._memory)[anchor] if is_first else None

    def _marked_others(self) -> Mapping[RankShape, ObjectFormat]:
        anchor = self._memory.anchors[0].name
        return {shape: formats[anchor] for shape, formats in self._first_ranks.items()}

    def _formats(self, memory: ModelMemory) -> dict[str, ObjectFormat]:
        return object_formats(memory, self._space, self._draft_fingerprint)

    def _paired(self, shape: RankShape) -> Mapping[str, Sequence[PagePart]]:
        """By pool, the parts from which this rank's rows of it come."""
        slices = [memory.at_rest for memory in self._memory.whole.ranks(shape)]
        formats = [self._formats(memory) for memory in slices]
        sources = [
            self._manifest(memory, _object_areas(memory, of_rank))
            for memory, of_rank in zip(slices, formats, strict=True)
        ]
        here = Area.of(PAGES, self._host, MemoryKind.HOST)
        pairing = pair(sources, [self._manifest(self._memory, [here])])
        parts: dict[str, list[PagePart]] = defaultdict(list)
        for number, of_rank in enumerate(formats):
            copies = pairing.copies(number, 0, PAGES)
            for region, (pool, its_format) in enumerate(of_rank.items()):
                its_copies = tuple(copy for copy in copies if copy.source_region == region)
                if its_copies:
                    parts[pool].append(PagePart(its_format, its_copies))
        return parts

    def _manifest(self, memory: ModelMemory, areas: Sequence[Area]) -> MemoryManifest:
        return MemoryManifest.of(memory, areas, self._space, self._draft_fingerprint)


def _object_areas(memory: ModelMemory, formats: Mapping[str, ObjectFormat]) -> list[Area]:
    """A rank's objects of one page as the regions of a source, each with its payload."""
    slots = {anchor.name: 1 for anchor in memory.anchors}
    page = Arrangement(memory, slots, Layout.PAGE_FIRST_DIRECT)
    areas = []
    for region, (pool, one) in enumerate(formats.items()):
        run = page.run(pool)
        assert run is not None and run.bytes == one.payload_bytes
        base = -run.offset
        areas.append(
            Area.of(RUNNING, page, MemoryKind.HOST, region=region, base=base, pools=one.pools)
        )
    return areas
