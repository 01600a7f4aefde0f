"""The files made from the description: rules, Grafana's dashboards, Prometheus' consoles. `make monitoring` writes
them: python -m deploy.monitoring.files"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from deploy.monitoring.alerts import ALERTS
from deploy.monitoring.expressions import EXPRESSIONS, RECORDED
from deploy.monitoring.panels import DASHBOARDS, Dashboard, Panel
from deploy.monitoring.promql import narrowed

DEPLOY = Path(__file__).parent.parent
MADE = "made by `make monitoring` from deploy/monitoring"
PAGE = "docs/operations.md"
"""Where each alert is explained."""

WIDTH = 24
"""Of Grafana's grid."""
HEIGHTS = {"stat": 5, "timeseries": 8}
UNITS = {"short": "", "sci": "", "percentunit": "of 1", "Bps": "bytes/s"}
"""Grafana's names in words; the others are words."""
SOURCE = {"type": "prometheus", "uid": "prometheus"}
"""As deploy/grafana/provisioning names it."""


def files() -> Mapping[Path, str]:
    """Every made file and what it holds."""
    found = {DEPLOY / "prometheus/rules.yml": _rules()}
    for dashboard in DASHBOARDS:
        text = json.dumps(_dashboard(dashboard), indent=1, ensure_ascii=False) + "\n"
        found[DEPLOY / f"grafana/dashboards/{dashboard.uid}.json"] = text
        found[DEPLOY / f"prometheus/consoles/{dashboard.uid}.html"] = _console(dashboard)
    return found


def _rules() -> str:
    recorded = [{"record": name, "expr": expression} for name, expression in RECORDED.items()]
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": f"{PAGE}#{alert.name.lower()}"},
        }
        for alert in ALERTS
    ]
    groups = [{"name": "noloco", "rules": recorded}, {"name": "noloco-alerts", "rules": alerts}]
    return f"# {MADE}\n" + yaml.safe_dump({"groups": groups}, sort_keys=False, width=1000)


def _chosen(dashboard: Dashboard, name: str) -> str:
    """Matchers by what is chosen; what is recorded is of a whole run."""
    labels = ("run",) if name in RECORDED else dashboard.choices
    return ",".join(f'{label}=~"${label}"' for label in labels)


def _dashboard(dashboard: Dashboard) -> dict[str, object]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": MADE,
        "tags": ["noloco"],
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "tags": ["noloco"], "title": "NoLoCo", "keepTime": True, "includeVars": True}],
        "templating": {"list": [_choice(dashboard, at) for at in range(len(dashboard.choices))]},
        "panels": list(_placed(dashboard)),
    }


def _choice(dashboard: Dashboard, at: int) -> dict[str, object]:
    label = dashboard.choices[at]
    narrower = ",".join(f'{other}=~"${other}"' for other in dashboard.choices[:at])
    query = f"label_values(noloco_up{{{narrower}}}, {label})" if narrower else f"label_values(noloco_up, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"qryType": 1, "query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _placed(dashboard: Dashboard) -> Iterator[dict[str, object]]:
    number, top = 0, 0
    for title, panels in dashboard.rows:
        number += 1
        place = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        top += 1
        tall = max(HEIGHTS[panel.kind] for panel in panels)
        for line in _lines(panels):
            width = WIDTH // len(line)
            for at, panel in enumerate(line):
                number += 1
                place = {"h": tall, "w": width, "x": at * width, "y": top}
                yield {"id": number, "gridPos": place, **_panel(dashboard, panel)}
            top += tall


def _lines(panels: Sequence[Panel]) -> Iterator[Sequence[Panel]]:
    """At most four side by side; a row that is only numbers stays in one line."""
    most = len(panels) if all(panel.kind == "stat" for panel in panels) else 3 if len(panels) in (3, 5, 6) else 4
    for first in range(0, len(panels), most):
        yield panels[first : first + most]


def _panel(dashboard: Dashboard, panel: Panel) -> dict[str, object]:
    defaults: dict[str, object] = {"unit": panel.unit}
    if panel.kind == "timeseries":
        scale = {"type": "log", "log": 10} if panel.logarithmic else {"type": "linear"}
        defaults["custom"] = {"scaleDistribution": scale, "fillOpacity": 0, "showPoints": "never"}
        options: dict[str, object] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "none",
            "textMode": "value_and_name",
        }
    targets = [
        {
            "refId": chr(ord("A") + at),
            "datasource": SOURCE,
            "expr": narrowed(EXPRESSIONS[line.shows], lambda name: _chosen(dashboard, name)),
            "legendFormat": line.legend,
        }
        for at, line in enumerate(panel.lines)
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def _console(dashboard: Dashboard) -> str:
    """A page of Prometheus' own, without Grafana: every panel's values of this moment. No script, nothing fetched."""
    title = html.escape(dashboard.title)
    parts = [
        f"<!doctype html><!-- {MADE} --><html lang=en><meta charset=utf-8><title>{title}</title>",
        '<meta name=viewport content="width=device-width"><meta http-equiv=refresh content=10>',
        "<style>:root{color-scheme:light dark}body{font:14px system-ui;margin:1em}"
        "section{display:grid;grid-template-columns:repeat(auto-fill,minmax(20em,1fr));gap:1em}"
        "td{padding-right:1em}h3{margin:0}</style>",
        f"<h1>{title}</h1>",
    ]
    for row, panels in dashboard.rows:
        parts.append(f"<h2>{html.escape(row)}</h2><section>")
        for panel in panels:
            unit = UNITS.get(panel.unit, panel.unit.removeprefix("suffix: "))
            parts.append(f"<div><h3>{html.escape(panel.title)} <small>{html.escape(unit)}</small></h3><table>")
            for line in panel.lines:
                legend = re.sub(r"{{(\w+)}}", r"{{ .Labels.\1 }}", html.escape(line.legend))
                query = EXPRESSIONS[line.shows]
                parts.append(
                    f"{{{{ range query `{query}` }}}}<tr><td>{legend}<td>{{{{ .Value | humanize }}}}{{{{ end }}}}"
                )
            parts.append("</table></div>")
        parts.append("</section>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
