"""The folder of one node's run, and where things lie in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from noloco_node.errors import ExitCode, UserError
from noloco_node.storage import atomic


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run folder that can be written."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make the folder, or take the one that is there, and prove by a written file that it can be written.

        Raises UserError (RUN_FOLDER) where it cannot.
        """
        probe = path / ".probe"
        try:
            path.mkdir(parents=True, exist_ok=True)
            atomic.write_bytes(probe, b"noloco-node")
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"run_folder is '{path}', which cannot be written: {error.strerror or error}",
                "name a folder that does not exist yet or that you may write to, on a disk with space left",
            ) from error
        return cls(path)

    @property
    def events(self) -> Path:
        """The event file: typed JSON lines."""
        return self.path / "events.jsonl"

    @property
    def identity(self) -> Path:
        """The private key behind the peer id, where no other is named."""
        return self.path / "identity.key"

    @property
    def contribution(self) -> Path:
        """The signed record of what the node has contributed."""
        return self.path / "contribution.jsonl"

    @property
    def log(self) -> Path:
        """The log for people."""
        return self.path / "node.log"

    @property
    def final(self) -> Path:
        """The stage's weights at the end of the run."""
        return self.path / "final"
