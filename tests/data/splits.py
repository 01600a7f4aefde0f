"""All documents of a source, divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.documents import Document
from noloco_node.data.sources import divided, held_out_of
from noloco_node.data.windows import Windows


@dataclass(frozen=True, slots=True)
class Split:
    """Documents to train on and documents to validate on."""

    training: tuple[Document, ...]
    validation: tuple[Document, ...]


def load_split(spec: DataSpec) -> Split:
    """The split of a whole source."""
    found = list(divided(spec))
    return Split(*(tuple(each for each, held_out in found if held_out is part) for part in (False, True)))


def split_documents(documents: Sequence[Document], holdout: float) -> Split:
    """The split of documents in memory."""
    keys = held_out_of(documents, holdout)
    return Split(*(tuple(each for each in documents if (each.key in keys) is part) for part in (False, True)))


def held_out_count(windows: Windows) -> int:
    """Windows held out, of all sources."""
    return len(windows.validation_indices(10**6))
