"""How much the suite tries: what `make test` has time for, or all of it (`make test-long`)."""

from __future__ import annotations

import os

LONG = bool(os.environ.get("NOLOCO_TESTS_LONG"))
"""All examples of the fuzzers, and the tests marked `long`."""


def tries(all_of_them: int, *, one_of: int = 10) -> int:
    """How many examples a fuzzer makes, of those that it has: the first tenth or such, unless all are asked for."""
    return all_of_them if LONG else -(-all_of_them // one_of)
