"""The dashboard and the alert rules name only what servers really report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.promql import PromQLError, parse
from tests.deploy.scraping import Samples, in_grafana, problems, samples

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
PAGE = 16


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """What three servers report after some requests: one alone, with a draft and a store with a
    codec, one that takes part in handoffs, and one with hot buffers that publishes events."""
    from kvtide.server.settings import Settings
    from tests.models.tiny import oracle
    from tests.server.serving import save_model, save_tokenizer
    from tests.server.test_speculation import save_draft

    folder = tmp_path_factory.mktemp("deploy")
    model = save_tokenizer(save_model(folder / "tiny"))
    common: dict[str, Any] = {
        **{"model": str(model), "port": 0, "page_tokens": PAGE},
        **{"device_tokens": 512, "host_tokens": 1024},
    }
    alone = Settings(
        **common,
        storage=f"file://{folder}/pages?cap=100MB&codec=lossless",
        draft=str(save_draft(model, folder / "draft")),
    )
    peer = Settings(
        **common,
        storage="none",
        handoff_port=0,
        prefill_from="http://127.0.0.1:9",
        speculate="none",
    )
    sparse = folder / "sparse"
    oracle("deepseek_v32").save_pretrained(sparse)
    hot = Settings(
        **{**common, "model": str(sparse)},
        storage="none",
        resident="hot:24",
        max_running=2,
        kv_events="tcp://127.0.0.1:0",
        kv_events_replay="tcp://127.0.0.1:0",
    )
    return samples([scraped(settings) for settings in (alone, peer, hot)])


def scraped(settings: Any) -> str:
    """The metrics of a server that has loaded a prefix and, with a store, fetched one."""
    from tests.server.serving import InProcess

    server = InProcess(settings)
    try:
        for tier in ("device", "all", "all"):
            server.client.complete([5] * (8 * PAGE + 1), max_tokens=4)
            server.until(lambda report: report["in_flight"] == 0 and stored(report["storage"]))
            server.client.post(f"/admin/flush?tier={tier}")
        server.client.complete([6] * (2 * PAGE), max_tokens=1, session_id="one")
        return str(server.client.get("/metrics").body.decode())
    finally:
        server.close()


def stored(report: dict[str, Any]) -> bool:
    """Nothing waits for the store, and it has pages if there is one."""
    return not report["attached"] or (report["stored_pages"] > 0 and not report["waiting_pages"])


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((DEPLOY / "grafana" / "kvtide.json").read_text())
    return read


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "kvtide.rules.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """Every expression of the dashboard, by its panel and letter."""
    return {
        f"{panel['title']} {target['refId']}": in_grafana(target["expr"])
        for panel in panels()
        for target in panel["targets"]
    }


def test_parts_that_only_some_servers_have_are_watched_too() -> None:
    """KV events, hot buffers, codecs and grammars, on the dashboard and by rules."""
    parts = ("kvtide_kv_event", "kvtide_hot_", "kvtide_storage_coded_bytes", "kvtide_grammar_")
    for part in parts:
        assert any(part in query for query in queries().values()), part
        assert any(part in rule["expr"] for rule in rules()), part


def test_every_series_of_the_dashboard_exists(found: Samples) -> None:
    assert len(queries()) > 30
    wrong = {name: list(problems(query, found)) for name, query in queries().items()}
    assert {name: sentence for name, sentence in wrong.items() if sentence} == {}


def test_every_series_of_the_rules_exists(found: Samples) -> None:
    assert len(rules()) > 10
    wrong = {rule["alert"]: list(problems(rule["expr"], found)) for rule in rules()}
    assert {name: sentence for name, sentence in wrong.items() if sentence} == {}


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("kvtide_requests_walking", "there is no series kvtide_requests_walking"),
        ("rate(kvtide_requests[5m])", "there is no series kvtide_requests"),
        ("rate(kvtide_transfer_seconds_buckets[5m])", "no series kvtide_transfer_seconds_buckets"),
        ('kvtide_pages{tear="host"}', "kvtide_pages has no label tear"),
        ('kvtide_pages{tier="moon"}', "kvtide_pages has no tier=moon"),
        ("sum by (pond) (kvtide_pages)", "no series of it has the label pond"),
        ("rate(kvtide_pages[5m])", "kvtide_pages: rate and increase are for counters"),
        ("kvtide_moved_bytes_total > 0", "counters for them"),
        ("sum(kvtide_pages", "a parenthesis is not closed"),
        ("summ(kvtide_pages)", "no function 'summ'"),
        ("kvtide_pages{tier~host}", "not PromQL"),
        ("1 > 0", "it reads no series"),
    ],
)
def test_a_wrong_name_is_caught(found: Samples, expression: str, sentence: str) -> None:
    assert sentence in "; ".join(problems(expression, found))


def test_the_reader_finds_series_in_every_part_of_an_expression() -> None:
    read = parse('sum by (a, b) (rate(x_total{l="v", m=~"w.*"}[5m])) / ignoring (c) group_left y')
    assert [(one.name, one.inside) for one in read.selectors] == [
        ("x_total", ("sum", "rate")),
        ("y", ()),
    ]
    assert read.selectors[0].matchers == (("l", "=", "v"), ("m", "=~", "w.*"))
    assert read.grouped_by == ["a", "b", "c"]
    with pytest.raises(PromQLError):
        parse("rate(x_total[])")


# -- what Grafana and Prometheus want besides -------------------------------------------------


def test_legends_name_labels_that_their_query_keeps(found: Samples) -> None:
    for panel in panels():
        for target in panel["targets"]:
            kept = {*parse(in_grafana(target["expr"])).grouped_by, "instance"}
            named = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
            assert named <= kept, panel["title"]


def test_panels_have_their_own_numbers_and_places() -> None:
    everything = dashboard()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def test_the_dashboard_asks_for_servers_by_a_series_that_exists(found: Samples) -> None:
    (variable,) = (one for one in dashboard()["templating"]["list"] if one["name"] == "instance")
    series = re.fullmatch(r"label_values\((\w+), instance\)", variable["definition"])
    assert series is not None and series[1] in found


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len({*names}) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert {*rule["annotations"]} == {"summary", "remedy"}, rule["alert"]
        assert {*rule} <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        kept = {*parse(rule["expr"]).grouped_by, "instance", "origin"}
        named = {*re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])}
        assert named <= kept, rule["alert"]
