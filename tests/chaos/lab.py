"""What every scenario is given: a folder, a seed, and whether there is time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Lab:
    """One run of one scenario."""

    folder: Path
    seed: int
    long: bool
    """The long form takes minutes and checks more; the short one runs with the tests."""

    def rng(self, purpose: str) -> random.Random:
        """A generator for one purpose: equal seeds give equal choices."""
        return random.Random(f"{self.seed}/{purpose}")

    def within(self, name: str) -> Lab:
        """This lab in a folder below."""
        return Lab(self.folder / name, self.seed, self.long)
