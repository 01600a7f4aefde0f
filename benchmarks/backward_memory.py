"""What microbatches under way hold, and the highest memory of their backward, for each `run.inner.backward`.

    python -m benchmarks.backward_memory --out benchmarks/results/backward_memory.json

The first of two stages with eight layers each, width 256, 4 × 512 tokens, on the processor: three microbatches go
forward, then each backward. Every way in a process of its own, on one thread. Memory is the process's resident one,
beyond what it has when an inner step has been taken; before it is read, the allocator gives back what was freed. Linux.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.command import command, parser_of, save
from noloco_node.config.load import load_config
from noloco_node.config.run_spec import RunSpec
from noloco_node.model.stage import build_stage
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.trainer import ForwardContext

WAYS = ("keep", "recompute", "checkpoint")
WINDOWS, TOKENS, VOCABULARY = 4, 512, 256
UNDER_WAY = 3
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": TOKENS,
}


def run_of(config: Path, way: str, precision: str) -> RunSpec:
    """The base file with the benchmark's model, going back that way."""
    changes = [f"run.model.config.{name}={value}" for name, value in MODEL.items()]
    return load_config(config, [*changes, f"run.inner.backward={way}", f"run.inner.precision={precision}"]).run


def resident(line: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(each.split()[1]) for each in lines if each.startswith(line))


def measure(run: RunSpec) -> dict[str, float]:
    """MiB that three microbatches hold, and the highest while they go back, in this process."""
    torch.set_num_threads(1)
    trainer = StageTrainer(build_stage(run.model, 0), run.inner, device="cpu", wire_dtype=torch.float32)
    ids = torch.randint(0, VOCABULARY, (WINDOWS, TOKENS), generator=torch.Generator().manual_seed(1))
    first = ForwardContext()
    outputs = trainer.forward(ids[:1, :8], first)
    trainer.backward(first, torch.zeros_like(outputs), 1.0, 8)
    trainer.step(1e-3)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    base = resident("VmRSS")
    passages = [ForwardContext() for _ in range(UNDER_WAY)]
    gone = [trainer.forward(ids, passage) for passage in passages]
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    held = resident("VmRSS") - base
    for passage, outputs in zip(passages, gone, strict=True):
        trainer.backward(passage, torch.randn_like(outputs), 1.0, WINDOWS * TOKENS)
    return {"held_mib": held / 1024, "highest_mib": (resident("VmHWM") - base) / 1024}


def main() -> None:
    """Measure, print and write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/tiny.yaml"))
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "bf16-mixed", "bf16-pure"])
    parser.add_argument("--only", choices=WAYS, help="measure in this process, and print JSON")
    options = parser.parse_args()
    if options.only is not None:
        print(json.dumps(measure(run_of(options.config, options.only, options.precision))))
        return
    rows: dict[str, dict[str, float]] = {}
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.backward_memory", str(options.config)]
        command += ["--precision", options.precision, "--only", way]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows[way] = json.loads(printed.splitlines()[-1])
        print(
            f"{way:<11} held {rows[way]['held_mib']:7,.0f} MiB, highest {rows[way]['highest_mib']:7,.0f} MiB",
            flush=True,
        )
    result = {"precision": options.precision, "under_way": UNDER_WAY, "rows": rows}
    save(options.out, result)


if __name__ == "__main__":
    command(main)
