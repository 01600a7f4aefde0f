"""`python -m tests.chaos [scenario ...] --seed N --out DIR [--short]`: run scenarios, write a report."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from tests.chaos.lab import Lab
from tests.chaos.report import Verdict, write_report
from tests.chaos.scenarios import SCENARIOS


async def _run(names: list[str], lab: Lab) -> list[Verdict]:
    verdicts: list[Verdict] = []
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that nothing is left behind
    for name in names:
        began = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {name} ...", flush=True)
        try:
            verdict = await SCENARIOS[name](lab.within(name))
        except AssertionError as failure:
            traceback.print_exc()
            verdict = Verdict(name)
            verdict.demand("the scenario runs to its end", held=False, found=failure)
        verdict.figures["minutes"] = (time.monotonic() - began) / 60
        verdicts.append(verdict)
        word = "skipped: " + verdict.skipped if verdict.skipped else "passed" if verdict.passed else "FAILED"
        print(f"  {word} {verdict.complaint()}", flush=True)
        facts = {"seed": lab.seed, "long": lab.long, "load": os.getloadavg()[0]}
        heading = f"Chaos suite, {'long' if lab.long else 'short'} form, seed {lab.seed}"
        write_report(lab.folder, verdicts, heading, facts)
    return verdicts


def main() -> int:
    """Exit code 1 where a scenario failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "scenarios", nargs="*", choices=[[], *SCENARIOS], help=f"of {', '.join(SCENARIOS)}; all if none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the report (default: runs/chaos-TIME)")
    parser.add_argument("--short", action="store_true", help="the form that runs with the tests")
    arguments = parser.parse_args()
    folder = arguments.out or Path("runs") / time.strftime("chaos-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    lab = Lab(folder.resolve(), arguments.seed, not arguments.short)
    verdicts = asyncio.run(_run(arguments.scenarios or list(SCENARIOS), lab))
    print(f"report: {folder / 'report.md'}")
    return 0 if all(verdict.passed for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
