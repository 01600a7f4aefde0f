"""One process that trains the whole model with the run's optimizer: what a swarm on the same cores is compared with.

python -m benchmarks.single configs/tiny.yaml --threads 2 --windows 8 --seconds 20
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from benchmarks.command import command, parser_of, positive, whole
from noloco_node.config.load import load_config
from noloco_node.data.sampler import WindowSampler
from noloco_node.data.windows import load_windows
from noloco_node.model.cut import build_config
from noloco_node.training.inner_optimizer import InnerOptimizer
from noloco_node.training.layout import FlatLayout

WARM_UP_STEPS = 2


def main() -> None:
    """Train for some seconds and print one JSON line: tokens per second and CPU seconds per million tokens."""
    parser = parser_of(__doc__, out=False)
    parser.add_argument("config", type=Path)
    parser.add_argument("--threads", type=whole, default=2)
    parser.add_argument("--windows", type=whole, default=8, help="windows in a microbatch")
    parser.add_argument("--seconds", type=positive, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec = load_config(options.config, options.set).run
    inner = spec.inner
    model = AutoModelForCausalLM.from_config(build_config(spec.model))
    parameters = dict(model.named_parameters())
    layout = FlatLayout.of(parameters)
    weights = layout.flatten(parameters)
    gradient = torch.zeros_like(weights)
    for name, own in layout.views(weights).items():
        parameters[name].data = own
        parameters[name].grad = layout.views(gradient)[name]
    optimizer = InnerOptimizer(layout, weights, gradient, inner)
    text = load_windows(spec.data, model.config.vocab_size)
    walk = WindowSampler(text.train_count, spec.data.seed, "single")
    tokens_a_microbatch = options.windows * spec.data.sequence_length
    microbatches = max(1, inner.global_batch_tokens // tokens_a_microbatch)

    def step() -> None:
        for _ in range(microbatches):
            inputs, labels = text.train(walk.take(options.windows))
            logits = model(input_ids=inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / microbatches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm)
        optimizer.step(inner.learning_rate)
        gradient.zero_()

    for _ in range(WARM_UP_STEPS):
        step()
    started, cpu, steps = time.monotonic(), time.process_time(), 0
    while time.monotonic() - started < options.seconds:
        step()
        steps += 1
    tokens = steps * microbatches * tokens_a_microbatch
    result = {
        "threads": options.threads,
        "windows": options.windows,
        "tokens_per_second": tokens / (time.monotonic() - started),
        "cpu_seconds_per_million_tokens": (time.process_time() - cpu) / tokens * 1e6,
    }
    json.dump(result, sys.stdout)
    print()


if __name__ == "__main__":
    command(main)
