"""What tests of transfers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.transfer.stores import Desk


@pytest.fixture
def desks() -> Iterator[Callable[..., Desk]]:
    """Makes desks, and closes them after the test: whatever happened, their workers end."""
    made: list[Desk] = []

    def make(*arguments, **options) -> Desk:
        made.append(Desk(*arguments, **options))
        return made[-1]

    yield make
    for desk in made:
        desk.close()
