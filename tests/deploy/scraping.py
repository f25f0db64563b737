"""Does a server's /metrics have what an expression names?"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.promql import OVER_COUNTERS, PromQLError, parse

OF_PROMETHEUS = {"up": {"job", "instance"}}
"""Series that Prometheus makes itself."""
ADDED = {"job", "instance"}
"""Labels that Prometheus adds to every series."""
GROWS = ("_total", "_bucket", "_sum", "_count")

Samples = Mapping[str, list[Mapping[str, str]]]


def samples(texts: Iterable[str]) -> Samples:
    """Of several servers: name of a series → the labels of all that have it."""
    found: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name].append(sample.labels)
    return dict(found)


def problems(expression: str, found: Samples) -> Iterator[str]:
    """Everything that an expression names and no server has."""
    try:
        parsed = parse(expression)
    except PromQLError as error:
        yield str(error)
        return
    if not parsed.selectors:
        yield "it reads no series"
    labels: set[str] = set(ADDED)
    for one in parsed.selectors:
        if one.name in OF_PROMETHEUS:
            labels |= OF_PROMETHEUS[one.name]
            continue
        if one.name not in found:
            yield f"there is no series {one.name}"
            continue
        of_series = {name for sample in found[one.name] for name in sample}
        labels |= of_series
        for label, operator, value in one.matchers:
            if label not in of_series | ADDED:
                yield f"{one.name} has no label {label}"
            elif (
                label not in ADDED
                and operator == "="
                and not any(sample.get(label) == value for sample in found[one.name])
            ):
                yield f"{one.name} has no {label}={value}"
        if bool(OVER_COUNTERS & {*one.inside}) != one.name.endswith(GROWS):
            yield f"{one.name}: rate and increase are for counters, and counters for them"
    for label in parsed.grouped_by:
        if label not in labels:
            yield f"no series of it has the label {label}"


def in_grafana(expression: str) -> str:
    """With values in place of Grafana's variables."""
    return re.sub(r"\$__rate_interval|\$__interval", "5m", expression).replace("$instance", ".*")
