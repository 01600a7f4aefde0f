"""A folder of weights to start from, as far as its headers tell: its config, its tensors, and one short name for them.

Reads no weights but the samples that the name is made of, and loads nothing heavy but the names of an architecture's
settings.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any, cast

from noloco_node.config.environment import hub_remedy, hub_token
from noloco_node.config.files import home_place
from noloco_node.config.tokenizer_files import FETCH, POINTER, is_pointer
from noloco_node.errors import ExitCode, UserError

PREFIX = "weights-"
ACCEPTED_UNDECLARED = frozenset(
    {"model_type", "head_dim", "torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor"}
)
"""Config classes take these keys although they declare no such field."""
_OF_THE_FILE = frozenset({"architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"})
"""These keys of a config.json say nothing about the model."""
_SIZES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The bytes of a number of each type that a run can begin with."""
_SAMPLE_BYTES = 4096
_SAMPLES = 4
"""If a tensor is larger than all samples together, so many pieces of it are read, from its start to its end."""
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HUB_NAME = re.compile(r"([\w-][\w.-]*)/[\w-][\w.-]*")
"""OWNER/NAME: a bare name is that of a folder, and what a folder here begins is a path."""
_BARE_NAME = re.compile(r"[\w-][\w.-]*")
_AGAIN = "get the file again from where the model comes from"
_WANTED = ("config.json", "*.safetensors", _INDEX)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: in `file` from byte `start` to `end`, row by row."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A folder of weights."""

    folder: Path
    config: Mapping[str, Any]
    """The part of its config.json that says something about the model."""
    dropped: tuple[str, ...]
    """Keys of config.json that the architecture does not know."""
    tensors: Mapping[str, StoredTensor]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.end - tensor.start for tensor in self.tensors.values())

    def fingerprint(self) -> str:
        """`weights-` and 32 hex digits, of the tensors' names, types and shapes, and of samples of their content, 16
        KiB each. It is the same however they are divided among files. Two that differ only between the samples have the
        same. Raises UserError (DATA) if a file cannot be read."""
        found = hashlib.blake2b(digest_size=16)
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            found.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
            with _reading(tensor.file), tensor.file.open("rb", buffering=0) as file:
                for start, end in _sampled(tensor):
                    file.seek(start)
                    found.update(file.read(end - start))
        return PREFIX + found.hexdigest()


@contextmanager
def _reading(path: Path) -> Generator[None]:
    """Turns what the system says of a file into a UserError (DATA)."""
    try:
        yield
    except OSError as error:
        raise _unusable(path, f"it cannot be read: {error.strerror or error}", _AGAIN) from None


def open_pretrained(name: str) -> Pretrained:
    """The folder of that path, or the hub's model of that name (OWNER/NAME), which is fetched into the hub's cache.
    Raises UserError (DATA) if there is no such folder or model, or it has no config or no safetensors. It does so too
    if a file of it is missing or cut short."""
    folder = _folder(name)
    raw = _json(folder / "config.json", "a folder of weights has one; name the folder that holds it")
    if "quantization_config" in raw:
        raise _unusable(
            folder, "its weights are quantised, and those cannot be trained", "name the model before it was quantised"
        )
    if not isinstance(model_type := raw.get("model_type"), str):
        raise _unusable(folder / "config.json", "it names no model_type", "name the folder of a transformers model")
    known = setting_names(model_type)
    kept = {key: value for key, value in raw.items() if key not in _OF_THE_FILE and not key.startswith("_")}
    dropped = tuple(sorted(key for key in kept if known is not None and key not in known))
    config = {key: value for key, value in kept.items() if key not in dropped}
    return Pretrained(folder, config, dropped, dict(_tensors(folder)))


def setting_names(model_type: str) -> frozenset[str] | None:
    """The keys that an architecture's config takes; None where transformers has no such architecture."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    kind = CONFIG_MAPPING[model_type]
    names = frozenset(field.name for field in fields(kind))
    return names | {each for pair in kind.attribute_map.items() for each in pair} | ACCEPTED_UNDECLARED


def _aliases(model_type: str) -> dict[str, str]:
    """The other name of settings that have two."""
    from transformers import CONFIG_MAPPING

    pairs = CONFIG_MAPPING[model_type].attribute_map.items() if model_type in CONFIG_MAPPING else ()
    return {one: other for pair in pairs for one, other in (pair, pair[::-1])}


def with_pretrained(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as written, with the config and the fingerprint of the weights in `run.model.from_pretrained`.

    What is given stays. If the folder ties its embeddings and there are several stages, `tie_word_embeddings` becomes
    false.

    Raises UserError: DATA as `open_pretrained` does, and if `run.model.fingerprint` is another; CONFIG if another
    architecture is given.
    """
    run = raw.get("run")
    model = cast("dict[str, Any]", run).get("model") if isinstance(run, dict) else None
    name = cast("dict[str, Any]", model).get("from_pretrained") if isinstance(model, dict) else None
    given = cast("dict[str, Any]", model).get("config") if isinstance(model, dict) else None
    if not isinstance(name, str) or not isinstance(given, dict | None):
        return dict(raw)  # for the validation to judge
    found = open_pretrained(name)
    own = cast("dict[str, Any]", given or {})
    if (model_type := own.get("model_type", found.config["model_type"])) != found.config["model_type"]:
        raise UserError(
            ExitCode.CONFIG,
            f"run.model.config.model_type is '{model_type}', but the weights of run.model.from_pretrained are those of "
            f"a '{found.config['model_type']}'",
            "leave run.model.config out: the folder's own config is taken",
        )
    settled = cast("dict[str, Any]", model)
    aliases = _aliases(model_type)
    config = {key: value for key, value in found.config.items() if aliases.get(key) not in own} | own
    if settled.get("stages", 1) != 1 and "tie_word_embeddings" not in own and ties(found):
        config["tie_word_embeddings"] = False
    fingerprint = found.fingerprint()
    if settled.get("fingerprint") not in (None, fingerprint):
        raise other_weights(name, fingerprint, str(settled["fingerprint"]))
    changed = {**settled, "config": config, "fingerprint": fingerprint}
    return {**raw, "run": {**cast("dict[str, Any]", run), "model": changed}}


def ties(found: Pretrained) -> bool:
    """Whether embedding and head are one matrix in the folder, under either name."""
    return not all(
        any(name.endswith(one) for name in found.tensors) for one in ("lm_head.weight", "embed_tokens.weight")
    )


def other_weights(name: str, found: str, wanted: str) -> UserError:
    """The refusal of weights that are not the run's."""
    return UserError(
        ExitCode.DATA,
        f"the weights of run.model.from_pretrained ('{name}') are not the run's: their fingerprint is {found}, and "
        f"run.model.fingerprint is {wanted}",
        "get the folder that the run's owner has; an owner that means these weights sets run.model.fingerprint "
        "to theirs, or leaves it out",
    )


def _folder(name: str) -> Path:
    path = home_place(name)
    if path.is_dir():
        return path
    if path.exists():
        raise _unusable(path, "it is a file", "name the folder that holds it")
    of_hub = _HUB_NAME.fullmatch(name)
    if of_hub is None or Path(of_hub[1]).is_dir():
        why = "it does not exist"
        if not path.is_absolute():
            why += f": there is no folder {_looked_at(name)}; a relative path counts from where the command is started"
            why += ", not from its configuration file"
        remedy = "name a folder of a transformers model, or OWNER/NAME of the hub"
        if _BARE_NAME.fullmatch(name):
            why += "; and it is no model of the hub, whose names begin with their owner's"
            remedy += ", such as openai-community/gpt2"
        raise _unusable(Path(name), why, remedy)
    return _fetched(name)


def _looked_at(name: str) -> Path:
    return home_place(name).absolute()


def _fetched(name: str) -> Path:
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_WANTED), token=hub_token()))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = " ".join(str(error).split())[:300]
        raise UserError(
            ExitCode.DATA,
            f"run.model.from_pretrained is '{name}': there is no folder {_looked_at(name)}, and the hub gives no model "
            f"of that name: {why}",
            f"check the name and the network, or name a folder that holds the model{hub_remedy()}",
        ) from None


def _tensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    if (folder / _INDEX).is_file():
        named = _json(folder / _INDEX, _AGAIN).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):  # pyright: ignore
            raise _unusable(folder / _INDEX, "it says nothing of where the tensors lie", _AGAIN)
        where = cast("dict[str, str]", named)
        files = {name: dict(_of_file(_shard(folder, name))) for name in sorted(set(where.values()))}
        for tensor, file in where.items():
            if tensor not in files[file]:
                raise _unusable(folder / file, f"it does not hold {tensor}, which {_INDEX} places there", _AGAIN)
            yield tensor, files[file][tensor]
        return
    if not (folder / _SINGLE).is_file():
        raise _no_safetensors(folder)
    yield from _of_file(folder / _SINGLE)


def _shard(folder: Path, name: str) -> Path:
    path = folder / name
    if Path(name).name != name:
        raise _unusable(folder / _INDEX, f"it names a file elsewhere: {name[:200]}", _AGAIN)
    if not path.is_file():
        raise _unusable(path, f"it is missing, and {_INDEX} names it", _AGAIN)
    return path


def _of_file(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    with _reading(path):
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # safetensors itself bounds a header so.
            text = file.read(length) if length <= min(100 << 20, size) else b""
            file.seek(0)
            if is_pointer(file.read(size if size < _SAMPLE_BYTES else 0)):
                raise _unusable(path, POINTER, FETCH)
    base = 8 + length
    try:
        header = cast("dict[str, Any]", json.loads(text))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = (int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(count) for count in entry["shape"])
            if not 0 <= start <= end <= size - base:
                raise _unusable(path, f"it is cut short: {size:,} bytes, and {name} ends at {base + end:,}", _AGAIN)
            dtype = str(entry["dtype"])
            if any(count < 0 for count in shape) or (dtype in _SIZES and end - start != prod(shape) * _SIZES[dtype]):
                raise ValueError(name)  # it would be read out of others' numbers
            yield name, StoredTensor(path, dtype, shape, base + start, base + end)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise _unusable(path, "it is no safetensors file, or it is damaged", _AGAIN) from None


def _sampled(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    size = tensor.end - tensor.start
    if size <= _SAMPLES * _SAMPLE_BYTES:
        yield tensor.start, tensor.end
        return
    for index in range(_SAMPLES):
        start = tensor.start + (size - _SAMPLE_BYTES) * index // (_SAMPLES - 1)
        yield start, start + _SAMPLE_BYTES


def _json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        parsed: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _unusable(path, "it does not exist", remedy) from None
    except OSError as error:
        raise _unusable(path, f"it cannot be read: {error.strerror or error}", remedy) from None
    except (ValueError, RecursionError):
        pointer = is_pointer(path.read_bytes())
        raise _unusable(path, POINTER if pointer else "it is no JSON", FETCH if pointer else _AGAIN) from None
    if not isinstance(parsed, dict):
        raise _unusable(path, "it is no JSON object", _AGAIN)
    return cast("dict[str, Any]", parsed)


def _no_safetensors(folder: Path) -> UserError:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled:
        return _unusable(
            folder,
            f"its weights are in pickled files ({', '.join(pickled[:3])}), which may run any program when they are "
            "read, and not in safetensors",
            "convert it once where you trust it: load it with transformers and save_pretrained it to another folder",
        )
    return _unusable(folder, f"it holds neither {_SINGLE} nor {_INDEX}", "name the folder that holds the weights")


def _unusable(path: Path, why: str, remedy: str) -> UserError:
    return UserError(ExitCode.DATA, f"run.model.from_pretrained: '{path}': {why}", remedy)
