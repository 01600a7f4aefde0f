"""What the commands say of themselves under --help."""

from __future__ import annotations

DESCRIPTION = """\
Train one language model on GPUs of many owners. Each node serves one pipeline stage, and averages its weights with a
random node of the same stage now and then. There is no coordinator; any node may leave at any time."""

ENVIRONMENT_HELP = """\
environment:
  every setting of node: has a variable: NOLOCO_NODE_DEVICE=cuda stands for node.device, NOLOCO_NODE_ANNOUNCE for
  node.announce (lists are parted by spaces or commas). The command line wins over the environment, and that over the
  file. Settings of run: have no variables, since all nodes of a run share them."""

HELP = {
    "swarm": """\
Train on a whole swarm of nodes on this machine: stages x replicas daemons, each a process of its own. Shows the
training while it runs. At the end the run folder holds the model (a Hugging Face directory) and a sample of generated
text. Beside them are a report with loss and replica divergence, summary.json, and each node's events and log. A swarm
that was stopped or killed goes on by the same command with its --run-folder.

example:
  noloco-node swarm tiny
  noloco-node swarm own-text --set run.data.path=my-book.txt --run-folder runs/my-book""",
    "run": """\
Run one node. Without --initial-peers it starts a new swarm and prints the addresses under which others join it. With
them it joins. All nodes of a run need the same `run:` part of CONFIG; `noloco-node join ADDRESS` needs no CONFIG.
Ctrl-C leaves in order; the same command goes on from this node's last checkpoint, whatever ended it.

example:
  noloco-node run tiny --stage 0 --port 31337
  noloco-node run tiny --initial-peers /ip4/10.0.0.5/tcp/31337/p2p/12D3Koo...""",
    "join": """\
Join a run with nothing but the address of one of its nodes. The run's settings come from that node and are shown. Then
this node takes a stage, copies a stage peer's weights if the run is under way, and trains as with `run`. Several
addresses are tried together. Without any, or when none answers, the peers seen before are tried: they are kept in the
run folder. Ctrl-C leaves in order; the same command goes on from this node's last checkpoint.

example:
  noloco-node join /ip4/10.0.0.5/tcp/31337/p2p/12D3Koo...
  noloco-node join /ip4/10.0.0.5/tcp/31337/p2p/12D3Koo... --host 0.0.0.0 --port 31337 --devices all
  noloco-node join /ip4/10.0.0.5/tcp/31337/p2p/12D3Koo... --data-path code=my/code --data-path books=my/books""",
    "status": """\
Show what a node is doing or waiting for, how far it is, and what it has contributed. The latter is its own signed
record, and the receipts that the peers it served have signed. Every line is verified. RUN_FOLDER is, if not given, the
one that `run` and `join` use without --run-folder: what NOLOCO_NODE_RUN_FOLDER says, else runs/node. The node may be
running or not.

example:
  noloco-node status runs/node""",
    "pause": """\
Free the device and the line of a node that runs on this machine, within two seconds. What is under way is finished or
handed back, the state is saved, and others are told that the node is paused. It stays in the network, and goes on after
`noloco-node resume`: where it was, or with a stage peer's state if it has fallen behind. RUN_FOLDER is, if not given,
as with `status`. SIGUSR1 and SIGUSR2 to the node's process do the same as the two commands.

example:
  noloco-node pause runs/node""",
    "resume": """\
Let a node on this machine go on that `noloco-node pause` or its hours (node.hours) have paused. One that goes on
outside its hours does so until they have come and gone once more. RUN_FOLDER is, if not given, as with `status`.

example:
  noloco-node resume runs/node""",
    "report": """\
Make a report of what lies in a run folder: one page for a browser, which loads nothing and can be sent to somebody.
It shows losses, replica divergence beside the learning rate, throughput, the partners in averaging, what went wrong and
was dealt with, and where the time went. RUN_FOLDER is that of a node (where not given, as with `status`), of a local
swarm, or of a machine's devices; the training may go on meanwhile.

example:
  noloco-node report runs/node
  noloco-node report runs/tiny-20260101-120000 --out /tmp/tiny""",
    "data": """\
Work on the text that a configuration names, before a run.

example:
  noloco-node data prepare own-text --set run.data.path=my-text --to my-tokens""",
    "data prepare": """\
Tokenise the text of a run once, into a folder that its nodes on this machine read in place of the text. They begin at
once, and train on the same tokens in the same order. Interrupted, the same command goes on. Memory does not grow with
the text; a token takes 1 byte with a vocabulary of 256, 2 up to 65,536, else 4.

example:
  noloco-node data prepare own-text --set run.data.path=my-text --to my-tokens
  noloco-node swarm own-text --set run.data.path=my-text --set run.data.prepared=my-tokens""",
    "tokenizer": """\
Make a tokenizer for a run.

example:
  noloco-node tokenizer train own-text --set run.data.path=my-text --vocab-size 8192 --out my-tokenizer""",
    "tokenizer train": """\
Learn a tokenizer from the text of a run: byte-level BPE, so that every text has its tokens and comes back from them
byte for byte. Documents that the run holds out are not learnt from. DIR becomes an ordinary tokenizer folder, which
transformers loads; it is there as a whole, or not at all. It reads the first 1 GB of the text where no other limit is
named. Memory holds the different words of what is read.

example:
  noloco-node tokenizer train own-text --set run.data.path=my-text --vocab-size 8192 --out my-tokenizer
  noloco-node swarm own-text --set run.data.path=my-text --set run.data.tokenizer=my-tokenizer \\
      --set run.model.config.vocab_size=8192""",
    "export": """\
Make an ordinary Hugging Face model out of a run: safetensors, config, tokenizer, generation config, and a model card
with the run's facts. Each RUN_FOLDER is a node's, brought here from whatever machine it ran on, or one that holds
several; its final weights count, or its newest checkpoint. The slow weights of each stage are averaged over its
replicas, without those that are too far behind. DIR is there as a whole, or not at all.

With the ADDRESS of a node instead, the weights come from the nodes themselves while they train. Up to eight replicas of
each stage give theirs, in full precision, at a pace that their training allows. This machine takes no part in the run.

example:
  noloco-node export runs/tiny-20260101-120000 --out my-model
  noloco-node export from-alice/node from-bob/node --out my-model
  noloco-node export /ip4/10.0.0.5/tcp/31337/p2p/12D3Koo... --out my-model""",
    "eval": """\
Measure a model: loss in nats per token, perplexity, and bits a byte, on the windows that its run held out. DIR is what
`noloco-node export` wrote. With run folders instead, or with the ADDRESS of a node while they train, it measures the
merged model. Beside it stands the model with each single replica in the place of its stage's mean, which shows what
averaging harms or mends. From an address the weights are fetched as `export` does, into a temporary folder (TMPDIR
says where).

example:
  noloco-node eval my-model
  noloco-node eval runs/tiny-20260101-120000
  noloco-node eval /ip4/10.0.0.5/tcp/31337/p2p/12D3Koo... --set run.data.path=text.jsonl""",
    "generate": """\
Let a model continue a text, with plain transformers, on the processor. The same seed gives the same text.

With the ADDRESS of a node instead, the weights of the run under way are fetched and merged as `export` does, into a
temporary folder. Export once to generate often.

example:
  noloco-node generate my-model --prompt "def main(" --max-tokens 100 --temperature 0.7
  noloco-node generate /ip4/10.0.0.5/tcp/31337/p2p/12D3Koo... --prompt Once""",
    "lab": """\
Compare algorithms on many replicas simulated in this process: NoLoCo, DiLoCo, data parallel, none. The `lab:` part of
CONFIG says which variants, on how many replicas, with which seeds; without it the four are compared as they are. DIR
gets results.json, table.md and plots. Every finished training is kept in DIR/runs.jsonl: the same command goes on where
it was cut off.

example:
  noloco-node lab tiny --out results/tiny
  noloco-node lab tiny --out results/tiny --set lab.seeds=[1,2,3] --set run.inner.learning_rate=1e-3""",
    "config show": """\
Print every setting with its value and meaning, defaults included, as YAML that can be used as a configuration file.

example:
  noloco-node config show tiny --set run.outer.inner_steps=20""",
    "config validate": """\
Check a configuration file: names, values, and whether model, stages and batch sizes fit each other. It prints the run
id, parameters, inner steps, outer steps, and the bytes of a microbatch and of an outer step. It also prints what
memory a replica of each stage takes, part by part. With --device it says how much of the time such a device would work
on links like --uplink and --round-trip, what limits it, and which settings would raise it.

examples:
  noloco-node config validate tiny
  noloco-node config validate consumer-24gb --device "RTX 4090" --uplink 20Mbit --round-trip 100ms""",
    "identity": """\
Make a node's identity, look at it, back it up, bring it back. An identity is the private key file behind a node's peer
id; one running node at a time may use it. Where no file is named it is runs/node/identity.key: the one that
`noloco-node run` uses when given neither --run-folder nor --identity; NOLOCO_NODE_RUN_FOLDER and NOLOCO_NODE_IDENTITY
hold here, too.

example:
  noloco-node identity show runs/node/identity.key
  noloco-node identity export runs/node/identity.key --to node.pem
  noloco-node identity import node.pem --to runs/other/identity.key""",
    "identity show": """\
Print an identity's peer id, the place and permissions of its file, and whether a node on this machine uses it now.
FILE is runs/node/identity.key where not given: the one that `noloco-node run` uses when given neither --run-folder nor
--identity.

example:
  noloco-node identity show""",
    "identity create": """\
Make an identity before a node's first start, and print its peer id: what an owner invites by name, or admits in
run.access.peers. FILE is runs/node/identity.key where not given. One that is there already is left as it is, and shown.

example:
  noloco-node identity create""",
    "identity export": """\
Write an encrypted copy of an identity file: PKCS#8 in PEM form, which other tools read too. The passphrase (12
characters or more) is asked for twice; for scripts it is the first line of a file. Keep the copy and the passphrase in
different places.

example:
  noloco-node identity export runs/node/identity.key --to node.pem""",
    "identity import": """\
Bring an exported identity back as a new identity file. The passphrase is that of the export. Let only one node run
under an identity: stop the one that it came from first.

example:
  noloco-node identity import node.pem --to runs/node/identity.key""",
    "seed": """\
Run a seed: a light node without a stage, which needs no GPU and little memory. It holds the directory together, so that
the nodes of a run find each other by its address and keep to it when they come back. With CONFIG, or with the address
of a node of the run, strangers can join that run by the seed's address alone; with neither it serves any run.
Give it a fixed port and a machine that stays on. With --metrics-port it shows the run's whole swarm, strangers' nodes
included, to a browser and to Prometheus. With --relay-for-others it carries the connections of nodes that
nobody can dial. Ctrl-C ends it.

example:
  noloco-node seed tiny --host 0.0.0.0 --port 31337 --metrics-port 9100
  noloco-node seed --initial-peers /ip4/10.0.0.5/tcp/31337/p2p/12D3Koo... --host 0.0.0.0 --port 31338""",
    "doctor": """\
Check this machine and its network, with pass, warn or fail and the remedy for each. The checks are open files, disk,
memory, device, identity, port, the invitation, and every ADDRESS, or the peers seen before if none is given. Then come
the start of p2pd, the clock against peers, versions, and whether their run admits this node. Several peers are asked to
dial back, to see whether others can reach it. Give the options that the node is to run with. It trains nothing, and
uses a peer id made for the purpose.

example:
  noloco-node doctor /ip4/10.0.0.5/tcp/31337/p2p/12D3Koo... --host 0.0.0.0 --port 31337
  noloco-node doctor --json""",
    "invite": """\
Invite somebody to a run whose `run.access.owner` is your key: one node by its peer id (--peer), or any holder of the
invitation. It is your signature under this very configuration: a node that joins with it accepts no other run. The key
is made where FILE is missing and the run names no owner yet; back it up as with `noloco-node identity export`.

example:
  noloco-node invite run.yaml --key owner.key --hours 72 > alice.invitation
  noloco-node join /ip4/10.0.0.5/tcp/31337/p2p/12D3Koo... --invitation alice.invitation""",
    "health": """\
Ask the node on this machine whether it is alive: its event loop has beaten within ten seconds. Exit code 0 where it is,
1 where it is not or does not answer. It asks the port of the node's pages (node.metrics_port), which must be on. The
node is the one that runs in RUN_FOLDER; where neither that nor an option nor NOLOCO_NODE_METRICS_PORT names one, the
one in NOLOCO_NODE_RUN_FOLDER or runs/node.

examples:
  noloco-node health runs/node
  noloco-node health --metrics-port 9100""",
    "top": """\
Watch one node in this terminal: how far it is, its losses, the peers it sees with load and lag, what it waits for, and
its last log lines. It asks the port of the node's pages (node.metrics_port), which must be on, and finds it as `health`
does; the node itself may run anywhere that this machine reaches. Ctrl-C ends the view, not the node.

examples:
  noloco-node top runs/node
  noloco-node top --metrics-port 9100
  noloco-node top --metrics-host 192.168.1.7 --metrics-port 9100 --once""",
    "watch": """\
Watch a whole swarm in this terminal, from the address of any of its nodes or seeds. It shows nodes by stage and what
they do, speed, tokens trained and lag, versions, arrivals and departures, and stages that nobody serves. It takes no
part: it publishes nothing, nobody counts it as a node, and it needs no invitation. Counted nodes have answered; what
only a record claims is told apart. Without a terminal, or with --once or --json, it looks once; speed is then what
nodes say, since trained tokens have to grow to be measured. Ctrl-C ends the view.

examples:
  noloco-node watch /ip4/10.0.0.5/tcp/31337/p2p/12D3Koo...
  noloco-node watch /ip4/10.0.0.5/tcp/31337/p2p/12D3Koo... --json""",
    "config init": """\
Write a configuration that comes with noloco-node to a new file, comments and all, as an example to start from.
`noloco-node config list` names them; any of them can be used by its name as well, without a file.

example:
  noloco-node config init own-text --to my-run.yaml""",
    "config list": """\
Name the configurations that come with noloco-node. Wherever a command takes CONFIG, such a name will do.

example:
  noloco-node config list""",
    "completion": """\
Print what makes a shell complete commands and options of noloco-node. Put it where your shell reads such things, or
into its start-up file.

example:
  eval "$(noloco-node completion bash)\"""",
    "config": """\
Look at a configuration file, or write one. CONFIG is a YAML file, or the name of one that comes with noloco-node.

example:
  noloco-node config validate tiny""",
    "simulate": """\
Run a swarm in virtual time, in this process. The `sim:` part of CONFIG says what, by sim.kind:
  swarm   the node's own code on modelled devices, links and directory (4 to some hundred nodes)
  hunt    many small swarms under faults that are drawn from seeds; what fails is shortened and told (exit code 20)
DIR gets results.json and table.md. The same command gives the same course, whose hash is
printed. What is modelled, and how far to trust it: docs/simulator.md.

examples:
  noloco-node simulate sim/swarm --out results/sim --set sim.nodes=64 --set sim.hours=0.5
  noloco-node simulate sim/hunt --out results/hunt --seeds 10000""",
}
"""What each command says of itself, by its name behind `noloco-node`."""
