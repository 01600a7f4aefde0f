"""Ordinary single-process training of the whole model: what one replica a stage must equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from noloco_node.config.run_spec import InnerSpec, RunSpec
from noloco_node.document_marks import BEGINS, without_marks
from noloco_node.model.cut import build_config
from noloco_node.model.stage import build_stage
from noloco_node.model.subspace import dense_state
from noloco_node.training.inner_optimizer import MUON_MOMENTUM
from noloco_node.training.progress import learning_rate


def whole_model(spec: RunSpec) -> tuple[torch.nn.Module, list[list[str]]]:
    """The Hugging Face model with the run's first weights, and the parameter names of each stage."""
    model = AutoModelForCausalLM.from_config(build_config(spec.model))
    weights: dict[str, Tensor] = {}
    groups: list[list[str]] = []
    for index in range(spec.stages):
        stage = build_stage(spec.model, index)
        names = stage.full_names()
        weights |= {names[local]: parameter.detach() for local, parameter in stage.named_parameters()}
        groups.append(list(names.values()))
    if spec.model.subspace_rank is not None:
        return MultipliedOut(model, spec, weights), groups
    model.load_state_dict(weights, strict=True)
    return model, groups


class MultipliedOut(torch.nn.Module):
    """A Hugging Face model whose weights are products: what is trained are the factors of a subspace."""

    def __init__(self, plain: torch.nn.Module, spec: RunSpec, factors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._plain = [plain]  # in a list, so that its own weights are no parameters
        self._spec = spec.model
        self._factors = {name: factor.clone().requires_grad_() for name, factor in factors.items()}
        self.config = plain.config

    def named_parameters(self, *_args: Any, **_more: Any) -> Any:
        """The factors, by the names of the weights that they are of."""
        return iter(self._factors.items())

    def forward(self, **given: Any) -> Any:
        """As the Hugging Face model."""
        weights = dict(dense_state(self._spec, self._factors))
        return torch.func.functional_call(self._plain[0], weights, (), given)


def each_document_alone(model: torch.nn.Module, inputs: Tensor, labels: Tensor) -> Any:
    """What the model puts out, `logits` [B, T, vocab] of it: of a row with documents in it each goes through alone."""
    if not bool((labels & BEGINS).any()):
        return model(input_ids=inputs, use_cache=False)
    rows: list[Tensor] = []
    for ids, marks in zip(inputs, labels & BEGINS, strict=True):
        ends = sorted({0, *marks.nonzero().flatten().tolist(), len(ids)})
        alone = [model(input_ids=ids[None, a:b], use_cache=False).logits[0] for a, b in pairwise(ends)]
        rows.append(torch.cat(alone))
    return SimpleNamespace(logits=torch.stack(rows))


class PlainMuon(torch.optim.Optimizer):
    """Muon in fp32 by its definition, one matrix at a time."""

    def __init__(self, matrices: Sequence[Tensor], momentum: float, decay: float) -> None:
        super().__init__(list(matrices), {"lr": 1.0})
        self._momentum, self._decay = momentum, decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Nesterov's momentum, three iterations, decoupled decay."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                gradient = parameter.grad
                state["m"] = self._momentum * state.get("m", 0.0) + (1 - self._momentum) * gradient
                ahead = self._momentum * state["m"] + (1 - self._momentum) * gradient
                parameter.mul_(1 - group["lr"] * self._decay)
                length = group["lr"] * 0.2 * max(parameter.shape[-2:]) ** 0.5
                steps = [orthogonal(matrix) for matrix in ahead.reshape(-1, *parameter.shape[-2:])]
                parameter.sub_(length * torch.stack(steps).reshape(parameter.shape))


def orthogonal(matrix: Tensor, iterations: int = 3) -> Tensor:
    """Newton-Schulz of one matrix [m, n] in its own precision, with torch.optim.Muon's coefficients."""
    x = matrix / matrix.norm().clamp(min=1e-7)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(iterations):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * gram + 2.0315 * gram @ gram) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def optimizers_of(
    parameters: Mapping[str, Tensor], inner: InnerSpec, *, torchs_muon: bool = False
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Optimizers that share the weights among them, and by what each multiplies the rate. Torch's own Muon iterates in
    bf16 and takes no stacks of matrices."""
    kinds: dict[str, list[Tensor]] = {"embedding": [], "head": [], "norm": [], "matrix": []}
    for name, parameter in parameters.items():
        table = "embedding" if "embed_tokens" in name else "head" if "lm_head" in name else "matrix"
        kinds["norm" if parameter.dim() < 2 else table].append(parameter)
    rates = {"embedding": inner.embedding_rate, "head": inner.head_rate, "norm": inner.norm_rate, "matrix": 1.0}
    found: list[tuple[torch.optim.Optimizer, float]] = []
    for kind, own in kinds.items():
        decay = 0.0 if kind == "norm" else inner.weight_decay / rates[kind]
        if kind == "matrix" and inner.optimizer == "muon":
            rule = {"ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}
            theirs = {"lr": 1.0, "weight_decay": decay, "momentum": MUON_MOMENTUM}
            muon = torch.optim.Muon(own, **theirs, **rule) if torchs_muon else PlainMuon(own, MUON_MOMENTUM, decay)
            found.append((muon, 1.0))
        elif own:
            betas = (inner.beta1, inner.beta2)
            adamw = torch.optim.AdamW(own, lr=1.0, betas=betas, eps=inner.eps, weight_decay=decay)
            found.append((adamw, rates[kind]))
    return found


def train(
    spec: RunSpec, batches: Sequence[tuple[Tensor, Tensor]], microbatches_a_step: int = 1, *, torchs_muon: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of each inner step, and the final weights by full name. Clipped stage by stage."""
    inner = spec.inner
    model, groups = whole_model(spec)
    parameters = dict(model.named_parameters())
    optimizers = optimizers_of(parameters, inner, torchs_muon=torchs_muon)
    losses: list[float] = []
    clock = 0
    for start in range(0, len(batches), microbatches_a_step):
        step = batches[start : start + microbatches_a_step]
        inputs, labels = (torch.cat(part) for part in zip(*step, strict=True))
        found = each_document_alone(model, inputs, labels)
        loss = F.cross_entropy(found.logits.flatten(0, 1), without_marks(labels).flatten())
        routers = getattr(found, "aux_loss", None)
        (loss if routers is None else loss + model.config.router_aux_loss_coef * routers).backward()
        for names in groups:
            torch.nn.utils.clip_grad_norm_([parameters[name] for name in names], inner.clip_norm)
        clock += labels.numel()
        rate = learning_rate(
            clock,
            peak=inner.learning_rate,
            minimum_ratio=inner.min_learning_rate_ratio,
            warmup=inner.warmup_tokens,
            target=inner.target_tokens,
        )
        for optimizer, multiplier in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * multiplier
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.detach() for name, parameter in parameters.items()}
