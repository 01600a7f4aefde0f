"""What some attacks come to, with the node's own decisions and in virtual time.

    python -m benchmarks.attacks bucket --honest 1000 --ids 300 --out benchmarks/results/attacks-bucket.json
    python -m benchmarks.attacks clocks --inner-steps 3 8 --out benchmarks/results/attacks-clocks.json

`bucket`: ids that were sought for one of a stage's buckets. Of that bucket and of one that nobody attacks: how much of
the honest is in view, how wrong the stage's number is, and how long it takes until they have been met. `clocks`: an
origin that says it is far ahead, or far behind, with a part of the work of a later stage: how far that stage's clock
is from stage 0's, as a part of the lag that is allowed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from benchmarks.attacked_bucket import Attack, AttackFigures, BucketFigures, attacked
from benchmarks.command import command, not_negative, parser_of, positive, results_file, save, whole
from benchmarks.stage_clocks import Pipeline
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.report import table_of

WORDS = {"none": None, "behind": 0.0, "ahead": 1e9}
"""What the liar says of its clock, in targets; nobody lies in the first."""


@dataclass(frozen=True)
class ClocksFigures:
    """A later stage's clock beside stage 0's, as parts of the lag that is allowed, in the second half of some runs."""

    inner_steps: int
    word: str
    mean: float
    """Above zero it is ahead."""
    furthest: float
    """On either side."""


def clocks_of(
    inner_steps: int, word: str, share: float, *, seeds: int, replicas: int = 4, steps: int = 600
) -> ClocksFigures:
    """A liar with such a share of what the second of two stages trains."""
    leads: list[float] = []
    for seed in range(seeds):
        made = Pipeline(2, replicas, steps=steps, seed=seed, inner_steps=inner_steps)
        if (times := WORDS[word]) is not None:
            made.spoken = [(PeerId("the-liar-itself"), 1000.0 * share / (1.0 - share), times)]
        made.run()
        leads += [lead for (lead,) in made.leads[len(made.leads) // 2 :]]
    return ClocksFigures(inner_steps, word, fmean(leads), max(leads, key=abs))


def bucket_table(found: Sequence[AttackFigures]) -> str:
    """A row for each bucket of each attack."""
    head = ["ids", "bucket", "honest in it", "in view", "number: rms, mean", "met by the end", "half met", "all met"]
    rows = [head]
    for each in found:
        kind = f"{each.attack.ids}, {'silent' if each.attack.silent else 'answer'}"
        rows += [
            [kind if name == "attacked" else "", name, *_cells(figures)]
            for name, figures in (("attacked", each.attacked), ("unharmed", each.unharmed))
        ]
    return table_of(rows)


def _cells(figures: BucketFigures) -> list[str]:
    number = "never held"
    if figures.error is not None and figures.bias is not None:
        number = f"{100.0 * figures.error:.1f} %, {100.0 * figures.bias:+.1f} %"
    return [
        str(figures.honest),
        f"{100.0 * figures.in_view:.1f} %",
        number,
        f"{100.0 * figures.met:.0f} %",
        *("not yet" if at is None else f"{at:.0f} s" for at in (figures.met_half_by, figures.all_met_by)),
    ]


def measure_bucket(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each number of ids, as such that answer and as such that do not."""
    kinds = {"both": (False, True), "answer": (False,), "silent": (True,)}[options.kind]
    found: list[AttackFigures] = []
    for ids in options.ids:
        for silent in kinds:
            attack = Attack(options.honest, ids, silent, options.observers, options.seconds, options.seed)
            found.append(attacked(attack))
            last = found[-1]
            print(
                f"{ids} ids that {'are silent' if silent else 'answer'}: {100.0 * last.attackers_part:.1f} % of what is"
                f" seen, {100.0 * last.attackers_most:.0f} % of one view; {100.0 * last.elsewhere:.1f} % of views at"
                f" another level than {last.level}",
                flush=True,
            )
    print(bucket_table(found))
    return [asdict(each) for each in found]


def measure_clocks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each length of a window."""
    found = [
        clocks_of(steps, word, options.share, seeds=options.seeds, replicas=options.replicas)
        for steps in options.inner_steps
        for word in WORDS
    ]
    rows = [[str(each.inner_steps), each.word, f"{each.mean:+.3f}", f"{each.furthest:+.3f}"] for each in found]
    print(table_of([["inner steps", "liar", "mean", "furthest"], *rows]))
    return [asdict(each) for each in found]


def share(text: str) -> float:
    """A part of the work that is no majority's."""
    number = not_negative(text)
    if number >= 0.5:
        raise argparse.ArgumentTypeError(f"{text!r} is half of the work or more: name a number below 0.5")
    return number


def parsed() -> argparse.Namespace:
    """What its caller asks for."""
    parser = parser_of(__doc__, out=False)
    kinds = parser.add_subparsers(dest="what", required=True)
    bucket = kinds.add_parser("bucket")
    bucket.add_argument("--honest", type=whole, default=1000, help="replicas of the stage")
    bucket.add_argument("--ids", type=whole, nargs="+", default=[300], help="sought for one bucket")
    bucket.add_argument("--kind", choices=("both", "answer", "silent"), default="both")
    bucket.add_argument("--observers", type=whole, default=8)
    bucket.add_argument("--seconds", type=positive, default=1800.0, help="virtual, from when the observers come")
    bucket.add_argument("--seed", type=int, default=0)
    clocks = kinds.add_parser("clocks")
    clocks.add_argument("--inner-steps", type=whole, nargs="+", default=[3, 8])
    clocks.add_argument("--share", type=share, default=0.25, help="of the later stage's work that is the liar's")
    clocks.add_argument("--replicas", type=whole, default=4, help="of each stage")
    clocks.add_argument("--seeds", type=whole, default=4)
    for each in (bucket, clocks):
        each.add_argument("--out", type=results_file)
    return parser.parse_args()


def main() -> None:
    """Attack, print the table, write the JSON file."""
    options = parsed()
    began = time.process_time()
    points = {"bucket": measure_bucket, "clocks": measure_clocks}[options.what](options)
    content = {
        "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
        "processor_seconds": round(time.process_time() - began, 1),
        "asked": {name: value for name, value in vars(options).items() if name not in ("out", "what")},
        "points": points,
    }
    save(options.out, content)


if __name__ == "__main__":
    command(main)
