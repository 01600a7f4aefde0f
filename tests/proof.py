"""Real text in, a real model out, with whole daemons: `python -m tests.proof [FOLDER] [SETTING=VALUE ...]`.

It takes minutes on two cores. With `run.model.subspace_rank=16` it is the proof of a run in a subspace.

A tokenizer is learnt from C4-style shards. 2 × 4 daemons stream them and train a Qwen3-type model. Two die by kill -9,
one of them the node that all others joined through. While the others train on, and after the end, the model is exported
from elsewhere. It must have the swarm's own held-out loss to 1e-3 in transformers alone; `eval` and `generate` must say
the same. Each line printed is a fact; the last one says whether all of it held.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from noloco_node.config.load import Config, load_config
from noloco_node.data.reading import held_out_windows
from noloco_node.launch.local_swarm import LocalSwarm, SwarmNode
from noloco_node.model.cut import build_config
from noloco_node.telemetry.events import Evaluation, InnerStep
from tests.support import eventually

SHARDS = 8
DOCUMENTS = 400
"""In each shard."""
DOCUMENT_CHARACTERS = 2000
VOCABULARY = 1024
TARGET = 800_000
VICTIMS = {"s0-r0": 0.15, "s1-r2": 0.25}
"""By the share of the run after which they die."""
LIVE_AT = 0.35
"""Share of the run after which the model is exported while they train."""
NEAR = 1e-3
"""Nats per token."""
PROMPT = "def __init__(self"
WITHIN = 1800.0
"""Seconds for any one thing, on however busy a machine."""

CONFIG = """
run:
  name: proof
  model:
    stages: 2
    config: {{model_type: qwen3, vocab_size: {vocabulary}, hidden_size: 64, intermediate_size: 192,
      num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 64,
      tie_word_embeddings: false}}
  data:
    source: text
    path: {shards}/c4-train.*.json.gz
    streaming: true
    parts_per_shard: 4
    tokenizer: {tokenizer}
    sequence_length: 64
  inner:
    target_tokens: {target}
    global_batch_tokens: 2048
    microbatch_windows: 4
    learning_rate: 3e-3
    min_learning_rate_ratio: 0
    warmup_tokens: 20_000
  outer: {{inner_steps: 6}}
  evaluation: {{every_tokens: 20_000, windows: 64}}
node: {{device: cpu, torch_threads: 1}}
local_swarm: {{replicas: 4, start_seconds: 1200}}
"""

ALONE = """
import json, sys, numpy, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokens = AutoModelForCausalLM.from_pretrained(sys.argv[1]), torch.from_numpy(numpy.load(sys.argv[2])).long()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
with torch.no_grad():
    loss = sum(float(model(part, labels=part).loss) * len(part) for part in tokens.split(8)) / len(tokens)
ids = tokenizer(sys.argv[3], return_tensors="pt", add_special_tokens=False)
drawn = model.generate(**ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
assert not [name for name in sys.modules if name.startswith("noloco")]
print(json.dumps({"loss": loss, "text": tokenizer.decode(drawn[0])}))
"""


class Proof:
    """What has been found, and whether it held."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.failed: list[str] = []

    def say(self, fact: str) -> None:
        """Print one fact."""
        print(f"{time.monotonic() - self.began:7.1f} s  {fact}", flush=True)

    def check(self, held: bool, fact: str) -> None:
        """Print a fact that must hold."""
        self.say(f"{'ok    ' if held else 'FAILED'} {fact}")
        if not held:
            self.failed.append(fact)


def documents() -> Iterator[str]:
    """Pieces of the source files of Python's standard library."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from (text[at : at + DOCUMENT_CHARACTERS] for at in range(0, len(text), DOCUMENT_CHARACTERS))


def write_shards(folder: Path) -> None:
    """As C4 has them: gzipped JSON lines."""
    folder.mkdir(parents=True)
    texts = list(documents())
    for shard in range(SHARDS):
        name = folder / f"c4-train.{shard:05d}-of-{SHARDS:05d}.json.gz"
        with gzip.open(name, "wt", encoding="utf-8") as file:
            for text in texts[shard::SHARDS][:DOCUMENTS]:
                file.write(json.dumps({"text": text, "url": "https://example.org"}) + "\n")


def noloco_node(*arguments: str | Path, elsewhere: Path) -> str:
    """What a command prints, run in another folder. RuntimeError with its complaint where it fails."""
    path = os.pathsep.join((str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-m", "noloco_node", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": path},
        timeout=WITHIN,
    )
    if done.returncode:
        raise RuntimeError(f"noloco-node {arguments[0]} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def own_files(folder: Path) -> list[str]:
    """The place where the exporting user keeps text and tokenizer: a run chooses no file of a machine."""
    text = f"run.data.path={folder / 'c4'}/c4-train.*.json.gz"
    return ["--set", text, "--set", f"run.data.tokenizer={folder / 'bpe'}"]


def transformers_alone(model: Path, windows: Path, elsewhere: Path) -> tuple[float, str]:
    """Loss and greedy continuation, in a process that knows nothing of this package."""
    command = [sys.executable, "-I", "-c", ALONE, str(model), str(windows), PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=elsewhere, timeout=WITHIN)
    told = json.loads(done.stdout)
    return told["loss"], told["text"]


def clock_of(node: SwarmNode) -> float:
    """At its last inner step, tokens."""
    return next((e.clock for e in reversed(node.events) if isinstance(e, InnerStep)), 0.0)


def evaluations(nodes: Sequence[SwarmNode]) -> list[Evaluation]:
    """All of them, in the order of their clocks."""
    return sorted((e for node in nodes for e in node.events if isinstance(e, Evaluation)), key=lambda e: e.clock)


def reported_at(clock: float, nodes: Sequence[SwarmNode]) -> float:
    """The swarm's held-out loss at a clock, between those that it has measured."""
    told = evaluations(nodes)
    return float(np.interp(clock, [e.clock for e in told], [e.loss for e in told]))


async def train(config: Config, folder: Path, proof: Proof) -> tuple[list[SwarmNode], float]:
    """The run with its deaths and the export under way; the survivors, and the clock of that export."""
    swarm = LocalSwarm(config, folder / "swarm")
    try:
        await swarm.start()
        proof.say(f"{len(swarm.nodes)} daemons are up, each with a folder of its own")
        waiting = asyncio.create_task(swarm.wait())
        for name, share in VICTIMS.items():
            node = swarm.node(name)
            await eventually(lambda n=node, s=share: clock_of(n) > s * TARGET, WITHIN, f"{name} trains", every=0.2)
            swarm.kill(node)
            proof.say(f"kill -9 of {name} at {clock_of(node):,.0f} of {TARGET:,} tokens")
        survivors = [node for node in swarm.nodes if node.name not in VICTIMS]
        await eventually(lambda: min(map(clock_of, survivors)) > LIVE_AT * TARGET, WITHIN, "half", every=0.2)
        started = survivors[0].started
        assert started is not None
        command = ("export", started.addresses[0], "--out", folder / "live", "--eval", *own_files(folder))
        told = await asyncio.to_thread(noloco_node, *command, elsewhere=folder / "elsewhere")
        proof.say(f"exported while they train:\n{told.rstrip()}")
        await waiting
    finally:
        await swarm.stop()
    ended = [node.name for node in survivors if node.stopped and node.stopped.reason == "target_reached"]
    proof.check(len(ended) == len(survivors), f"{len(ended)} of {len(survivors)} survivors reached the run's end")
    return survivors, float(told.splitlines()[0].split("), ")[1].split(" of ")[0].replace(",", ""))


def judge(folder: Path, windows: Path, survivors: Sequence[SwarmNode], live_clock: float, proof: Proof) -> None:
    """Compare what the swarm, transformers alone, `eval` and `generate` say."""
    elsewhere = folder / "elsewhere"
    machines = [shutil.copytree(node.folder, folder / "machines" / str(i)) for i, node in enumerate(survivors)]
    print(noloco_node("export", *machines, "--out", folder / "model", elsewhere=elsewhere).rstrip())
    loss, greedy = transformers_alone(folder / "model", windows, elsewhere)
    final = [e.loss for e in evaluations(survivors) if e.final]
    off = abs(loss - fmean(final))
    proof.check(
        off <= NEAR,
        f"after the end: transformers alone {loss:.5f}, the swarm's own last evaluations "
        f"{', '.join(f'{each:.5f}' for each in final)}; the mean is {off:.5f} off",
    )
    row = noloco_node("eval", folder / "model", *own_files(folder), elsewhere=elsewhere).splitlines()[-1]
    proof.check(abs(float(row.split()[-3]) - loss) <= 1e-4, f"eval: {' '.join(row.split())}")
    command = ("generate", folder / "model", "--prompt", PROMPT, "--max-tokens", "20", "--temperature", "0")
    said = noloco_node(*command, elsewhere=elsewhere)
    proof.check(said.strip() == greedy.strip(), f"generate: {greedy!r}")
    live, _ = transformers_alone(folder / "live", windows, elsewhere)
    card = (folder / "live" / "README.md").read_text(encoding="utf-8")
    fact = f"exported at {live_clock:,.0f} tokens: transformers alone {live:.5f}, as its card says"
    proof.check(f"{live:.4f} nats" in card, fact)
    swarm = reported_at(live_clock, survivors)
    proof.say(f"what single replicas lost at that clock, by their reports: {swarm:.5f}; it is {live - swarm:+.5f} off")


def main() -> int:
    """Train, export, compare; 0 where all of it held."""
    proof = Proof()
    settings = [argument for argument in sys.argv[1:] if "=" in argument]
    given = next((Path(argument) for argument in sys.argv[1:] if "=" not in argument), None)
    folder = (given or Path(tempfile.mkdtemp(prefix="noloco-proof-"))).absolute()
    try:
        write_shards(folder / "c4")
        (folder / "elsewhere").mkdir()
        file = folder / "proof.yaml"
        values = {"shards": folder / "c4", "target": TARGET, "vocabulary": VOCABULARY}
        file.write_text(CONFIG.format(tokenizer="bytes", **values), encoding="utf-8")
        learn = ("tokenizer", "train", file, "--vocab-size", str(VOCABULARY), "--out", folder / "bpe")
        proof.say(noloco_node(*learn, elsewhere=folder / "elsewhere").splitlines()[0])
        file.write_text(CONFIG.format(tokenizer=folder / "bpe", **values), encoding="utf-8")
        config = load_config(file, settings)
        vocabulary, count = build_config(config.run.model).vocab_size, config.run.evaluation.windows
        np.save(folder / "windows.npy", held_out_windows(config.run.data, vocabulary, count).numpy())
        survivors, live_clock = asyncio.run(train(config, folder, proof))
        judge(folder, folder / "windows.npy", survivors, live_clock, proof)
    finally:
        if given is None:
            shutil.rmtree(folder, ignore_errors=True)
    proof.say(f"{len(proof.failed)} things did not hold" if proof.failed else "all of it held")
    return 1 if proof.failed else 0


if __name__ == "__main__":
    sys.exit(main())
