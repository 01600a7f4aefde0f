"""What `deploy/verify-eval` runs: a small exported model on a task made here, beside a hand's own sums."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from noloco_node.config.load import load_config
from noloco_node.model.export import export_model, load_exported
from noloco_node.model.stage import build_stage

ROOT = Path(__file__).parent.parent
QUESTIONS = [("two and", [" two", " nine hundred"], 0), ("ab", ["c", "zz"], 1), ("to be or", [" not", " was"], 0)]
CHOICE = """\
task: made_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
TEXT = """\
task: made_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}}]
"""


def main() -> None:
    """Raises AssertionError where something is not as it should be."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        run = load_config(ROOT / "tests" / "configs" / "micro.yaml", ["run.model.stages=1"]).run
        stage = build_stage(run.model, 0)
        names = stage.full_names()
        state = {names[name]: 4.0 * tensor.detach() for name, tensor in stage.named_parameters()}
        export_model(run.model, state, folder / "model", "bytes")
        write_tasks(folder)
        arguments = ["--tasks", "made_choice,made_text", "--include-path", str(folder / "tasks")]
        rows = {row[0]: float(row[2]) for row in table(folder / "model", *arguments)}
        wanted = by_hand(folder / "model")
        print(f"lm-eval {version('lm_eval')}: {rows}; by hand: {wanted}")
        assert rows.keys() == wanted.keys()
        assert all(math.isclose(rows[name], wanted[name], abs_tol=2e-4) for name in wanted)
        assert table(folder / "model", *arguments, "--limit", "2")[0][-1] == "2"
        refused(folder / "model", "--tasks", "no_such_task", code=2)
        (folder / "tasks" / "lines.jsonl").unlink()
        refused(folder / "model", *arguments, code=11)
    print("tasks of lm-eval are run offline, and say what a hand works out")


def write_tasks(folder: Path) -> None:
    """Two YAML files and their data."""
    (folder / "tasks").mkdir()
    lines = folder / "tasks" / "lines.jsonl"
    rows = [{"question": text, "choices": choices, "answer": right} for text, choices, right in QUESTIONS]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks" / "choice.yaml").write_text(CHOICE.format(file=lines))
    (folder / "tasks" / "text.yaml").write_text(TEXT.format(file=lines))


def by_hand(folder: Path) -> dict[str, float]:
    """The same two figures out of plain log-probabilities: bytes are tokens, and a text begins after a newline."""
    model = load_exported(folder)

    def says(before: str, after: str) -> float:
        ids = torch.tensor([list((before + after).encode())])
        with torch.no_grad():
            logits: Tensor = model(ids).logits
        chances = torch.log_softmax(logits[0, :-1], -1).gather(1, ids[0, 1:, None])
        return float(chances[-len(after.encode()) :].sum())

    right = [
        max(range(2), key=lambda index: says(text, choices[index])) == answer for text, choices, answer in QUESTIONS
    ]
    bits = -sum(says("\n", text) for text, *_ in QUESTIONS) / math.log(2)
    size = sum(len(text.encode()) for text, *_ in QUESTIONS)
    return {"made_choice": sum(right) / len(right), "made_text": bits / size}


def table(folder: Path, *arguments: str) -> list[list[str]]:
    """The rows that the command prints, in words."""
    done = evaluate(folder, *arguments)
    assert done.returncode == 0, done.stderr
    print(done.stdout, end="")
    return [line.split() for line in done.stdout.splitlines()[1:]]


def refused(folder: Path, *arguments: str, code: int) -> None:
    """A command that must fail, on one screen."""
    done = evaluate(folder, *arguments)
    print(done.stderr.strip().splitlines()[-2:])
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "remedy: " in done.stderr
    assert "Traceback" not in done.stderr


def evaluate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`noloco-node eval`."""
    command = [sys.executable, "-m", "noloco_node", "eval", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


if __name__ == "__main__":
    main()
