"""What users and tools rely on is written down in one list: adding to it means editing the list in the same commit.

After a deliberate change: `python -m tests.test_public_surface > tests/public_surface.txt`.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from noloco_node.accounting.statements import Receipt
from noloco_node.cli.commands import parser
from noloco_node.config.load import setting_names
from noloco_node.directory.records import PeerRecord
from noloco_node.errors import EXIT_MEANINGS, ExitCode
from noloco_node.state_transfer.copies import CopyManifest
from noloco_node.state_transfer.fetch import StateManifest
from noloco_node.telemetry.events import AnyEvent
from noloco_node.telemetry.metrics import SEED_TABLE, TABLE
from noloco_node.telemetry.summary import Summary
from noloco_node.transport.errors import Refusal
from tests.swarm.wire_examples import examples

LIST = Path(__file__).parent / "public_surface.txt"


def flags(command: argparse.ArgumentParser) -> Iterator[str]:
    """Every option and argument of a command and of its sub-commands; hidden ones too."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from flags(inner)
        elif action.option_strings:
            yield f"{command.prog} {'/'.join(action.option_strings)}"
        else:
            yield f"{command.prog} {action.metavar or action.dest}"


def metrics() -> Iterator[str]:
    """Every metric with its type and labels."""
    for metric in (*TABLE.values(), *SEED_TABLE.values()):
        labels = ", ".join(metric.labels)
        yield f"{metric.name} ({metric.kind}){f' by {labels}' if labels else ''}"


def events() -> Iterator[str]:
    """Every event with its fields."""
    union, *_ = typing.get_args(AnyEvent)
    for event in typing.get_args(union):
        for name, info in event.model_fields.items():
            yield f"{event.model_fields['event'].default}.{info.serialization_alias or name}"


def _fields(name: str, model: type[BaseModel]) -> Iterator[str]:
    """Names of a header's fields, and of what lies in them."""
    for field, info in model.model_fields.items():
        yield f"{name}.{field}"
        for inner in _models(info.annotation):
            yield from _fields(f"{name}.{field}", inner)


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def headers() -> Iterator[str]:
    """Every method between nodes with the fields of its request and of its answer, and what is signed or published."""
    told: dict[str, None] = {}
    for example in examples().values():
        for side, model in (("request", example.method.request), ("answer", example.method.answer)):
            name = f"{example.method.name} {side}"
            told |= dict.fromkeys((name, *_fields(name, model)))
    yield from sorted(told)
    for model in (PeerRecord, StateManifest, CopyManifest, Receipt):
        yield from _fields(model.__name__, model)


def surface() -> str:
    """The whole list."""
    sections = {
        "command line": flags(parser()),
        "exit codes": (f"{code.value} {code.name}" for code in ExitCode),
        "settings": setting_names(),
        "events": events(),
        "summary.json": iter(Summary.model_fields),
        "metrics": iter(sorted(metrics())),
        "between nodes": headers(),
        "refusals": (str(refusal) for refusal in Refusal),
    }
    return "\n".join(f"[{title}]\n" + "\n".join(rows) + "\n" for title, rows in sections.items())


def test_the_public_surface_is_the_written_one() -> None:
    """No flag, exit code, setting, event field, figure, metric, method or field between nodes comes or goes unseen."""
    written, found = LIST.read_text(encoding="utf-8").splitlines(), surface().splitlines()
    missing, new = [row for row in written if row not in found], [row for row in found if row not in written]
    assert (missing, new) == ([], []), __doc__
    assert written == found


def test_every_exit_code_has_a_meaning_and_every_help_leads_to_them() -> None:
    """The table of exit codes is in the first help, which all others name."""
    assert set(EXIT_MEANINGS) == set(ExitCode)
    assert all(meaning in parser().format_help() for meaning in EXIT_MEANINGS.values())
    for action in parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            assert len(action.choices) > 20
            assert all("exit codes: noloco-node --help" in each.format_help() for each in action.choices.values())


if __name__ == "__main__":
    print(surface(), end="")
