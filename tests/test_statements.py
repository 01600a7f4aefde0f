"""How statements are counted."""

from __future__ import annotations

from benchmarks.statements import statements

SOURCE = '''"""A file."""
import os

LIMIT = 3
"""What is above."""


class Peer:
    """One."""

    def ask(self) -> str:
        """Its answer."""
        if os.name:
            return "a text that is returned"
        return ""
'''


def test_texts_that_stand_alone_are_no_statements() -> None:
    """Import, assignment, class, method, branch and two returns are seven; four docstrings are none."""
    assert statements(SOURCE) == 7
