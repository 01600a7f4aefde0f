"""The two dashboards: rows of panels, each a few named expressions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """Series of one expression in a panel."""

    shows: str
    """Name of the expression."""
    legend: str
    """With labels in double braces."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `unit` is Grafana's name for it."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    kind: str = "timeseries"
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Rows of panels; all panels of a row share its width."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    choices: tuple[str, ...]
    """Labels that whoever looks chooses by."""

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All of them."""
        return tuple(panel for _, panels in self.rows for panel in panels)


def _panel(title: str, unit: str, *lines: tuple[str, str], kind: str = "timeseries", log: bool = False) -> Panel:
    return Panel(title, unit, tuple(Line(*line) for line in lines), kind, log)


STAGE, RUN, NODE = "{{run}} stage {{stage}}", "{{run}}", "{{node}} {{instance}}"

SWARM = Dashboard(
    "noloco-swarm",
    "NoLoCo: swarm",
    (
        (
            "Now",
            (
                _panel("Progress", "percentunit", ("progress", RUN), kind="stat"),
                _panel("Time left", "s", ("seconds_left", RUN), kind="stat"),
                _panel("Nodes that answer Prometheus", "short", ("answering", RUN), kind="stat"),
                _panel("Replicas by stage, scraped", "short", ("replicas", STAGE), kind="stat"),
                _panel("Replicas by stage, as nodes see them", "short", ("served", STAGE), kind="stat"),
                _panel("Since the last outer step", "s", ("since_any_step", RUN), kind="stat"),
            ),
        ),
        (
            "Training",
            (
                _panel("Loss", "short", ("training_loss", "training {{run}}"), ("validation_loss", "held out {{run}}")),
                _panel("Speed of the swarm's clock", "suffix: tokens/s", ("speed", RUN)),
                _panel("Speed by stage, scraped", "suffix: tokens/s", ("stage_speed", STAGE), ("no_progress", "all")),
            ),
        ),
        (
            "Agreement of the replicas",
            (
                _panel("Spread", "sci", ("spread", RUN), log=True),
                _panel("Learning rate", "sci", ("learning_rate", RUN)),
                _panel(
                    "Change of the spread and of the rate, each second",
                    "sci",
                    ("spread_growth", "spread {{run}}, of itself"),
                    ("rate_change", "rate {{run}}"),
                ),
                _panel("Behind the first clock", "suffix: tokens", ("clock_lag", NODE)),
            ),
        ),
        (
            "Outer steps",
            (
                _panel(
                    "Outer steps",
                    "suffix: /s",
                    ("outer_steps", "{{kind}} {{run}}"),
                    ("outer_aborts", "aborted: {{reason}} {{run}}"),
                ),
                _panel("Without a partner", "percentunit", ("alone_share", RUN)),
                _panel("Length of an exchange, 90th percentile", "s", ("exchange_p90", RUN)),
                _panel("Payload of an exchange", "bytes", ("payload", "{{codec}} {{direction}} {{run}}")),
            ),
        ),
        (
            "Microbatches",
            (
                _panel("Microbatches", "suffix: /s", ("microbatches", "{{outcome}} {{run}}")),
                _panel("A hop", "s", ("hop_p50", "median {{run}}"), ("hop_p99", "99th percentile {{run}}"), log=True),
                _panel("Device by work", "suffix: devices", ("device_share", "{{work}} {{run}}")),
                _panel("Traffic", "Bps", ("traffic", "{{kind}} {{run}}")),
            ),
        ),
        (
            "Trouble",
            (
                _panel("Refusals", "suffix: /s", ("refusals", "{{reason}} {{run}}")),
                _panel("Refusals out of the ordinary", "suffix: /s", ("odd_refusals", "{{reason}} {{run}}")),
                _panel(
                    "Offences and bans of 15 minutes",
                    "short",
                    ("offences", "offence: {{reason}} {{run}}"),
                    ("bans", "ban: {{reason}} {{run}}"),
                ),
                _panel("Audits of 15 minutes", "short", ("audits", "{{finding}} {{run}}")),
                _panel("Time back to 90 % of the speed after a loss, 90th percentile", "s", ("recovery_p90", RUN)),
                _panel("Moves of 15 minutes", "short", ("moves", "{{why}} {{run}}")),
            ),
        ),
        (
            "The whole swarm, as seeds see it",
            (
                _panel("Nodes that answer", "short", ("seen_nodes", "{{state}}, " + STAGE)),
                _panel("Claimed by records only", "short", ("seen_claimed", STAGE)),
                _panel("Stage without nodes", "short", ("seen_missing", STAGE)),
                _panel("Speed by the motion of clocks", "suffix: tokens/s", ("seen_speed", RUN)),
                _panel("What nodes say they could", "suffix: tokens/s", ("seen_capacity", STAGE)),
                _panel("Progress, by seeds", "percentunit", ("seen_progress", RUN)),
                _panel("Last node, behind the swarm's clock", "suffix: tokens", ("seen_lag", STAGE)),
                _panel("Nodes by version", "short", ("seen_versions", "{{version}} {{run}}")),
                _panel(
                    "Comings and goings of 15 minutes",
                    "short",
                    ("seen_joins", "came {{run}}"),
                    ("seen_departures", "{{how}} {{run}}"),
                    ("seen_moves", "moved {{run}}"),
                ),
            ),
        ),
    ),
    ("run",),
)

NODES = Dashboard(
    "noloco-node",
    "NoLoCo: nodes",
    (
        (
            "Now",
            (
                _panel(
                    "Answers Prometheus",
                    "short",
                    ("reachable", NODE),
                    ("gone", f"while the run goes on {NODE}"),
                    kind="stat",
                ),
                _panel("Does", "short", ("doing", "{{what}} " + NODE), kind="stat"),
                _panel("Has waited", "s", ("waiting", NODE), kind="stat"),
                _panel("Of a stage peer's state", "percentunit", ("download", NODE), kind="stat"),
            ),
        ),
        (
            "Training",
            (
                _panel("Speed", "suffix: tokens/s", ("node_speed", NODE)),
                _panel("Loss", "short", ("node_loss", NODE)),
                _panel("Gradient norm", "short", ("gradient_norm", NODE), log=True),
                _panel("Inner steps left out", "percentunit", ("skipped_share", NODE)),
                _panel("Clock", "suffix: tokens", ("node_clock", NODE)),
                _panel("Slower since a peer was lost", "s", ("recovering", NODE)),
            ),
        ),
        (
            "Microbatches",
            (
                _panel("Outcomes", "suffix: /s", ("outcomes", "{{outcome}} " + NODE)),
                _panel("Held and in flight", "short", ("held", f"held {NODE}"), ("in_flight", f"in flight {NODE}")),
                _panel("A hop, 90th percentile", "s", ("node_hop_p90", NODE), log=True),
                _panel("Refusals given", "suffix: /s", ("node_refusals", "{{reason}} " + NODE)),
                _panel("Waits for text", "percentunit", ("data_wait_share", NODE)),
            ),
        ),
        (
            "Outer steps",
            (
                _panel("Outer steps", "suffix: /s", ("rounds", "{{kind}} " + NODE)),
                _panel("Rounds since the last", "short", ("rounds_overdue", NODE)),
                _panel("Difference to the partner", "short", ("difference_norm", NODE), log=True),
                _panel("Clipped", "suffix: /s", ("clipped", NODE)),
                _panel("Holds the device", "percentunit", ("exchange_held_share", NODE)),
            ),
        ),
        (
            "Device",
            (
                _panel("Busy", "percentunit", ("busy_share", "{{work}} " + NODE)),
                _panel("Idle", "percentunit", ("idle_share", "{{reason}} " + NODE)),
                _panel("Calls that wait", "short", ("queue", NODE)),
                _panel("Work", "suffix: FLOP/s", ("flop", NODE)),
                _panel("Model FLOP/s over the peak", "percentunit", ("utilization", NODE)),
                _panel("Memory of the GPU", "bytes", ("device_memory", "{{what}} " + NODE)),
            ),
        ),
        (
            "Peers",
            (
                _panel("Replicas seen", "short", ("seen", "stage {{stage}} " + NODE)),
                _panel("Stage missed", "short", ("missing", "stage {{stage}} " + NODE)),
                _panel("Traffic", "Bps", ("node_traffic", "{{kind}} {{direction}} " + NODE)),
                _panel("Records in the directory", "short", ("directory_records", NODE)),
                _panel("Records without room, of 15 minutes", "short", ("no_room", "{{reason}} " + NODE)),
                _panel("Age of the directory", "s", ("directory_age", NODE)),
                _panel(
                    "Banned and set aside", "short", ("banned", f"banned {NODE}"), ("set_aside", f"set aside {NODE}")
                ),
                _panel(
                    "Offences and bounds of 15 minutes",
                    "short",
                    ("node_offences", "{{reason}} " + NODE),
                    ("bounded", "{{what}} " + NODE),
                ),
            ),
        ),
        (
            "Machine",
            (
                _panel("Memory of its limit", "percentunit", ("memory_share", NODE)),
                _panel("Memory of the process", "bytes", ("resident", NODE)),
                _panel("Free on the disk of the run folder", "bytes", ("disk_free", NODE)),
                _panel("Processor", "suffix: cores", ("cpu_share", NODE)),
                _panel("Event loop's lag", "s", ("loop_lag", NODE), log=True),
                _panel("Tasks and threads", "short", ("tasks", f"tasks {NODE}"), ("threads", f"threads {NODE}")),
                _panel("Open files of those allowed", "percentunit", ("files_share", NODE)),
            ),
        ),
        (
            "Checkpoints and warnings",
            (
                _panel(
                    "Checkpoints of 15 minutes",
                    "short",
                    ("checkpoints", "{{outcome}} " + NODE),
                    ("checkpoints_failed", f"failed {NODE}"),
                ),
                _panel("Age of the last", "s", ("checkpoint_age", NODE)),
                _panel("Holds the device", "percentunit", ("checkpoint_held_share", NODE)),
                _panel("Restarts of p2pd in 15 minutes", "short", ("p2pd_restarts", "{{cause}} " + NODE)),
                _panel("Warnings of 15 minutes", "short", ("warnings", "{{what}} " + NODE)),
            ),
        ),
    ),
    ("run", "instance"),
)

DASHBOARDS = (SWARM, NODES)
