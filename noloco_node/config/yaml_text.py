"""YAML as settings are written in it: plain values only, and no more of them than settings have."""

from __future__ import annotations

import re
from typing import Any, cast

import yaml
from yaml.constructor import ConstructorError

MAX_CHARACTERS = 512 * 1024
MAX_VALUES = 20_000
"""At most so many values count after aliases have been replaced: a few lines of aliases can stand for millions."""

_EXPONENT_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


def parse_yaml(text: str) -> object:
    """The value that `text` stands for. Raises yaml.YAMLError for what is no YAML, is larger or deeper than any
    settings are, or sets a key twice. It does so too for a value that cannot be made (a date in month 13), and for a
    request for anything but plain values."""
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text):,} characters, and {MAX_CHARACTERS:,} are allowed")
    try:
        value: object = yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("its groups lie too deep within each other") from None
    _check_size(value)
    return value


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


def _check_size(value: object) -> None:
    """Raise yaml.YAMLError for more values than any settings have; what an alias stands for counts each time."""
    waiting, count = [value], 0
    while waiting:
        each = waiting.pop()
        count += 1
        if count > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values, counting what aliases stand for")
        if isinstance(each, dict):
            waiting += cast("dict[object, object]", each).values()
        elif isinstance(each, list):
            waiting += cast("list[object]", each)
