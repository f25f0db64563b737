"""Output text as it streams, up to the first stop string (`models.tokenizer` detokenizes).

The client never sees a stop string, nor the start of one that completes later: text that might
become one is held back until the next token decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.models.tokenizer import Detokenizer


class OutputText:
    """`stopped` is the stop string that ended the text."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        assert all(stops), "an empty stop string would end every answer before it began"
        self.stopped: str | None = None
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, token: int) -> str:
        """One more token; returns the text that is certain now."""
        return self._certain(self._detokenizer.feed([token]))

    def finish(self) -> str:
        """No more tokens come: returns what was held back."""
        text = self._certain(self._detokenizer.finish())
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _certain(self, more: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + more
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, self.stopped = min(found)
        else:
            end = len(text) - self._beginning(text)
        self._held = "" if self.stopped else text[end:]
        return text[:end]

    def _beginning(self, text: str) -> int:
        """Length of the longest suffix that a stop string begins with."""
        longest = min(len(text), max((len(stop) for stop in self._stops), default=0))
        for count in range(longest, 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0
