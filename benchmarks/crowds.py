"""Tables and plots of several simulated crowds, from the `results.json` of `noloco-node simulate`.

    python -m benchmarks.crowds docs/results/scale

Looks in the folder's own folders: `directory`, `directory-16` and `before` (what the directory costs by size, by
buckets in four stages and in sixteen and where everybody is seen), `training`, `training-10000` and `mass` (figures by
size), `churn-5` and `churn-50` (the same by churn), `deaths`, `flash`, `cut` (what befalls a crowd, by time). What is
not there is left out. Writes `table.md`, `directory.png`, `sizes.png` and `events.png` beside them.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.command import command, folder_with, parser_of

matplotlib.use("Agg")

from matplotlib import pyplot as plt

SIZES = ("training", "training-10000", "mass")
WORK = (*SIZES, "churn-5", "churn-50")
KINDS = ("directory read", "directory written", "microbatches", "exchanges", "states")
EVENTS = {"deaths": "a quarter dies", "flash": "ten times as many come within five minutes", "cut": "a region cut off"}


def sizes_of(folder: Path) -> list[dict[str, Any]]:
    """What one simulation found of each size; nothing where it was not run."""
    path = folder / "results.json"
    return json.loads(path.read_text(encoding="utf-8"))["figures"]["sizes"] if path.exists() else []


def directory_bytes(size: dict[str, Any]) -> float:
    """Bytes a second of the directory that a node causes."""
    by_kind = size["figures"]["node_bytes"]
    return sum(by_kind.get(kind, 0.0) for kind in ("directory read", "directory written"))


def directory_table(folder: Path) -> list[str]:
    """What the directory costs, by size."""
    lines = [
        "| nodes | stages | view | kB/s a node reads and writes | kB/s of a holder: mean | the highest of a hundred "
        "| highest | counts wrong by (rms) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, view in (("before", "everybody"), ("directory", "buckets"), ("directory-16", "buckets")):
        for size in sizes_of(folder / name):
            figures, stages = size["figures"], settings_of(folder / name)["work"]["stages"]
            own = directory_bytes(size) / 1000
            held = "".join(f" {octets / 1000:,.1f} |" for octets in figures["holder_bytes"].values())
            lines.append(f"| {figures['nodes']:,} | {stages} | {view} | {own:,.1f} |{held} {figures['error']:.1%} |")
    return lines


def settings_of(folder: Path) -> dict[str, Any]:
    """What a simulation was told (`sim`)."""
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))["sim"]


def training_table(folder: Path) -> list[str]:
    """What a crowd trains, by size and churn."""
    lines = [
        "| nodes | churn an hour | microbatches as one | devices work | of the best assignment | outer steps alone "
        "| outer steps a node and hour | spread left (arithmetic) | evenness of pairs, routes | microbatches lost "
        "| moves a node and hour | a newcomer serves after | counts wrong by (rms) |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in WORK:
        for size in sizes_of(folder / name):
            f, told = size["figures"], settings_of(folder / name)
            joined = "-" if f["joined_after"] is None else f"{f['joined_after']:.0f} s"
            lines.append(
                f"| {f['nodes']:,} | {told['churn_an_hour']:.0%} | {told['parcel']} | {f['working']:.1%} | "
                f"{f['of_best']:.1%} | {f['alone']:.2%} | {f['outer_steps']:.1f} | {f['contraction']:.3f} "
                f"({f['contraction_expected']:.3f}) | {_number(f['evenness'])}, {_number(f['evenness_of_routes'])} | "
                f"{f['lost']:.2%} | {f['moves']:.2f} | {joined} | {f['error']:.1%} |"
            )
    return lines


def costs_table(folder: Path) -> list[str]:
    """What a node sends by kind, what a holder gives, and what simulating it took, by size."""
    lines = [
        f"| nodes | {' | '.join(KINDS)} | a holder: mean "
        "| highest of a hundred | highest | CPU s, µs a node-second | peak MiB, kB a node |",
        "|---|" + "---|" * (len(KINDS) + 5),
    ]
    for name in SIZES:
        for size in sizes_of(folder / name):
            f, seconds = size["figures"], size["moments"][-1]["at"]
            sent = "".join(f" {f['node_bytes'].get(kind, 0.0) / 1000:,.1f} |" for kind in KINDS)
            held = "".join(f" {octets / 1000:,.1f} |" for octets in f["holder_bytes"].values())
            per_second = size["cpu_seconds"] / f["nodes"] / seconds * 1e6
            per_node = size["peak_mib"] * 1048.576 / f["nodes"]
            lines.append(
                f"| {f['nodes']:,} |{sent}{held} {size['cpu_seconds']:.0f}, {per_second:.1f} | {size['peak_mib']:.0f}, "
                f"{per_node:.0f} |"
            )
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def recovered(moments: list[dict[str, Any]], at: float) -> float | None:
    """Seconds from an event until 90 % of what those that serve could do, beside the part before, is
    trained again and stays so for two samples; None where it is not."""
    before = [m["trained"] / m["best"] for m in moments if at - 300 <= m["at"] <= at]
    usual = sum(before) / len(before)
    after = [m for m in moments if m["at"] > at]
    for one, two in itertools.pairwise(after):
        if min(one["trained"] / one["best"], two["trained"] / two["best"]) >= 0.9 * usual:
            return one["at"] - at
    return None


def draw_directory(folder: Path) -> None:
    """Bytes of a node and of the busiest holder by size."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    for name, label, colour in (("before", "everybody", "tab:red"), ("directory", "buckets", "tab:blue")):
        sizes = sizes_of(folder / name)
        nodes = [size["figures"]["nodes"] for size in sizes]
        axes[0].loglog(nodes, [directory_bytes(size) / 1000 for size in sizes], "o-", color=colour, label=label)
        held = [size["figures"]["holder_bytes"] for size in sizes]
        axes[1].loglog(nodes, [each["highest"] / 1000 for each in held], "o-", color=colour, label=f"{label}: highest")
        axes[1].loglog(nodes, [each["mean"] / 1000 for each in held], "o--", color=colour, label=f"{label}: mean")
    for axis, title in zip(axes, ("a node's look-ups and records", "what a node gives as a holder"), strict=True):
        axis.set(title=title, xlabel="nodes (four stages)", ylabel="kB/s")
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "directory.png", dpi=110)
    plt.close(figure)


def draw_sizes(folder: Path) -> None:
    """What a node sends by kind, and what it trains, by size."""
    sizes = [size["figures"] for name in SIZES for size in sizes_of(folder / name)]
    nodes = [f["nodes"] for f in sizes]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    for kind in KINDS:
        axes[0].loglog(nodes, [f["node_bytes"].get(kind, float("nan")) / 1000 for f in sizes], "o-", label=kind)
    axes[0].set(title="what a node sends", ylabel="kB/s")
    for name, label in (("working", "devices work"), ("of_best", "of the best assignment"), ("error", "counts wrong")):
        axes[1].semilogx(nodes, [100 * f[name] for f in sizes], "o-", label=label)
    axes[1].set(title="what comes of it", ylabel="%")
    axes[1].set_ylim(bottom=0)
    for axis in axes:
        axis.set_xlabel("nodes (four stages)")
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylim(bottom=0.01)
    axes[0].legend(fontsize=8, loc="lower right")
    axes[1].legend(fontsize=8, loc="center right", bbox_to_anchor=(1.0, 0.35))
    figure.tight_layout()
    figure.savefig(folder / "sizes.png", dpi=110)
    plt.close(figure)


def draw_events(folder: Path) -> None:
    """What is trained beside what could be, over time."""
    shown = {name: title for name, title in EVENTS.items() if sizes_of(folder / name)}
    figure, axes = plt.subplots(1, max(1, len(shown)), figsize=(4.5 * max(1, len(shown)), 3.6), squeeze=False)
    for axis, (name, title) in zip(axes[0], shown.items(), strict=True):
        moments = sizes_of(folder / name)[-1]["moments"]
        minutes = [m["at"] / 60 for m in moments]
        axis.plot(minutes, [m["best"] for m in moments], color="0.6", label="best assignment of those that serve")
        axis.plot(minutes, [m["trained"] for m in moments], color="tab:blue", label="trained")
        axis.set(title=title, xlabel="minutes", ylabel="microbatches/s")
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "events.png", dpi=110)
    plt.close(figure)


def events_table(folder: Path) -> list[str]:
    """What befell, and how long it took."""
    lines = [
        "| event | nodes | 90 % of the share before again after | newcomers serve after (median) |",
        "|---|---|---|---|",
    ]
    for name, title in EVENTS.items():
        for size in sizes_of(folder / name):
            settings = settings_of(folder / name)
            event = (settings["deaths"] or settings["arrivals"] or settings["cuts"])[0]
            seconds = recovered(size["moments"], event["at_seconds"])
            joined = size["figures"]["joined_after"]
            after = "not within it" if seconds is None else f"{seconds:.0f} s"
            lines.append(
                f"| {title} | {size['figures']['nodes']:,} | {after} | {'-' if joined is None else f'{joined:.0f} s'} |"
            )
    return lines


def main() -> None:
    """Called from the command line."""
    parser = parser_of(__doc__, out=False)
    parser.add_argument(
        "folder", type=folder_with(*(f"{name}/results.json" for name in ("directory", "before", *WORK, *EVENTS)))
    )
    folder: Path = parser.parse_args().folder
    parts = (training_table(folder), costs_table(folder), events_table(folder), directory_table(folder))
    text = "\n\n".join("\n".join(part) for part in parts) + "\n"
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(text)
    draw_directory(folder)
    draw_sizes(folder)
    draw_events(folder)


if __name__ == "__main__":
    command(main)
