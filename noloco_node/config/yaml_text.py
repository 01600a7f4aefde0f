"""YAML as settings are written in it: plain values only, and bounded before anything is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import yaml
from yaml.constructor import ConstructorError

MAX_CHARACTERS = 512 * 1024
MAX_DEPTH = 32
"""The deepest nesting of groups that a file may have; the settings themselves need five levels."""
MAX_VALUES = 20_000
"""At most so many values count after aliases have been replaced: a few lines of aliases can stand for millions."""

_EXPONENT_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


def parse_yaml(text: str) -> object:
    """The value that `text` stands for. Raises yaml.YAMLError for what is no YAML, is larger or deeper than any
    settings are, or sets a key twice. It does so too for a value that cannot be made (a date in month 13), and for a
    request for anything but plain values."""
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text):,} characters, and {MAX_CHARACTERS:,} are allowed")
    _Bounds().check(text)
    return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number (YAML 1.1 reads a string) and a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; raises ConstructorError where a key is repeated."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ConstructorError(None, None, f"'{key.value}' is set twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build a value; raises ConstructorError where Python cannot make what it says."""
        try:
            return super().construct_object(node, deep)  # pyright: ignore
        except (ValueError, OverflowError) as error:
            raise ConstructorError(None, None, f"a value that cannot be: {error}", node.start_mark) from None


_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float", _EXPONENT_FLOAT, list("-+.0123456789")
)


class _Bounds:
    """Counts values and depth while the text is read, before anything is built from it.

    Building recurses, and puts in for each alias what it stands for.
    """

    def __init__(self) -> None:
        self._open: list[tuple[str | None, int]] = []
        """For each group that is not complete: its anchor, and how many values lie before it."""
        self._sizes: dict[str, int] = {}
        self._values = 0

    def check(self, text: str) -> None:
        """Raises yaml.YAMLError beyond a bound."""
        parsed: object = yaml.parse(text, _Loader)  # pyright: ignore
        for event in cast("Iterator[yaml.Event]", parsed):
            match event:
                case yaml.AliasEvent():
                    self._add(self._size_of(event), event)
                case yaml.ScalarEvent():
                    self._add(1, event)
                    self._remember(event.anchor, 1)
                case yaml.CollectionStartEvent():
                    self._open.append((event.anchor, self._values))
                    if len(self._open) > MAX_DEPTH:
                        raise _beyond(f"more than {MAX_DEPTH} groups within each other", event)
                    self._add(1, event)
                case yaml.CollectionEndEvent():
                    anchor, before = self._open.pop()
                    self._remember(anchor, self._values - before)
                case yaml.Event():
                    pass

    def _size_of(self, alias: yaml.AliasEvent) -> int:
        if any(alias.anchor == anchor for anchor, _ in self._open):
            raise _beyond(f"*{alias.anchor} stands for a group that it lies in", alias)
        return self._sizes.get(alias.anchor or "", 1)

    def _remember(self, anchor: str | None, size: int) -> None:
        if anchor is not None:
            self._sizes[anchor] = size

    def _add(self, values: int, event: yaml.Event) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise _beyond(f"more than {MAX_VALUES:,} values, counting what aliases stand for", event)


def _beyond(problem: str, event: yaml.Event) -> ConstructorError:
    return ConstructorError(None, None, problem, event.start_mark)
