"""Ordinary single-process training of the whole model: what one replica a stage must equal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from noloco_node.config.run_spec import RunSpec
from noloco_node.marks import BEGINS, without_marks
from noloco_node.model.cut import build_config
from noloco_node.model.stage import build_stage
from noloco_node.training.schedule import learning_rate


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
    model.load_state_dict(weights, strict=True)
    return model, groups


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


def train(
    spec: RunSpec, batches: Sequence[tuple[Tensor, Tensor]], microbatches_a_step: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of each inner step, and the final weights by full name. AdamW from torch, clipped stage by stage."""
    inner = spec.inner
    model, groups = whole_model(spec)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": inner.weight_decay},
            {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1.0,
        betas=(inner.beta1, inner.beta2),
        eps=inner.eps,
    )
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
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.detach() for name, parameter in parameters.items()}
