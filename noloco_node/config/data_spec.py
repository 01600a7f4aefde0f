"""The text of a run: one group of what every peer must agree on."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from noloco_node.config.settings import Settings

MAX_MASKED = 16384
"""Longest window whose attention may be cut at documents: 256 MiB for who sees whom in one of them."""
NO_TOKENIZER = "none"
"""The tokenizer of a text that is token ids, whoever made them and however."""
TEXT, SHARDS, REVISION = "text-", "shards-", "revision-"
"""What a fingerprint begins with: of all documents; of the beginnings and ends of a streamed text's shards; of a
dataset of the hub."""
HUB_DATASET = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
"""A dataset's name; by others the library reads files of this machine."""
FINGERPRINT = rf"^(({TEXT}|{SHARDS})[0-9a-f]{{32}}|{REVISION}[0-9a-f]{{40}})$"


class DataSpec(Settings):
    """The training text and how it becomes windows of tokens."""

    source: Literal["stdlib", "text", "huggingface"] = "stdlib"
    """`stdlib`: the source files of Python's standard library; `text`: files of this machine, be they text or rows;
    `huggingface`: a dataset of the hub."""
    path: str | None = None
    """A file, a folder or a glob such as `c4/en/c4-train.*.json.gz` (`text`), or a dataset's name (`huggingface`)."""
    subset: str | None = None
    """The subset of a hub's dataset, such as `en` of allenai/c4; not set takes its default."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """The split of a hub's dataset; of files of rows whose names say splits, those of this one."""
    text_field: str = "text"
    """The column of rows that holds the text, or lists of token ids that the run's tokenizer made; padding is dropped
    where a column `attention_mask` beside it is 0."""
    streaming: bool = False
    """Read the text as it is needed, shard by shard, instead of tokenising all of it at the start. A shard is a file,
    or one of a hub's dataset."""
    parts_per_shard: Annotated[int, Field(gt=0, le=1024)] = 1
    """Blocks of a shard of a streamed text: a replica reads one at a time. There should be several times as many blocks
    as replicas of the first stage."""
    block_windows: Annotated[int, Field(gt=0, le=1 << 32)] | None = None
    """Windows of a block of a text that is tokenised at the start: set, the replicas share the text out in such blocks,
    each read by one of them. A block should take a replica minutes, and there should be several times as many as
    replicas. Not set, each walks through all of the text in an order of its own."""
    fingerprint: Annotated[str, Field(pattern=FINGERPRINT)] | None = None
    """What `noloco-node config validate` prints for the text: set it so that a node that holds another one is told so
    before it trains."""
    prepared: str | None = None
    """A folder that `noloco-node data prepare` wrote of this text on this machine, to be read in its place."""
    tokenizer: str = "bytes"
    """`bytes` (vocabulary 256), or what `AutoTokenizer.from_pretrained` takes; `none` where the text is token ids and
    what they stand for is not known."""
    sequence_length: Annotated[int, Field(ge=2, le=131072)] = 128
    """Tokens that are predicted in each window."""
    attention: Literal["whole", "document"] = "whole"
    """How far back a token sees: over its `whole` window, or no further than its `document`, where positions begin
    anew; documents are packed one after the other either way."""
    holdout: Annotated[float, Field(gt=0.0, lt=0.5)] = 0.05
    """Share of whole documents held out for validation, chosen by a hash of their path."""
    seed: int = 0
    """Seed of the shuffling of windows; each stage-0 replica adds its own peer id."""

    @model_validator(mode="after")
    def _path_where_needed(self) -> DataSpec:
        if self.source != "stdlib" and not self.path and not (self.source == "text" and self.prepared):
            raise ValueError(
                f"run.data.source is '{self.source}' but run.data.path is not set: name a file, folder or dataset"
            )
        if self.source == "stdlib" and self.path:
            raise ValueError(
                "run.data.path is set but run.data.source is 'stdlib': set run.data.source to text to train on it"
            )
        if self.source == "stdlib" and self.tokenizer == NO_TOKENIZER:
            raise ValueError(
                "run.data.tokenizer is 'none' but run.data.source is 'stdlib', which is text: name one, or bytes"
            )
        if self.streaming and self.block_windows is not None:
            raise ValueError(
                "run.data.block_windows is set but run.data.streaming is on, whose blocks are parts of shards: set "
                "run.data.parts_per_shard"
            )
        if self.streaming and self.source == "stdlib":
            raise ValueError(
                "run.data.streaming is on but run.data.source is 'stdlib', which is small: leave it off, or name a text"
            )
        if self.subset is not None and self.source != "huggingface":
            raise ValueError(
                f"run.data.subset is set but run.data.source is '{self.source}': only datasets of the hub have subsets"
            )
        if self.source == "huggingface" and (self.path or "").startswith(("/", ".", "~")):
            raise ValueError(
                f"run.data.path is '{self.path}', a place on this machine, but run.data.source is 'huggingface': set "
                "run.data.source to text to read it"
            )
        if self.source == "huggingface" and not HUB_DATASET.fullmatch(self.path or ""):
            raise ValueError(
                f"run.data.path is '{self.path}', and datasets of the hub are named as OWNER/NAME, such as allenai/c4: "
                "by other names the datasets library reads files of the folder that it is started in"
            )
        if self.attention == "document" and self.sequence_length > MAX_MASKED:
            raise ValueError(
                f"run.data.attention is 'document' and run.data.sequence_length {self.sequence_length}: who sees "
                f"whom is written out for each window then, which is allowed up to {MAX_MASKED}"
            )
        return self
