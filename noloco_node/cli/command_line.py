"""A parser that names what was meant, where an option or a command is none."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

from noloco_node.errors import near_words, suggestion


class CommandLine(argparse.ArgumentParser):
    """The parser of a command line, and of each of its commands."""

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
