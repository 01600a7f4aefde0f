"""The text of a run: one group of what every peer must agree on."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from noloco_node.config.settings import PositiveFloat, Settings

MAX_MASKED = 16384
"""Longest window whose attention may be cut at documents: the mask of one of them takes 256 MiB."""
BYTES = "bytes"
"""The name of the built-in tokenizer: a token is a byte of the UTF-8 text."""
NO_TOKENIZER = "none"
"""The tokenizer of a text that is token ids, however they were made."""
TEXT, SHARDS, REVISION = "text-", "shards-", "revision-"
"""A fingerprint begins with one of these. The first is of all documents, the second of the beginnings and ends of a
streamed text's shards. The third is of a dataset of the hub, or a tokenizer there."""
FOLDER = "tokenizer-"
"""The fingerprint of a tokenizer's files begins so."""
NOT_PREPARED = "a streamed text is read as it goes by, from the text alone"
"""Why a streamed text has no prepared tokens."""
NOT_READ = "(not named: only stage 0 reads the text)"
"""This stands for a path of a volunteer's own choice, on a node that does not read what lies there."""
HUB_DATASET = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
"""The form of a dataset's name; by other names the library reads files of this machine."""
PASS_WINDOWS = 1000
"""A pass through a mixture has so many windows, and every source has its share in each."""
MOST_SOURCES = 64
"""A mixture has at most so many sources."""
MOST_ROWS = 8
"""A mixture read in blocks has at most so many sources: replicas say of each which blocks they hold."""
Source = Literal["stdlib", "text", "huggingface"]
FINGERPRINT = rf"^(({TEXT}|{SHARDS})[0-9a-f]{{32}}|{REVISION}[0-9a-f]{{40}})$"
TOKENIZER_FINGERPRINT = rf"^({FOLDER}[0-9a-f]{{32}}|{REVISION}[0-9a-f]{{40}})$"


_NO_ENCODINGS = frozenset({"idna", "punycode", "unicode-escape", "raw-unicode-escape", "undefined", "mbcs", "oem"})
"""Python has these encodings, but no file has."""


def _encoding(name: str) -> str:
    """The name that Python has for it. ValueError where it has none."""
    try:
        known = codecs.lookup(name).name
        "".encode(known)
    except LookupError:
        known = ""
    if not known or known in _NO_ENCODINGS:
        raise ValueError(
            f"run.data.encoding is '{name}', which is no encoding of texts: utf-16-le and gb18030 are some"
        )
    return known


Encoding = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,32}$"), AfterValidator(_encoding)]


class MixedSource(Settings):
    """One of several sources that a run trains on."""

    source: Source
    """Kind of this source, as `run.data.source`."""
    path: str | None = None
    """Place of a `text` source, as `run.data.path`; it is no part of the run."""
    subset: str | None = None
    """Subset of a hub's dataset, as `run.data.subset`."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Split to read, as `run.data.split`."""
    text_field: str = "text"
    """Column of the text, as `run.data.text_field`."""
    encoding: Encoding | None = None
    """Encoding of the text, as `run.data.encoding`."""
    fingerprint: Annotated[str, Field(pattern=FINGERPRINT)] | None = None
    """Fingerprint of this source alone, as `run.data.fingerprint`: a node with another text is told which source it
    is."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,39}$")] | None = None
    """What figures of this source are shown under. Not set: the dataset's name, `text` or `stdlib`."""
    weight: PositiveFloat = 1.0
    """Its share of the windows, beside the weights of the others."""

    @property
    def shown(self) -> str:
        """What figures of this source are shown under, if no other source is."""
        hub = "/".join(filter(None, (self.path, self.subset))) if self.source == "huggingface" else self.source
        return self.name or hub[:80]


class DataSpec(Settings):
    """The training text and how it becomes windows of tokens."""

    source: Source = "stdlib"
    """`stdlib`: the source files of Python's standard library; `text`: files of this machine, be they text or rows;
    `huggingface`: a dataset of the hub."""
    path: str | None = None
    """A file, a folder or a glob such as `c4/en/c4-train.*.json.gz` (`text`), or a dataset's name (`huggingface`)."""
    subset: str | None = None
    """The subset of a hub's dataset, such as `en` of allenai/c4; not set takes its default."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """The split of a hub's dataset; it also selects files of rows, if their names say splits."""
    text_field: str = "text"
    """The column of rows that holds the text, or lists of token ids that the run's tokenizer made. Padding is dropped
    where a column `attention_mask` beside it is 0."""
    encoding: Encoding | None = None
    """What text, JSON and CSV files are written in, such as `gb18030` or `utf-16-le`, where no mark at their beginning
    says it. Not set: UTF-8."""
    mixture: Annotated[tuple[MixedSource, ...], Field(max_length=MOST_SOURCES)] = ()
    """Several sources in place of the one above, each with a weight: of every 1,000 windows each gives its share."""
    streaming: bool = False
    """Read the text as it is needed, shard by shard, instead of tokenising all of it at the start. A shard is a file,
    or one of a hub's dataset."""
    parts_per_shard: Annotated[int, Field(gt=0, le=1024)] = 1
    """Blocks of a shard of a streamed text: a replica reads one at a time. There should be several times as many blocks
    as replicas of the first stage."""
    block_windows: Annotated[int, Field(gt=0, le=1 << 32)] | None = None
    """Windows of a block of a text that is tokenised at the start. If set, the replicas share the text out in such
    blocks, each read by one of them. A block should take a replica minutes, and there should be several times as many
    as replicas. If not set, each walks through all of the text in an order of its own."""
    fingerprint: Annotated[str, Field(pattern=FINGERPRINT)] | None = None
    """What `noloco-node config validate` prints for the text: set it so that a node that holds another one is told so
    before it trains."""
    prepared: str | None = None
    """A folder on this machine that `noloco-node data prepare` wrote of this text, or of all sources of a mixture. It
    is read in place of the text, which is not streamed then."""
    tokenizer: str = BYTES
    """`bytes` (vocabulary 256), a folder of this machine, or a name of the Hugging Face hub. `none` is for a text of
    token ids with unknown meaning. The place of a volunteer's folder is no part of the run."""
    tokenizer_fingerprint: Annotated[str, Field(pattern=TOKENIZER_FINGERPRINT)] | None = None
    """What the tokenizer is. For a folder it is taken from its files if it is not set, and a node with another one is
    refused. For a name of the hub it is the revision that is loaded, if it is set."""
    sequence_length: Annotated[int, Field(ge=2, le=131072)] = 128
    """Tokens that are predicted in each window."""
    attention: Literal["whole", "document"] = "whole"
    """How far back a token sees: over its `whole` window, or no further than its `document`. With the latter, positions
    begin anew at each document. Documents are packed one after the other either way."""
    holdout: Annotated[float, Field(gt=0.0, lt=0.5)] = 0.05
    """Share of whole documents held out for validation, chosen by a hash of their path."""
    seed: int = 0
    """Seed of the shuffling of windows; each stage-0 replica adds its own peer id."""

    @property
    def is_here(self) -> bool:
        """Whether this machine was told where each text and the tokenizer lie of which each volunteer has a copy."""
        texts = () if self.prepared is not None else (self.path, *(each.path for each in self.mixture))
        return NOT_READ not in (self.tokenizer, *texts)

    @property
    def own_tokenizer(self) -> bool:
        """Tell whether the tokenizer is a folder, of which each node that needs it has a copy of its own."""
        return (self.tokenizer_fingerprint or "").startswith(FOLDER)

    @property
    def tokenizer_revision(self) -> str | None:
        """The revision of a tokenizer of the hub, if the run names one."""
        fingerprint = self.tokenizer_fingerprint or ""
        return fingerprint.removeprefix(REVISION) if fingerprint.startswith(REVISION) else None

    @property
    def parts(self) -> tuple[DataSpec, ...]:
        """The text of each source by itself: of a mixture its sources, else this one. They are for reading: settings of
        the whole, such as the fingerprint, are not in those of a mixture."""
        return tuple(self._part(*each) for each in enumerate(self.mixture)) or (self,)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts of a mixture, no two the same; a single text has none."""
        often = Counter(each.shown for each in self.mixture)
        return tuple(
            each.shown if often[each.shown] == 1 else f"{each.shown} [{number}]"
            for number, each in enumerate(self.mixture)
        )

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the parts."""
        return tuple(each.weight for each in self.mixture) or (1.0,)

    def _part(self, number: int, part: MixedSource) -> DataSpec:
        prepared = None if self.prepared is None else f"{self.prepared}/source-{number:02}"
        own = part.model_dump(exclude={"weight", "name"})
        return self.model_copy(update={**own, "mixture": (), "prepared": prepared})

    @model_validator(mode="after")
    def _sources_are_whole(self) -> DataSpec:
        if not self.mixture:
            _check_place(self, "run.data", self.tokenizer, prepared=self.prepared is not None)
            return self
        for number, part in enumerate(self.mixture):
            _check_place(part, f"run.data.mixture[{number}]", self.tokenizer, prepared=self.prepared is not None)
        one = DataSpec.model_fields
        for name in ("source", "path", "subset", "split", "text_field", "encoding"):
            if getattr(self, name) != one[name].default:
                raise ValueError(
                    f"run.data.mixture is set, and run.data.{name} is of a single source: leave it out, or name it in "
                    "run.data.mixture"
                )
        named = [part.name for part in self.mixture if part.name is not None]
        if len(set(named)) < len(named):
            raise ValueError(f"run.data.mixture: two sources have one name ({', '.join(named)}): each needs its own")
        for number, quota in enumerate(apportioned(self.weights, PASS_WINDOWS)):
            if not quota:
                raise ValueError(
                    f"run.data.mixture[{number}].weight is {self.mixture[number].weight:g} of {sum(self.weights):g}: "
                    f"less than one window of {PASS_WINDOWS:,}, so that it would never be read; raise it, or leave "
                    "the source out"
                )
        self._check_mixed_blocks()
        return self

    def _check_mixed_blocks(self) -> None:
        """ValueError where sources cannot be read in blocks, each by itself."""
        if not self.streaming and self.block_windows is None:
            return
        if len(self.mixture) > MOST_ROWS:
            name = "streaming" if self.streaming else "block_windows"
            raise ValueError(
                f"run.data.mixture has {len(self.mixture)} sources, and run.data.{name} is set: replicas tell each "
                f"other which blocks of each they read, which they do of {MOST_ROWS} at the most; put some together in "
                f"one folder or glob, or leave run.data.{name} out"
            )
        for number, part in enumerate(self.mixture if self.streaming else ()):
            if part.source == "stdlib":
                raise ValueError(
                    f"run.data.streaming is on but run.data.mixture[{number}].source is 'stdlib', which is small: "
                    "leave it off, or name a text"
                )
            if part.source == "huggingface" and self.fingerprint is not None:
                raise ValueError(
                    "run.data.fingerprint is set, of the whole mixture, but the revision of a source that is streamed "
                    f"from the hub is its own: set run.data.mixture[{number}].fingerprint in its place, and those of "
                    "the other sources"
                )

    @model_validator(mode="after")
    def _of_one_mind(self) -> DataSpec:
        if self.tokenizer_fingerprint is not None and self.tokenizer in (BYTES, NO_TOKENIZER):
            raise ValueError(
                f"run.data.tokenizer_fingerprint is set but run.data.tokenizer is '{self.tokenizer}', which has none: "
                "name the tokenizer's folder, or leave the fingerprint out"
            )
        if self.streaming and self.block_windows is not None:
            raise ValueError(
                "run.data.block_windows is set but run.data.streaming is on, whose blocks are parts of shards: set "
                "run.data.parts_per_shard"
            )
        if self.streaming and self.prepared is not None:
            raise ValueError(
                f"run.data.prepared is set but run.data.streaming is on, and {NOT_PREPARED}: leave one of them out"
            )
        if self.streaming and self.source == "stdlib" and not self.mixture:
            raise ValueError(
                "run.data.streaming is on but run.data.source is 'stdlib', which is small: leave it off, or name a text"
            )
        if self.attention == "document" and self.sequence_length > MAX_MASKED:
            raise ValueError(
                f"run.data.attention is 'document' and run.data.sequence_length {self.sequence_length}: "
                f"each window then has an attention mask, which is allowed up to {MAX_MASKED}"
            )
        return self


def apportioned(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """`count` things divided by weight, each weight above 0: off by less than one, the largest remainders rounded up
    (of equal ones the first)."""
    whole = sum(map(Fraction, weights))
    exact = [Fraction(weight) * count / whole for weight in weights]
    floors = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: floors[number] - exact[number])
    up = frozenset(by_remainder[: count - sum(floors)])
    return tuple(floor + (number in up) for number, floor in enumerate(floors))


def _check_place(place: DataSpec | MixedSource, where: str, tokenizer: str, *, prepared: bool) -> None:
    """Raise ValueError if the settings of a source, which are named `where`, contradict each other."""
    source, path = place.source, place.path
    if source != "stdlib" and not path and not (source == "text" and prepared):
        raise ValueError(f"{where}.source is '{source}' but {where}.path is not set: name a file, folder or dataset")
    if source == "stdlib" and path:
        raise ValueError(
            f"{where}.path is set but {where}.source is 'stdlib': set {where}.source to text to train on it"
        )
    if source == "stdlib" and tokenizer == NO_TOKENIZER:
        raise ValueError(
            f"run.data.tokenizer is '{NO_TOKENIZER}' but {where}.source is 'stdlib', which is text: name one, or bytes"
        )
    if place.subset is not None and source != "huggingface":
        raise ValueError(
            f"{where}.subset is set but {where}.source is '{source}': only datasets of the hub have subsets"
        )
    if place.encoding is not None and source != "text":
        raise ValueError(
            f"{where}.encoding is set but {where}.source is '{source}': only files of this machine have one"
        )
    if source == "huggingface" and (path or "").startswith(("/", ".", "~")):
        raise ValueError(
            f"{where}.path is '{path}', a place on this machine, but {where}.source is 'huggingface': set "
            f"{where}.source to text to read it"
        )
    if source == "huggingface" and not HUB_DATASET.fullmatch(path or ""):
        raise ValueError(
            f"{where}.path is '{path}', and datasets of the hub are named as OWNER/NAME, such as allenai/c4: by other "
            "names the datasets library reads files of the folder that it is started in"
        )
