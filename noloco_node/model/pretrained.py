"""A stage's first weights out of a folder of weights: its own tensors, read slice by slice, in fp32. What is wrong with
such a folder is said before anything is read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO

import torch
from torch import Tensor

from noloco_node.config.model_spec import ModelSpec
from noloco_node.config.pretrained import Pretrained, StoredTensor, open_pretrained, other_weights, ties
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import SHOWN, ExitCode, UserError
from noloco_node.finite import all_finite
from noloco_node.model.cut import build_config, build_on_meta
from noloco_node.model.subspace import WRITERS, basis_of, bound_layers, is_in_span, outside_subspace

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_OTHER_NAMES = (("", ""), (".mlp.", ".block_sparse_moe."))
"""A part of a name, and the same part as older files write it."""
_FUSED = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
"""Experts that a model holds as one tensor, and the matrices that files have of each expert. The matrices lie one after
the other in the tensor's rows; files name them in the way of one family or another."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_AT_ONCE = 16 << 20
"""The count of numbers that are read at a time: no stage needs room for its weights twice."""
_COMPILED = "_orig_mod."
"""torch.compile puts this into the names of a module's parameters."""
_BASE = "model."
"""This stands before the names of all parameters but the head's."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensor that one parameter is made of, or for each expert the matrices whose rows are put together."""

    parts: tuple[tuple[str, ...], ...]
    stacked: bool


class Weights:
    """Reads the parameters of a run's model out of the folder that it starts from."""

    def __init__(self, spec: ModelSpec) -> None:
        """Raises UserError (DATA) as `open_pretrained` does, and where the weights are not the run's."""
        assert spec.from_pretrained is not None
        self._name = spec.from_pretrained
        self._found = open_pretrained(self._name)
        if spec.fingerprint is not None and (fingerprint := self._found.fingerprint()) != spec.fingerprint:
            raise other_weights(self._name, fingerprint, spec.fingerprint)
        self._stored = {_as_causal(name, self._found.tensors): name for name in self._found.tensors}
        """The name in the file of each tensor, by its name in the causal language model."""

    @property
    def found(self) -> Pretrained:
        return self._found

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """Raise UserError (DATA) if these parameters, by full name, are not all there in these shapes. Returns the
        names of the stored tensors that they are made of. Reads no weights."""
        missing = [name for name in shapes if self._source(name, shapes[name]) is None]
        if missing:
            more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            raise self._unfit(f"it has no {', '.join(missing[:SHOWN])}{more}")
        used: set[str] = set()
        for name, shape in shapes.items():
            source = self._source(name, shape)
            assert source is not None
            self._check_shape(name, shape, source)
            used |= {part for parts in source.parts for part in parts}
        return used

    def read(self, name: str, into: Tensor) -> None:
        """Fill a parameter of that full name, after `check`. Raises UserError (DATA) where the file cannot be read and
        for what is no number."""
        source = self._source(name, tuple(into.shape))
        assert source is not None
        targets = [(into[index] if source.stacked else into, parts) for index, parts in enumerate(source.parts)]
        with torch.no_grad():
            for target, parts in targets:
                start = 0
                for part in parts:
                    rows = target.shape[0] // len(parts)
                    self._read_tensor(part, target[start : start + rows])
                    start += rows
        if not all_finite(into):
            raise self._unfit(f"{name} holds NaN or infinity")

    def _read_tensor(self, name: str, into: Tensor) -> None:
        stored = self._found.tensors[name]
        dtype, flat = _DTYPES[stored.dtype], into.view(-1)
        try:
            with stored.file.open("rb", buffering=0) as file:
                file.seek(stored.start)
                for start in range(0, flat.numel(), _AT_ONCE):
                    part = flat[start : start + _AT_ONCE]
                    room = bytearray(part.numel() * dtype.itemsize)
                    if not _filled(file, memoryview(room)):
                        raise self._unfit(f"{stored.file} ends within {name}")
                    part.copy_(torch.frombuffer(room, dtype=dtype))
        except OSError as error:
            raise self._unfit(f"{name} cannot be read: {error.strerror or error}") from None

    def _source(self, name: str, shape: tuple[int, ...]) -> _Source | None:
        """Where a parameter comes from; None where the folder does not have it."""
        tensors = self._stored
        for ours, theirs in _OTHER_NAMES:
            if ours and ours not in name:
                continue
            stored = name.replace(ours, theirs) if ours else name
            if stored in tensors:
                return _Source(((tensors[stored],),), stacked=False)
            if (source := self._experts(stored, shape)) is not None:
                return source
        if name == HEAD and EMBEDDING in tensors:
            return _Source(((tensors[EMBEDDING],),), stacked=False)
        if name == EMBEDDING and HEAD in tensors and self._says_tied():  # one matrix, saved by its other name
            return _Source(((tensors[HEAD],),), stacked=False)
        return None

    def _says_tied(self) -> bool:
        """Whether the folder's own config makes embedding and head one matrix."""
        return bool(build_config(ModelSpec(config=dict(self._found.config))).tie_word_embeddings)

    def _experts(self, name: str, shape: tuple[int, ...]) -> _Source | None:
        prefix, _, last = name.rpartition(".")
        if len(shape) != 3 or not prefix.endswith(".experts"):
            return None
        for matrices in _FUSED.get(last, ()):
            parts = tuple(
                tuple(f"{prefix}.{expert}.{matrix}.weight" for matrix in matrices) for expert in range(shape[0])
            )
            if all(part in self._stored for each in parts for part in each):
                return _Source(tuple(tuple(self._stored[part] for part in each) for each in parts), stacked=True)
        return None

    def _check_shape(self, name: str, shape: tuple[int, ...], source: _Source) -> None:
        inner = shape[1:] if source.stacked else shape
        for parts in source.parts:
            wanted = (inner[0] // len(parts), *inner[1:])
            for part in parts:
                stored: StoredTensor = self._found.tensors[part]
                if stored.shape != wanted:
                    raise self._unfit(f"{part} is {list(stored.shape)} where {list(wanted)} belongs ({name})")
                if stored.dtype not in _DTYPES:
                    raise self._unfit(f"{part} holds {stored.dtype}, not one of {', '.join(_DTYPES)}")

    def _unfit(self, why: str) -> UserError:
        return UserError(
            ExitCode.DATA,
            f"the weights of run.model.from_pretrained ('{self._name}') are not those of run.model.config: {why}",
            "leave out what run.model.config changes of the folder's own config, or get the folder again",
        )


def _as_causal(name: str, names: Collection[str]) -> str:
    """A tensor's name in the causal language model. Files of a compiled model, and of one without a head, have other
    names, and transformers loads them as well."""
    plain = name.replace(_COMPILED, "")
    if plain == HEAD or any(other.replace(_COMPILED, "").startswith(_BASE) for other in names):
        return plain
    return _BASE + plain


def _filled(file: FileIO, room: memoryview) -> bool:
    """Read until `room` is full; False where the file ends before."""
    while room:
        count = file.readinto(room)
        if not count:
            return False
        room = room[count:]
    return True


def with_own_weights(spec: RunSpec, folder: str | None) -> RunSpec:
    """The run with where this volunteer keeps the weights that it began with. Its run id stays.

    Raises UserError: CONFIG where the run began from a seed, DATA where the folder is unusable or holds others.
    """
    if folder is None:
        return spec
    if spec.model.fingerprint is None:
        raise UserError(
            ExitCode.CONFIG,
            f"run.model.from_pretrained is '{folder}', but run '{spec.name}' does not begin with existing weights",
            "leave out --set run.model.from_pretrained: a joiner takes the run as it is",
        )
    model = spec.model.model_copy(update={"from_pretrained": folder})
    _check(model)
    return spec.model_copy(update={"model": model})


def pretrained_lines(spec: ModelSpec) -> Iterator[str]:
    """Lines about the weights to start from, and about all of them that is not as their folder has it. There are none
    if the run begins from a seed. Raises UserError (DATA) if the folder is unusable, or does not hold this model."""
    if spec.fingerprint is None:
        return
    if spec.from_pretrained is None:
        yield f"{spec.fingerprint}; no folder of them is named here: a stage peer or a checkpoint gives one"
        return
    found, used = _check(spec)
    config = build_config(spec)
    yield f"{spec.fingerprint}, {len(found.tensors):,} tensors, {found.size / 1e6:,.2f} MB in {found.folder}"
    if ties(found) and not config.tie_word_embeddings:
        yield "embedding and head are one matrix there: the head starts as a copy of it, and then they are two"
    for key in found.dropped:
        yield f"{key} of config.json is not known of this architecture here, and is left out"
    for key, value in spec.config.items():
        if key != "tie_word_embeddings" and key in found.config and found.config[key] != value:
            yield f"run.model.config.{key} is {value!r}, where config.json says {found.config[key]!r}"
    if unused := sorted(found.tensors.keys() - used):
        yield f"{len(unused)} tensors are not of this model, and stay out: {', '.join(unused[:3])}"


def _check(spec: ModelSpec) -> tuple[Pretrained, set[str]]:
    """The folder, and which of its tensors the model is made of."""
    weights, config = Weights(spec), build_config(spec)
    whole = build_on_meta(config)
    if config.tie_word_embeddings:
        whole.tie_weights()
    shapes = {name: tuple(value.shape) for name, value in torch.nn.Module.named_parameters(whole)}
    used = weights.check(shapes)
    if spec.subspace_rank is not None and bound_layers(spec):
        _check_inside(spec, weights, shapes)
    return weights.found, used


def _check_inside(spec: ModelSpec, weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """One matrix tells whether these weights know the run's basis: they lie in its span, or hardly at all."""
    name = f"model.layers.0.{WRITERS[0]}.weight"
    weights.read(name, dense := torch.empty(shapes[name]))
    if not is_in_span(dense, basis_of(spec.seed, len(dense), spec.subspace_rank or 0)):
        raise outside_subspace(spec, name)
