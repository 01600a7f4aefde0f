"""Every alert on made-up series, one fault at a time, by `promtool test rules`: it fires, and no other does.

python -m deploy.monitoring.trials
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parent.parent
SCRAPE_SECONDS = 15
SAMPLES = 240
"""An hour."""
STEADY = f"x{SAMPLES}"
LAST_MINUTES = "x180 {}x60"
"""Well for 45 minutes, then something else for a quarter of an hour."""
NODES = (("a", "0"), ("b", "1"))
"""Instance and stage of the two nodes of run r."""

HEALTHY: Mapping[str, str] = {
    "up": "1" + STEADY,
    "noloco_up": "1" + STEADY,
    'noloco_live_replicas{stage="0"}': "1" + STEADY,
    'noloco_live_replicas{stage="1"}': "1" + STEADY,
    'noloco_stage_missing{stage="0"}': "0" + STEADY,
    'noloco_stage_missing{stage="1"}': "0" + STEADY,
    'noloco_swarm_stage_missing{stage="0"}': "0" + STEADY,
    'noloco_swarm_stage_missing{stage="1"}': "0" + STEADY,
    "noloco_waiting_seconds": "0" + STEADY,
    "noloco_tokens_total": "0+1000" + STEADY,
    "noloco_trained_tokens": "0+1000" + STEADY,
    "noloco_target_tokens": "1000000" + STEADY,
    "noloco_inner_steps_total": "0+10" + STEADY,
    "noloco_inner_steps_skipped_total": "0" + STEADY,
    "noloco_replica_divergence": "1-0.003" + STEADY,
    "noloco_learning_rate": "1-0.003" + STEADY,
    'noloco_outer_steps_total{kind="paired"}': "0+0.25" + STEADY,
    'noloco_outer_steps_total{kind="no_partner"}': "0" + STEADY,
    "noloco_outer_last_timestamp_seconds": f"0+{SCRAPE_SECONDS}" + STEADY,
    "process_start_time_seconds": "0" + STEADY,
    'noloco_refusals_total{reason="busy"}': "0+100" + STEADY,
    'noloco_refusals_total{reason="forged"}': "0" + STEADY,
    "noloco_event_loop_lag_seconds": "0.01" + STEADY,
    "noloco_data_wait_seconds_total": "0+0.1" + STEADY,
    "noloco_memory_used_bytes": "50" + STEADY,
    "noloco_memory_limit_bytes": "100" + STEADY,
    "noloco_disk_free_bytes": "100e9" + STEADY,
    "noloco_stage_parameters": "1e9" + STEADY,
    "process_open_fds": "10" + STEADY,
    "process_max_fds": "100" + STEADY,
    'noloco_checkpoints_total{outcome="failed"}': "0" + STEADY,
    "noloco_directory_age_seconds": "5" + STEADY,
    'noloco_p2pd_restarts_total{cause="died"}': "0" + STEADY,
}


@dataclass(frozen=True, slots=True)
class Trial:
    """What is other than in `HEALTHY`, at both nodes, and how many of each alert fire at the end of the hour."""

    other: Mapping[str, str]
    fires: Mapping[str, int] = field(default_factory=dict[str, int])


def _then(before: str, after: str) -> str:
    return before + LAST_MINUTES.format(after)


TRIALS = (
    Trial({}),
    Trial({'noloco_live_replicas{stage="1"}': _then("1", "0")}, {"NolocoStageWithoutReplicas": 1}),
    Trial({'noloco_stage_missing{stage="1"}': _then("0", "1")}, {"NolocoStageWithoutReplicas": 1}),
    Trial({'noloco_swarm_stage_missing{stage="1"}': _then("0", "1")}, {"NolocoStageUnanswered": 1}),
    Trial({"noloco_tokens_total": _then("0+1000", "180000")}, {"NolocoSwarmStalled": 1}),
    Trial({"up": _then("1", "0")}, {"NolocoSwarmGone": 1, "NolocoNodeDown": 2}),
    Trial({"up": _then("1", "0"), "noloco_target_tokens": "230000" + STEADY}),
    Trial({"noloco_waiting_seconds": _then("0", "0+15")}, {"NolocoNodeWaits": 2}),
    Trial({"noloco_replica_divergence": _then("1-0.003", "0.5+0.1")}, {"NolocoReplicaDivergenceRising": 1}),
    Trial({"noloco_replica_divergence": _then("1-0.003", "0.5+0.1"), "noloco_learning_rate": "0+0.003" + STEADY}),
    Trial(  # rounds much shorter than the time from scrape to scrape
        {
            'noloco_outer_steps_total{kind="paired"}': "0+150" + STEADY,
            "noloco_outer_last_timestamp_seconds": f"-12+{SCRAPE_SECONDS}" + STEADY,
        }
    ),
    Trial({"noloco_outer_last_timestamp_seconds": _then("0+15", "2700")}, {"NolocoOuterStepsMissing": 2}),
    Trial(
        {
            'noloco_outer_steps_total{kind="paired"}': "0" + STEADY,
            'noloco_outer_steps_total{kind="no_partner"}': "0+0.25" + STEADY,
        },
        {"NolocoOuterStepsWithoutPartner": 1},
    ),
    Trial({'noloco_refusals_total{reason="forged"}': "0+10" + STEADY}, {"NolocoRefusals": 1}),
    Trial({"noloco_inner_steps_skipped_total": "0+1" + STEADY}, {"NolocoStepsSkipped": 2}),
    Trial({"noloco_event_loop_lag_seconds": _then("0.01", "3")}, {"NolocoLoopLag": 2}),
    Trial({"noloco_data_wait_seconds_total": "0+5" + STEADY}, {"NolocoDataWaits": 2}),
    Trial({"noloco_memory_used_bytes": _then("50", "95")}, {"NolocoMemoryShort": 2}),
    Trial({"noloco_disk_free_bytes": _then("100e9", "72e9")}, {"NolocoDiskShort": 2}),
    Trial({"process_open_fds": _then("10", "90")}, {"NolocoFilesShort": 2}),
    Trial({'noloco_checkpoints_total{outcome="failed"}': _then("0", "1")}, {"NolocoCheckpointFailed": 2}),
    Trial({"noloco_directory_age_seconds": _then("5", "5+15")}, {"NolocoDirectoryStale": 2}),
    Trial({'noloco_p2pd_restarts_total{cause="died"}': _then("0", "3")}, {"NolocoP2pdRestarts": 2}),
)


def _series(trial: Trial) -> Iterator[dict[str, str]]:
    for name, values in {**HEALTHY, **trial.other}.items():
        bare, _, labels = name.rstrip("}").partition("{")
        for instance, _ in NODES:
            own = f'run="r",job="noloco",instance="{instance}",node="{instance}"'
            yield {"series": f"{bare}{{{own}{',' + labels if labels else ''}}}", "values": values}
    for instance, stage in NODES:
        own = f'run="r",job="noloco",instance="{instance}",node="{instance}",stage="{stage}"'
        yield {"series": f"noloco_node_info{{{own}}}", "values": "1" + STEADY}


def try_rules(folder: Path) -> None:
    """Run all trials in `folder`. CalledProcessError where one fails; promtool has said which."""
    fires = 'count by (alertname) (ALERTS{alertstate="firing"})'
    tests = [
        {
            "name": " ".join(trial.fires) or "none fires",
            "interval": f"{SCRAPE_SECONDS}s",
            "input_series": list(_series(trial)),
            "promql_expr_test": [
                {
                    "expr": fires,
                    "eval_time": "59m",
                    "exp_samples": [
                        {"labels": f'{{alertname="{name}"}}', "value": count} for name, count in trial.fires.items()
                    ],
                }
            ],
        }
        for trial in TRIALS
    ]
    place, rules = folder / "rules.test.yml", str(DEPLOY / "prometheus/rules.yml")
    place.write_text(
        yaml.safe_dump({"rule_files": [rules], "evaluation_interval": "15s", "tests": tests}), encoding="utf-8"
    )
    subprocess.run(["promtool", "test", "rules", str(place)], check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        try:
            try_rules(Path(made))
        except subprocess.CalledProcessError as failed:
            sys.exit(failed.returncode)
