"""Simulate crowds by events, each size that a file names once.

    python -m noloco_node.simulator.events CONFIG --out DIR

Writes `results.json`: the settings, the figures of each size, and what was seen every 30 seconds.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

import yaml
from pydantic import ValidationError

from noloco_node.config.load import problems_of
from noloco_node.config.yaml_text import parse_yaml
from noloco_node.errors import ExitCode, UserError
from noloco_node.simulator.crowd import Crowd, most_nodes
from noloco_node.simulator.crowd_figures import CrowdFigures, CrowdRun
from noloco_node.simulator.crowd_settings import NODE_BYTES, CrowdSettings
from noloco_node.sizing.machine import free_memory


def load_crowd(path: Path) -> CrowdSettings:
    """The settings in a file. UserError (CONFIG) with all mistakes, and what to do about them."""
    remedy = f"correct {path}"
    try:
        raw: object = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(ExitCode.CONFIG, f"cannot read {path}: {error}", remedy) from None
    try:
        return CrowdSettings.model_validate(raw)
    except ValidationError as error:
        problems = problems_of(error, raw, CrowdSettings)
        raise UserError(ExitCode.CONFIG, f"{path}: " + "; ".join(map(str, problems)), remedy) from None


def check_memory(settings: CrowdSettings, available: int) -> None:
    """UserError (CONFIG) where the largest size would take more than so many bytes."""
    needed = NODE_BYTES * most_nodes(settings, max(settings.nodes))
    if needed > available:
        raise UserError(
            ExitCode.CONFIG,
            f"nodes ({max(settings.nodes)}) would take some {needed >> 20} MiB, and {available >> 20} MiB are free",
            "simulate fewer, or on another machine",
        )


def simulate(settings: CrowdSettings, out: Path) -> list[CrowdFigures]:
    """All sizes, one after the other; `out` gets `results.json` after each."""
    out.mkdir(parents=True, exist_ok=True)
    found: list[CrowdFigures] = []
    written: list[dict[str, object]] = []
    for many in settings.nodes:
        began = time.process_time()
        course = CrowdRun(Crowd(settings, many))
        figures = course.run()
        spent = {"cpu_seconds": time.process_time() - began, "peak_mib": _peak_mib()}
        moments = [asdict(moment) for moment in course.crowd.moments]
        found.append(figures)
        written.append({"figures": asdict(figures), "moments": moments, **spent})
        results = {"settings": settings.model_dump(mode="json"), "sizes": written}
        (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(
            f"{many} nodes, {figures.seconds:.0f} s after the warm-up: devices work {figures.working:.1%} of the time, "
            f"{figures.of_best:.1%} of the best assignment, {figures.alone:.2%} of the outer steps alone, counts wrong "
            f"by {figures.error:.1%}; {spent['cpu_seconds']:.0f} s of CPU, {spent['peak_mib']:.0f} MiB; trace "
            f"{figures.trace[:16]}",
            flush=True,
        )
    return found


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    """Called from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a YAML file of `kind: crowd`")
    parser.add_argument("--out", type=Path, required=True, help="where the results go")
    options = parser.parse_args()
    try:
        settings = load_crowd(options.config)
        check_memory(settings, free_memory("cpu").host)
        simulate(settings, options.out)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
