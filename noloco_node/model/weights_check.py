"""Whether weights to start from fit the model, and what a person should know of them, without reading them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from noloco_node.config.model_spec import ModelSpec
from noloco_node.config.pretrained import Pretrained, ties
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.anatomy import build_on_meta
from noloco_node.model.cut import build_config
from noloco_node.model.pretrained import Weights
from noloco_node.model.subspace import WRITERS, basis_of, bound_layers, is_in_span, outside_subspace

_SHOWN = 3


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
        yield f"{len(unused)} tensors are not of this model, and stay out: {', '.join(unused[:_SHOWN])}"


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
