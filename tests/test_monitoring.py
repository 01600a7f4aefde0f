"""What Prometheus and Grafana are given names metrics and labels that nodes have, and is what the description makes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deploy.monitoring.alerts import ALERTS
from deploy.monitoring.expressions import EXPRESSIONS, QUIET, RECORDED
from deploy.monitoring.files import PAGE, files
from deploy.monitoring.panels import DASHBOARDS
from deploy.monitoring.promql import grouping_labels, labels_of_result, narrowed, selectors
from deploy.monitoring.trials import HEALTHY, TRIALS, Trial
from noloco_node.telemetry.metric_table import SEED_TABLE, TABLE, Metric

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
TARGET = frozenset({"job", "instance", "run", "node"})
"""Labels of whatever is scraped."""
PROCESS = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").rpartition("## Of the process")[2]
EXPRESSIONS_AND_ALERTS = {**RECORDED, **EXPRESSIONS, **{alert.name: alert.expression for alert in ALERTS}}


def series() -> Iterator[tuple[str, frozenset[str]]]:
    """Every series that can be asked for, with its labels."""
    for metric in (*TABLE.values(), *SEED_TABLE.values()):
        yield from ((name, labels | TARGET) for name, labels in scraped(metric))
    for name in re.findall(r"process_\w+", PROCESS):
        yield name, TARGET
    yield "up", TARGET
    for name, expression in RECORDED.items():
        yield name, frozenset(labels_of_result(expression))


def scraped(metric: Metric) -> Iterator[tuple[str, frozenset[str]]]:
    """The series of one metric."""
    labels = frozenset(metric.labels)
    if metric.kind == "histogram":
        yield metric.name + "_bucket", labels | {"le"}
        yield metric.name + "_sum", labels
        yield metric.name + "_count", labels
    else:
        yield metric.name, labels


SERIES = dict(series())


def faults(expression: str) -> list[str]:
    """What an expression names that no node has."""
    found = selectors(expression)
    unknown = [each.name for each in found if each.name not in SERIES]
    wrong = [f"{each.name} has no {label}" for each in found for label in each.matched - SERIES.get(each.name, set())]
    known = frozenset[str]().union(*(SERIES.get(each.name, frozenset()) for each in found))
    return unknown + wrong + sorted(grouping_labels(expression) - known) + ([] if found else ["no metric"])


@pytest.mark.parametrize("name", EXPRESSIONS_AND_ALERTS)
def test_every_expression_names_metrics_and_labels_of_nodes(name: str) -> None:
    """In what it selects, and in what it groups and joins by."""
    assert faults(EXPRESSIONS_AND_ALERTS[name]) == []


@pytest.mark.parametrize(
    "expression",
    [
        "rate(noloco_tokens[2m])",
        'noloco_refusals_total{stage="1"}',
        "sum by (reason) (noloco_tokens_total)",
        "noloco_hop_duration_seconds",
        "noloco:no_such:record",
        'noloco:spread:avg{instance="here"}',
        "process_start_time",
        "1 + 1",
    ],
)
def test_what_no_node_has_is_found(expression: str) -> None:
    """A misspelt metric, a label of another, a histogram without its ending, a record that nothing makes."""
    assert faults(expression)


def test_every_expression_is_used_and_no_rule_says_it_again() -> None:
    """Panels and alerts name them; a record is named by an expression or another record."""
    shown = {line.shows for dashboard in DASHBOARDS for panel in dashboard.panels for line in panel.lines}
    assert shown == EXPRESSIONS.keys()
    assert {alert.shows for alert in ALERTS} <= shown
    assert QUIET.keys() <= EXPRESSIONS.keys()
    named = {each.name for text in EXPRESSIONS_AND_ALERTS.values() for each in selectors(text)}
    assert RECORDED.keys() <= named
    assert len({*EXPRESSIONS.values()}) == len(EXPRESSIONS)
    assert not {*RECORDED.values()} & {*EXPRESSIONS.values()}


def test_legends_name_labels_that_the_series_have() -> None:
    """An aggregation keeps no others."""
    wrong: list[str] = []
    for line in (line for dashboard in DASHBOARDS for panel in dashboard.panels for line in panel.lines):
        expression = EXPRESSIONS[line.shows]
        named = set(re.findall(r"{{(\w+)}}", line.legend))
        known = frozenset[str]().union(*(SERIES[each.name] for each in selectors(expression)))
        by = re.match(r"(?:\w+\([\d.]+, )?\w+ by \(([^)]*)\)", expression)
        left = {label.strip() for label in by[1].split(",")} if by else known
        wrong += [f"{line.shows}: {label}" for label in named - left]
    assert wrong == []


def test_whoever_looks_narrows_every_metric_down() -> None:
    """What is recorded is of a run; all else by run and instance."""
    text = narrowed('rate(noloco_refusals_total{reason!~"a|b"}[5m]) / noloco:spread:avg', lambda _: 'run=~"$run"')
    assert text == 'rate(noloco_refusals_total{reason!~"a|b",run=~"$run"}[5m]) / noloco:spread:avg{run=~"$run"}'
    for dashboard in DASHBOARDS:
        made = json.loads(files()[DEPLOY / f"grafana/dashboards/{dashboard.uid}.json"])
        asked = [target["expr"] for panel in made["panels"] for target in panel.get("targets", ())]
        assert len(asked) == sum(len(panel.lines) for panel in dashboard.panels)
        for expression in asked:
            assert faults(expression) == []
            assert all("run" in each.matched for each in selectors(expression))


def test_panels_lie_beside_each_other() -> None:
    """None over another, none outside the grid; ids are their own."""
    for dashboard in DASHBOARDS:
        made = json.loads(files()[DEPLOY / f"grafana/dashboards/{dashboard.uid}.json"])["panels"]
        places = [panel["gridPos"] for panel in made]
        cells = [
            (x, y)
            for place in places
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len({*cells})
        assert max(x for x, _ in cells) < 24
        assert len({panel["id"] for panel in made}) == len(made)


def test_the_files_are_those_that_the_description_makes() -> None:
    """`make monitoring` was run after the last change; nothing else lies in their folders."""
    made = files()
    assert [path for path, text in made.items() if path.read_text(encoding="utf-8") != text] == []
    lying = {*(DEPLOY / "grafana/dashboards").iterdir(), *(DEPLOY / "prometheus/consoles").iterdir()}
    assert lying <= made.keys()


def test_prometheus_reads_what_a_local_swarm_writes() -> None:
    """Compose's run folder, files of other nodes and of seeds, and the rules; file discovery takes no asterisk in a
    folder's name."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]["swarm"]["command"]
    jobs = {job["job_name"]: job["file_sd_configs"][0]["files"] for job in config["scrape_configs"]}
    assert jobs.keys() == {"noloco", "noloco-seeds"}
    places = jobs["noloco"]
    assert not {*places} & {*jobs["noloco-seeds"]}, "a seed is no node"
    assert places[0] == f"{compose[compose.index('--run-folder') + 1]}/targets.json"
    assert [place for place in (*places, *jobs["noloco-seeds"]) if "*" in place.rpartition("/")[0]] == []
    assert [(DEPLOY / "prometheus" / name).exists() for name in config["rule_files"]] == [True]


def test_alertmanager_silences_only_alerts_that_exist() -> None:
    """Names in the example route."""
    text = (DEPLOY / "prometheus/alertmanager.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"Noloco\w+", text)) <= {alert.name for alert in ALERTS}
    assert set(re.findall(r'severity="(\w+)"', text)) <= {alert.severity for alert in ALERTS}


def test_each_alert_has_its_section() -> None:
    """At the place that the alert's own description names, and none of an alert that is gone."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert re.findall(r"^### (\w+)$", page, flags=re.MULTILINE) == [alert.name for alert in ALERTS]
    links = set(re.findall(r"\(#(\w+)\)", page))
    assert links <= {alert.name.lower() for alert in ALERTS}


def test_each_alert_is_tried_on_series_that_nodes_have() -> None:
    """`make dashboards` has promtool run the trials; one of them has no fault at all."""
    assert {name for trial in TRIALS for name in trial.fires} == {alert.name for alert in ALERTS}
    assert TRIALS[0] == Trial({})
    for trial in TRIALS:
        assert trial.other.keys() <= HEALTHY.keys()
    assert [name for name in HEALTHY if faults(name)] == []
