"""What the tests prove of each family: the table in docs/FAMILIES.md.

A test declares what it proves with the fixture `proves`; the outcomes make the table. A whole run,
quick or `--all`, compares it with the table in the docs, and `pytest --write-families` writes it
there. A run of some tests has no complete table and does neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.grids import LEFT_OUT

PAGE = Path(__file__).resolve().parent.parent / "docs" / "FAMILIES.md"
BEGIN, END = "<!-- made by the tests -->", "<!-- end -->"
ASPECTS = {
    "logits": "logits as `transformers`",
    "host": "host restore",
    "storage": "storage restore",
    "tp": "tensor ranks",
    "pp": "stages",
}
_PROPERTY = "proves"
_SELECTING = (
    "keyword", "markexpr", "collectonly", "lf", "deselect", "ignore", "ignore_glob", "maxfail",
    "stepwise",
)  # fmt: skip
"""Options that select tests."""

Proves = Callable[[str, str], None]


@pytest.fixture
def proves(request: pytest.FixtureRequest) -> Proves:
    """`proves(config, aspect)`: this test is evidence for the family of a tiny config."""

    def declare(name: str, aspect: str) -> None:
        assert aspect in ASPECTS, f"{aspect} is not a column of the table"
        request.node.user_properties.append((_PROPERTY, (name, aspect)))

    return declare


class Proofs:
    """The outcomes of this run's tests, by family and aspect."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.outcomes: dict[object, list[bool]] = defaultdict(list)
        self.write: bool = config.getoption("--write-families")
        # With several processes, this one receives all reports and does not select.
        selects = any(getattr(config.option, name, None) for name in _SELECTING)
        self.whole = config.args == config.getini("testpaths") and not selects
        self.problem = ""

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """The quick selection keeps a proof of every cell of the table."""
        left_out = self.config.stash.get(LEFT_OUT, set())
        self.whole &= all(item.nodeid in left_out for item in items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for _, proof in (p for p in report.user_properties if p[0] == _PROPERTY):
                self.outcomes[tuple(proof)].append(report.passed)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.write and not self.whole:
            self.problem = "not all tests were run, so nothing was written; run all of them"
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        elif self.write:
            PAGE.write_text(_with_table(PAGE.read_text("utf-8"), self.table()), "utf-8")
        elif self.whole and self.table() != _table_in(PAGE.read_text("utf-8")):
            self.problem = (
                f"the table in {PAGE.name} is not what these tests show; run "
                "pytest --write-families, and look at what changed"
            )
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.problem:
            terminalreporter.write_line(self.problem, red=True)
            terminalreporter.write_line(self.table())

    def table(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        # Most tests do without models: importing these would slow down their start.
        from kvtide.models import FAMILIES
        from tests.models.tiny import family_of

        shown: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for proof, passed in self.outcomes.items():
            assert isinstance(proof, tuple)
            name, aspect = proof
            shown[family_of(name), aspect] += passed
        yield f"| `model_type` | {' | '.join(ASPECTS.values())} |"
        yield "|---|" + "---|" * len(ASPECTS)
        for family in sorted(FAMILIES):
            cells = (_cell(shown.get((family, aspect))) for aspect in ASPECTS)
            yield f"| {family} | {' | '.join(cells)} |"


def _cell(passed: list[bool] | None) -> str:
    return "–" if not passed else "yes" if all(passed) else "no"


def _table_in(text: str) -> str:
    return text.split(BEGIN)[1].split(END)[0].strip()


def _with_table(text: str, table: str) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"
