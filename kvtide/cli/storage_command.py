"""`kvtide storage check URL`: run the conformance checks against a store."""

from __future__ import annotations

import argparse

from kvtide.storage import StoreError, conformance, open_store
from kvtide.storage.conformance import Result
from kvtide.storage.trial import new_space

REFUSALS = (StoreError,)


def add(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="WHAT")
    check = verbs.add_parser(
        "check",
        help="run the conformance checks against a store",
        description="Check that a store keeps the rules. The checks write to random spaces of "
        "their own and clear them afterwards; your objects are not touched. Exit status 1 if a "
        "check fails.",
    )
    check.add_argument("url", metavar="URL", help="such as file:///path or package.module:Class")
    check.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    open_store(args.url, new_space()).close()  # Refuse once, not once in every check.
    results = []
    for check in conformance.CHECKS:
        result = conformance.run_check(check, lambda space: open_store(args.url, space))
        results.append(result)
        print("\n".join(_lines(result)), flush=True)
    wrong = sum(bool(result.violations) for result in results)
    left_out = sum(bool(result.left_out) for result in results)
    print(f"\n{len(results) - wrong - left_out} passed, {wrong} failed, {left_out} left out")
    return 1 if wrong else 0


def _lines(result: Result) -> list[str]:
    if result.left_out:
        return [f"left out  {result.check}: {result.left_out}"]
    took = f"({result.seconds:.2f} s)"
    if not result.violations:
        return [f"ok        {result.check} {took}"]
    return [f"WRONG     {result.check} {took}", *(f"          - {v}" for v in result.violations)]
