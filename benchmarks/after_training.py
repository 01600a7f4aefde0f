"""What a pre-training is worth afterwards: the models of a laboratory file, each fine-tuned alike on tasks that can be
checked, and scored.

python -m benchmarks.after_training configs/lab/after-training.yaml --out results/after-training

The question is that of nanochat trained with DiLoCo (arXiv 2511.13761): does what replicas lose by seldom averaging
come back in fine-tuning? Every variant of the file pre-trains to equal tokens; the mean of its replicas is then
fine-tuned in one process on a mixture of two tasks made here, with the same examples in the same order, and scored by
exact answers.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.command import command, parser_of
from noloco_node.config.load import Config, load_config
from noloco_node.laboratory.canvas import Sheet, style
from noloco_node.laboratory.expansion import Point, expand
from noloco_node.laboratory.training import Training
from noloco_node.model.export import model_of
from noloco_node.sizing.footprint import footprint_of

FINE_TUNING_STEPS = 400
BATCH = 32
LEARNING_RATE = 1e-3
SCORED = 200
"""Examples of each task that are held out and scored."""


class Example(NamedTuple):
    """A question and the answer that it has, both ASCII."""

    question: str
    answer: str


def reversal(rng: random.Random) -> Example:
    """Four letters, and the same from the last to the first."""
    word = "".join(rng.choice("abcdefgh") for _ in range(4))
    return Example(f"reverse {word}: ", word[::-1] + "\n")


def largest(rng: random.Random) -> Example:
    """Four digits, and the largest of them."""
    digits = [rng.choice("0123456789") for _ in range(4)]
    return Example(f"largest of {' '.join(digits)}: ", max(digits) + "\n")


TASKS: dict[str, Callable[[random.Random], Example]] = {"reversal": reversal, "largest": largest}


class Outcome(NamedTuple):
    """One model, before and after."""

    variant: str
    seed: int
    loss: float
    """Validation loss of the pre-trained model (the mean of its replicas), nats a token."""
    scores: dict[str, float]
    """Share of exact answers after fine-tuning, by task."""
    answer_loss: float
    """Of the held-out answers after fine-tuning, nats a token."""


def examples(seed: int, count: int, *, held_out: bool) -> list[tuple[str, Example]]:
    """So many of each task, mixed; what is held out has questions that no training example of the same seed has."""
    kept: list[tuple[str, Example]] = []
    for name, make in TASKS.items():
        rng = random.Random(f"{name}/{seed}/{held_out}")
        while sum(task == name for task, _ in kept) < count:
            example = make(rng)
            if (hash_of(example.question) % 5 == 0) == held_out:
                kept.append((name, example))
    random.Random(f"mix/{seed}").shuffle(kept)
    return kept


def hash_of(question: str) -> int:
    """Equal in every process."""
    return random.Random(question).getrandbits(32)


def padded(batch: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Inputs int64 [B, T], and labels that count only where the answer is."""
    rows = [(example.question + example.answer).encode("ascii") for example in batch]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full((len(rows), width), -100)
    for index, (row, example) in enumerate(zip(rows, batch, strict=True)):
        ids[index, : len(row)] = torch.tensor(list(row))
        begin = len(example.question)
        labels[index, begin : len(row)] = ids[index, begin : len(row)]
    return ids[:, :-1].contiguous(), labels[:, 1:].contiguous()


def fine_tune(model: Any, seed: int) -> None:
    """In place: AdamW, warm-up and a straight line down, loss on answers only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    data = [example for _, example in examples(seed, FINE_TUNING_STEPS * BATCH // len(TASKS), held_out=False)]
    model.train()
    for step in range(FINE_TUNING_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20, (FINE_TUNING_STEPS - step) / FINE_TUNING_STEPS)
        inputs, labels = padded(data[step * BATCH : (step + 1) * BATCH])
        loss = F.cross_entropy(model(inputs, use_cache=False).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def scores_of(model: Any, seed: int) -> tuple[dict[str, float], float]:
    """Share of answers of which every token is the likeliest one, by task, and the mean loss of their tokens."""
    right: dict[str, list[bool]] = {name: [] for name in TASKS}
    total, tokens = 0.0, 0
    with torch.inference_mode():
        for task, example in examples(seed, SCORED, held_out=True):
            inputs, labels = padded([example])
            logits = model(inputs, use_cache=False).logits[0]
            asked = labels[0] != -100
            right[task].append(bool((logits.argmax(-1)[asked] == labels[0][asked]).all()))
            total += float(F.cross_entropy(logits[asked], labels[0][asked], reduction="sum"))
            tokens += int(asked.sum())
    return {name: statistics.mean(answers) for name, answers in right.items()}, total / tokens


def outcome(point: Point, seed: int) -> Outcome:
    """Pre-train, merge, fine-tune, score."""
    training = Training(point.run, point.world, point.algorithm, point.replicas, seed)
    training.run_to_the_end(evaluations=2, spread_points=2)
    loss = training.measured(seconds=0.0).validation_loss_merged
    assert loss is not None, f"{point.variant} diverged"
    model = model_of(point.run.model, training.merged_state())
    fine_tune(model, seed)
    return Outcome(point.variant, seed, loss, *scores_of(model, seed))


def table(outcomes: Sequence[Outcome]) -> str:
    """Means and sample deviations over the seeds, a row for each variant."""
    columns = ["variant", "loss of the pre-trained", *(f"{name}, exact" for name in TASKS), "loss of answers"]
    rows = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for variant in dict.fromkeys(each.variant for each in outcomes):
        of = [each for each in outcomes if each.variant == variant]
        cells = [spot([each.loss for each in of], "{:.4f}")]
        cells += [spot([each.scores[name] for each in of], "{:.1%}") for name in TASKS]
        cells.append(spot([each.answer_loss for each in of], "{:.4f}"))
        rows.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def page(config: Config, outcomes: Sequence[Outcome]) -> str:
    """The table under what made it."""
    run, seeds = config.run, sorted({each.seed for each in outcomes})
    return f"""# {run.name}

Repeat it with

```sh
python -m benchmarks.after_training configs/lab/after-training.yaml --out docs/results/after-training
```

{parameters_of(config):,} parameters, pre-trained on {run.inner.target_tokens:,} tokens of the text of the standard \
library with {config.lab.replicas[0]} replicas; the mean of the replicas is then fine-tuned alone, {FINE_TUNING_STEPS} \
steps of {BATCH} examples, half of either task, equal for all variants of a seed. *Exact*: share of {SCORED} held-out \
questions of which every letter of the answer is the likeliest. Mean ± sample standard deviation over seeds {seeds}, \
as many as n says. Learning rates are the file's, not tuned for this.

{table(outcomes)}
![scores](scores.png)
"""


def parameters_of(config: Config) -> int:
    """Of the whole model."""
    return sum(footprint_of(config.run).parameters)


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Each seed a dot: loss of answers and share of reversals, by the loss of the pre-trained."""
    sheet = Sheet(1, 2, title="What a pre-training is worth after fine-tuning")
    for index, variant in enumerate(dict.fromkeys(each.variant for each in outcomes)):
        of = [each for each in outcomes if each.variant == variant]
        colour, marker = style(index)
        losses = [each.loss for each in of]
        heights = ([each.answer_loss for each in of], [each.scores["reversal"] for each in of])
        for panel, values in zip(sheet.panels[0], heights, strict=True):
            panel.plot(losses, values, linestyle="none", color=colour, marker=marker, label=variant)
    for panel, name in zip(sheet.panels[0], ("loss of answers", "reversals, exact"), strict=True):
        panel.set_xlabel("loss of the pre-trained")
        panel.set_ylabel(name)
    sheet.legend()
    sheet.save(path)


def spot(values: Sequence[float], form: str) -> str:
    """Mean ± deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{form.format(statistics.mean(values))} ± {form.format(deviation)} (n = {len(values)})"


def write(config: Config, folder: Path, outcomes: Sequence[Outcome]) -> None:
    """The page and the picture."""
    (folder / "table.md").write_text(page(config, outcomes), encoding="utf-8")
    draw(outcomes, folder / "scores.png")


def main() -> None:
    """Go on where a run was cut off; say each outcome as it comes, and write the table."""
    parser = parser_of(__doc__, out=False)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE")
    options = parser.parse_args()
    config = load_config(options.config, options.set)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "outcomes.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    done = [Outcome(**json.loads(line)) for line in lines]
    for seed in config.lab.seeds:
        for point in (point for cell in expand(config) for point in cell.points):
            if any((each.variant, each.seed) == (point.variant, seed) for each in done):
                continue
            done.append(outcome(point, seed))
            with log.open("a", encoding="utf-8") as written:
                written.write(json.dumps(done[-1]._asdict()) + "\n")
            print(done[-1], flush=True)
    write(config, options.out, done)
    print(table(done))


if __name__ == "__main__":
    command(main)
