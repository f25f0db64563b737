"""What proposes drafts: the interface that `Speculation` calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.graphs.graph_capture import GraphCapture
from kvtide.engine.request import Request
from kvtide.engine.runner import StepOutput, UnreadTokens
from kvtide.models.draft import DraftModel


class DraftWish(NamedTuple):
    """A request whose next step decodes, and how many drafts it may have: its lease has slots for
    so many."""

    request: Request
    limit: int


class DraftLimits(NamedTuple):
    """requests  that run at a time, at the most
    drafts    of each, at the most
    hidden    a hidden state of the target, (1, …)
    """

    requests: int
    drafts: int
    hidden: Tensor


class UnreadStep(NamedTuple):
    """A verify step, and its sampled tokens on the device."""

    chunks: Sequence[ScheduledChunk]
    output: StepOutput
    sampled: UnreadTokens


class UnreadDrafts(NamedTuple):
    """Drafts on the device, (rows, drafts), and the row of each request."""

    tokens: Tensor
    rows: Mapping[Request, int]


class Drafter(Protocol):
    """Proposes drafts for requests.

    cost      of the pass that drafts a token, in decode steps
    captures  the layers of the target whose inputs it takes, as of `CapturedStates`
    writes    the sidecar pools that `extend` writes
    model     the draft model, where there is one on this rank

    can_draft_ahead  `draft_ahead` may give something
    """

    cost: float
    captures: tuple[int, ...]
    writes: tuple[str, ...]
    model: DraftModel | None

    @property
    def can_draft_ahead(self) -> bool: ...

    def use_graphs(self, capture: GraphCapture, limits: DraftLimits) -> None:
        """Steps run as CUDA graphs: so may passes of the draft."""

    def warm_up(self, longest: int) -> None:
        """Capture what may be needed for sequences of up to `longest` tokens."""

    def extend(
        self, chunks: Sequence[ScheduledChunk], output: StepOutput, wishes: Sequence[DraftWish]
    ) -> None:
        """A step of these chunks has run, and its tokens are sampled and accepted. `propose` with
        the same wishes follows."""

    def captured(self, output: StepOutput, number: int) -> Callable[[], list[Tensor]] | None:
        """What a step's chunk of this number captured of its last token, to be read once the
        device has computed it: for the engine that goes on with the request. None on ranks that
        leave it to another."""

    def resume(self, request: Request) -> None:
        """All of the prompt's state is there, the draft's too, and none of it was computed here."""

    def extend_resumed(self, wishes: Sequence[DraftWish], captured: Sequence[Tensor]) -> None:
        """Extend over the last token of such prompts, with a row of what was captured for each.
        `propose` with the same wishes follows."""

    def draft_ahead(self, step: UnreadStep, wishes: Sequence[DraftWish]) -> UnreadDrafts | None:
        """Draft behind a verify step before the host knows what was accepted; None where that is
        not possible. `extend` follows without wishes, `propose` with the same."""

    def undo_ahead(self, request: Request) -> None:
        """The device drafted behind another token than was sampled: `extend` writes this one's
        state again."""

    @property
    def unread(self) -> UnreadDrafts | None:
        """What `propose` will read, if the device has all drafts of the wishes."""

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        """Up to `limit` drafts for each."""


class TokenDrafter:
    """What a drafter has that needs tokens alone, and keeps nothing in pages."""

    cost = 0.0
    captures: tuple[int, ...] = ()
    writes: tuple[str, ...] = ()
    model: DraftModel | None = None
    unread: UnreadDrafts | None = None
    can_draft_ahead: bool = False

    def use_graphs(self, capture: GraphCapture, limits: DraftLimits) -> None:
        """There are no passes."""

    def warm_up(self, longest: int) -> None:
        """There are no passes."""

    def extend(
        self, chunks: Sequence[ScheduledChunk], output: StepOutput, wishes: Sequence[DraftWish]
    ) -> None:
        """The requests have their tokens."""

    def captured(self, output: StepOutput, number: int) -> Callable[[], list[Tensor]] | None:
        """Drafts depend on tokens alone."""
        return None

    def resume(self, request: Request) -> None:
        """The request has its tokens."""

    def extend_resumed(self, wishes: Sequence[DraftWish], captured: Sequence[Tensor]) -> None:
        """The requests have their tokens."""

    def draft_ahead(self, step: UnreadStep, wishes: Sequence[DraftWish]) -> UnreadDrafts | None:
        """Drafts depend on tokens that the host knows."""
        return None

    def undo_ahead(self, request: Request) -> None:
        """Nothing is drafted behind unread tokens."""
