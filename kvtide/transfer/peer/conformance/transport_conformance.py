"""The kit: does a transport keep the rules of `kvtide.transfer.peer.transport`?

    from kvtide.transfer.peer.conformance import transport_conformance

    found = transport_conformance.violations("mooncake")
    assert not found, "\\n".join(found)

or `python -m kvtide.transfer.peer.conformance.transport_conformance mooncake`. A transport of your
own is named `package.module:Class`. Every check starts processes of its own and kills them after
it; it yields a sentence for everything that it finds wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtide.transfer.peer.conformance.conformance_peer import Trial
from kvtide.transfer.peer.conformance.failure_checks import FAILURE_CHECKS, NotApplicableError
from kvtide.transfer.peer.conformance.sound_checks import SOUND_CHECKS
from kvtide.transfer.peer.transport import TransportUnavailableError
from kvtide.transfer.peer.transport_registry import open_transport

TransportCheck = Callable[[Trial], Iterator[str]]

CHECKS: tuple[TransportCheck, ...] = (*SOUND_CHECKS, *FAILURE_CHECKS)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check. `left_out`: the reason why it has no meaning here."""

    check: str
    violations: tuple[str, ...] = ()
    left_out: str = ""
    seconds: float = 0.0


def violations(transport: str, checks: Sequence[TransportCheck] = CHECKS) -> list[str]:
    """Everything that is wrong with a transport, each with its check's name."""
    results = (run_check(check, transport) for check in checks)
    return [f"{result.check}: {text}" for result in results for text in result.violations]


def name_of(check: TransportCheck) -> str:
    return check.__name__.replace("_", " ")


def run_check(check: TransportCheck, transport: str) -> CheckResult:
    trial = Trial(transport)
    found: list[str] = []
    start, left_out = time.monotonic(), ""
    try:
        for text in check(trial):
            found.append(text)
    except NotApplicableError as reason:
        left_out = str(reason)
    except Exception as error:  # The transport is a stranger's: whatever it raises is the finding.
        found.append(f"raised {type(error).__name__}: {error}")
    finally:
        trial.close()
    return CheckResult(name_of(check), tuple(found), left_out, time.monotonic() - start)


def main(transport: str) -> int:
    try:
        open_transport(transport).close()
    except TransportUnavailableError as error:
        print(error, file=sys.stderr)
        return 2
    wrong = 0
    for check in CHECKS:
        result = run_check(check, transport)
        word = "WRONG" if result.violations else "left out" if result.left_out else "ok"
        print(f"{word:9} {result.seconds:5.1f} s  {result.check}", flush=True)
        for text in (*result.violations, *([result.left_out] if result.left_out else [])):
            print(f"{'':18} {text}", flush=True)
        wrong += bool(result.violations)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
