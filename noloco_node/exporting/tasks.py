"""An exported model on the tasks of lm-eval, the harness that such models are usually compared by."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from noloco_node.errors import ExitCode, UserError

EXTRA = "pip install 'noloco-node[eval]'"
SHOWN_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One figure of one task."""

    task: str
    metric: str
    value: float
    error: float | None
    """Its standard error, where there is one."""
    samples: int


def run_tasks(folder: Path, names: Sequence[str], include: Path | None, limit: int | None) -> list[TaskScore]:
    """The scores of a model folder on tasks by their names in lm-eval, or in the YAML files in `include`.

    If `limit` is given, only the first samples of each are taken. Raises UserError: CHECK_FAILED if lm-eval is not
    installed, USAGE for an unknown task. It raises RUN_FOLDER if the model cannot be loaded, DATA if a task's data
    cannot be had.
    """
    harness, managers, models = _harness()
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    manager = managers.TaskManager(include_path=None if include is None else str(include.absolute()))
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise UserError(
            ExitCode.USAGE,
            f"--tasks: lm-eval knows no {', '.join(unknown)}",
            "`lm_eval ls tasks` lists those that it brings; your own lie in --include-path, a YAML file each",
        )
    model = _model(models, folder)
    try:
        found = harness.simple_evaluate(
            model=model,
            tasks=list(names),
            task_manager=manager,
            limit=limit,
            log_samples=False,
            num_fewshot=None,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        words = " ".join(str(error).split())[:SHOWN_CHARACTERS] or type(error).__name__
        raise UserError(
            ExitCode.DATA,
            f"lm-eval gave up on {', '.join(names)}: {words}",
            "see that the task's data is there, or can be fetched: most tasks come from the Hugging Face hub",
        ) from error
    return _scores(cast("dict[str, Any]", found))


def _harness() -> tuple[Any, Any, Any]:
    try:
        names = ("lm_eval", "lm_eval.tasks", "lm_eval.models.huggingface")
        harness, managers, models = (importlib.import_module(name) for name in names)
    except ImportError as error:
        raise UserError(
            ExitCode.CHECK_FAILED,
            f"--tasks needs lm-eval, and {error.name or 'a part of it'} is not installed",
            f"install it with {EXTRA}",
        ) from None
    return harness, managers, models


def _model(models: Any, folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        first: int | None = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if first is None:
            first = cast("list[int]", tokenizer.encode("\n", add_special_tokens=False))[-1]
        if tokenizer.pad_token_id is None:  # else lm-eval adds one, which the model has no row for
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(first)
        return models.HFLM(
            pretrained=str(folder), tokenizer=tokenizer, device="cpu", dtype="float32", prefix_token_id=first
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the model in '{folder}' cannot be used: {' '.join(str(error).split())[:SHOWN_CHARACTERS]}",
            "copy it again as a whole, or export it anew",
        ) from error


def _scores(found: Mapping[str, Any]) -> list[TaskScore]:
    """lm-eval names a figure `metric,filter`, and its error `metric_stderr,filter`."""
    rows: list[TaskScore] = []
    for task, figures in cast("dict[str, dict[str, Any]]", found["results"]).items():
        samples = int(found.get("n-samples", {}).get(task, {}).get("effective", 0))
        for name, value in figures.items():
            metric, _, kind = name.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = figures.get(f"{metric}_stderr,{kind}")
            shown = metric if kind == "none" else f"{metric} ({kind})"
            rows.append(TaskScore(task, shown, float(value), error if isinstance(error, float) else None, samples))
    return rows
