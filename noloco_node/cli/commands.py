"""The list of the commands: the name of each, what it understands, and what carries it out."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from noloco_node import __version__
from noloco_node.cli import handlers
from noloco_node.cli.data import prepare_arguments, train_arguments
from noloco_node.cli.exporting import eval_arguments, export_arguments, generate_arguments
from noloco_node.cli.help_texts import DESCRIPTION, ENVIRONMENT_HELP, HELP
from noloco_node.cli.node_options import (
    doctor_arguments,
    node_arguments,
    own_text_argument,
    seed_arguments,
    set_argument,
    sizing_arguments,
)
from noloco_node.cli.simulating import simulate_arguments
from noloco_node.cli.small import (
    completion_arguments,
    health_arguments,
    init_arguments,
    list_arguments,
    pause_arguments,
    report_arguments,
    status_arguments,
    top_arguments,
    watch_arguments,
)
from noloco_node.errors import EXIT_MEANINGS, near_words, suggestion

WHERE_CODES = "exit codes: noloco-node --help"
READS_ENVIRONMENT = frozenset({"swarm", "run", "join", "seed", "doctor", "show", "validate"})
"""These commands take settings of `node:` from variables."""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = CommandLine(
        "noloco-node",
        description=DESCRIPTION,
        epilog=_exit_codes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _fill(top)
    return top


def _fill(top: argparse.ArgumentParser) -> None:
    top.add_argument("--version", action="version", version=f"noloco-node {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    swarm = _command(commands, "swarm", "train on a swarm of nodes on this machine")
    _config_arguments(swarm)
    swarm.add_argument("--run-folder", metavar="DIR", type=Path, help="where results go (default: runs/NAME-TIME)")
    swarm.set_defaults(call=handlers.swarm)
    run = _command(commands, "run", "run one node: start a swarm, or join one")
    _config_arguments(run)
    run.add_argument("--initial-peers", metavar="ADDR", nargs="+", help="nodes to join (default: start a new swarm)")
    node_arguments(run)
    run.set_defaults(call=handlers.run)
    join = _command(commands, "join", "join a run with the address of one of its nodes")
    join.add_argument("initial_peers", metavar="ADDRESS", nargs="*", default=None, help="address that a node printed")
    set_argument(join, "node.device=cuda")
    own_text_argument(join)
    node_arguments(join)
    join.set_defaults(call=handlers.join)
    status_arguments(_command(commands, "status", "show what a node does and what it has contributed"))
    pause_arguments(_command(commands, "pause", "free device and line, and come back later"), "pause")
    pause_arguments(_command(commands, "resume", "let a paused node go on"), "resume")
    report_arguments(_command(commands, "report", "make a page out of a run folder"))
    export_arguments(_command(commands, "export", "make one model out of what nodes have saved"))
    eval_arguments(_command(commands, "eval", "say what a model is worth on the run's held-out text"))
    generate_arguments(_command(commands, "generate", "let a model continue a text: exported, or while it trains"))
    _text_commands(commands)
    health_arguments(_command(commands, "health", "ask this machine's node whether it is alive"))
    top_arguments(_command(commands, "top", "watch one node in this terminal"))
    watching = "watch a whole swarm in this terminal, without joining it"
    watch_arguments(_command(commands, "watch", watching))
    seed = _command(commands, "seed", "hold a run's directory together, without a stage")
    seed_arguments(seed)
    seed.set_defaults(call=handlers.seed)
    doctor = _command(commands, "doctor", "check this machine and its network")
    doctor_arguments(doctor)
    doctor.set_defaults(call=handlers.doctor)
    lab = _command(commands, "lab", "compare algorithms on simulated replicas")
    _config_arguments(lab)
    lab.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the results go")
    lab.set_defaults(call=handlers.lab)
    simulate_arguments(_command(commands, "simulate", "run a swarm in virtual time"))
    _identity_commands(_command(commands, "identity", "make, look at, back up or bring back an identity"))
    invite = _command(commands, "invite", "invite somebody to a run that you own")
    _config_arguments(invite)
    invite.add_argument("--key", metavar="FILE", type=Path, required=True, help="the owner's private key")
    invite.add_argument("--peer", metavar="ID", help="the only node that may use it (default: any holder)")
    invite.add_argument("--hours", metavar="N", type=float, default=168.0, help="how long it holds (default: a week)")
    invite.set_defaults(call=handlers.invite)
    _config_commands(_command(commands, "config", "look at a configuration file, or write one"))
    completion_arguments(_command(commands, "completion", "complete commands in your shell"))


def _text_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    data = _command(commands, "data", "work on a text that is done once, before a run")
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True)
    prepare = _command(actions, "prepare", "tokenise a text once, for runs to read")
    _config_arguments(prepare)
    prepare_arguments(prepare)
    tokenizer = _command(commands, "tokenizer", "make a tokenizer for a run")
    actions = tokenizer.add_subparsers(title="actions", metavar="ACTION", required=True)
    train = _command(actions, "train", "learn a tokenizer from a run's text")
    _config_arguments(train)
    train_arguments(train)


def _config_commands(config: argparse.ArgumentParser) -> None:
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = _command(actions, "show", "print every setting with its value and meaning")
    _config_arguments(show)
    show.set_defaults(call=handlers.show)
    validate = _command(actions, "validate", "check a configuration and print what it comes to")
    _config_arguments(validate)
    sizing_arguments(validate)
    validate.set_defaults(call=handlers.validate)
    init_arguments(_command(actions, "init", "write an example with comments"))
    list_arguments(_command(actions, "list", "name the configurations that come with noloco-node"))


def _identity_commands(identity: argparse.ArgumentParser) -> None:
    actions = identity.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = _command(actions, "show", "print peer id, permissions, and the process that uses it")
    show.add_argument("file", metavar="FILE", type=Path, nargs="?", help="identity file")
    show.set_defaults(call=handlers.identity_show)
    create = _command(actions, "create", "make one before a node's first start")
    create.add_argument("file", metavar="FILE", type=Path, nargs="?", help="identity file")
    create.set_defaults(call=handlers.identity_create)
    export = _command(actions, "export", "write an encrypted copy")
    export.add_argument("file", metavar="FILE", type=Path, help="identity file")
    export.add_argument("--to", metavar="BACKUP", type=Path, required=True, help="the copy, a file that does not exist")
    export.set_defaults(call=handlers.identity_export)
    bring = _command(actions, "import", "bring an encrypted copy back")
    bring.add_argument("file", metavar="BACKUP", type=Path, help="what `identity export` wrote")
    bring.add_argument("--to", metavar="FILE", type=Path, help="identity file (default: runs/node/identity.key)")
    bring.set_defaults(call=handlers.identity_import)
    for command in (export, bring):
        command.add_argument("--passphrase-file", metavar="F", type=Path, help="its first line is the passphrase")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],  # pyright: ignore[reportPrivateUsage]
    name: str,
    summary: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        epilog=f"{ENVIRONMENT_HELP}\n\n{WHERE_CODES}" if name in READS_ENVIRONMENT else WHERE_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.description = HELP[command.prog.removeprefix("noloco-node ")]
    command.add_argument("--debug", action="store_true", help="on an unexpected failure show the whole traceback")
    return command


def _config_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, or a name from `config list`")
    set_argument(command, "run.inner.learning_rate=3e-3")
    own_text_argument(command)


def _exit_codes() -> str:
    rows = [f"  {code.value:>3}  {meaning}" for code, meaning in EXIT_MEANINGS.items()]
    return "\n".join(["exit codes:", *rows])


class CommandLine(argparse.ArgumentParser):
    """The parser of a command line, and of each of its commands."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """An option's beginning does not stand for it: `--device` would be read as `--devices`."""
        super().__init__(*args, allow_abbrev=False, **options)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as `ArgumentParser.parse_args`; what is left over is reported by the command that was named."""
        options, left = self.parse_known_args(args, namespace)
        if left:
            of = self._named_in(args or ())
            of.error(f"unrecognized arguments: {' '.join(left)}{of.meant(left)}")
        return options

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one line below the usage."""
        if (choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)) is not None:
            known = re.findall(r"[\w-]+", choice.group(2))
            message += _did_you_mean([choice.group(1)], known)
        super().error(message)

    def meant(self, words: Iterable[str]) -> str:
        """Which options of this command words that are none may stand for, as the end of a sentence."""
        known = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        return _did_you_mean([word.partition("=")[0] for word in words if word.startswith("-")], known)

    def _named_in(self, words: Sequence[str]) -> CommandLine:
        for word in words:
            if (inner := self._commands().get(word)) is not None:
                return inner._named_in(words[words.index(word) + 1 :])
        return self

    def _commands(self) -> Mapping[str, CommandLine]:
        for action in self._actions:
            choices: object = action.choices
            if isinstance(choices, dict):
                return cast("dict[str, CommandLine]", choices)
        return {}


def _did_you_mean(words: Iterable[str], known: Sequence[str]) -> str:
    asked = suggestion([near for word in words for near in near_words(word, known)], "and")
    return f"; {asked}" if asked else ""
