"""One training of lab/subspace-long as a plain loop in one process. usage: python subspace_trial.py NAME key=value ...

keys: d ffn heads k(0=full) free(0/1) seed lr std steps opt(adamw|muon) emb(bound|trained|fixed) layers(bound|free)
      perp(0/1: c starts at -U^T T) plan: e.g. plan="300:grad,1000:grad" or "1500:grow16"; wd; emb_rate; minr
"""
import json, math, sys, time
from pathlib import Path
import torch, torch.nn.functional as F
torch.set_num_threads(1)
from noloco_node.config.load import load_config
from noloco_node.config.run_spec import RunSpec
from noloco_node.laboratory.training import windows_of
from noloco_node.model.stage import build_stage
from noloco_node.model.subspace import basis_of
from noloco_node.training.layout import FlatLayout
from noloco_node.training.inner_optimizer import InnerOptimizer
from noloco_node.training.progress import learning_rate

HERE = Path(".")
O = dict(d=64, ffn=176, heads=2, k=16, free=0, seed=1, lr=4e-3, std=0.3, steps=3000, opt="adamw", emb="bound",
         layers="bound", perp=0, plan="", wd=0.1, emb_rate=1.0, minr=0.1, window=50, mix=0.5, eta=1.0, log=500, stop=0, rank_seed=0, tsplit=0, tfile="", save="", reset=0, lps="", limit=3000.0)
name = sys.argv[1]
for arg in sys.argv[2:]:
    key, _, value = arg.partition("=")
    O[key] = type(O[key])(value) if not isinstance(O[key], float) else float(value)
d, k, free, seed = O["d"], O["k"], O["free"], O["seed"]
base = load_config(Path("noloco_node/configs/lab/subspace-long.yaml")).run.model_dump(mode="json")
base["model"]["config"] |= {"hidden_size": d, "intermediate_size": O["ffn"], "num_attention_heads": O["heads"], "num_key_value_heads": O["heads"]}
base["model"] |= {"seed": seed, "embedding_std": O["std"]}
if k:
    base["model"] |= {"subspace_rank": k, "subspace_last_stage_free": bool(free)}
base["inner"] |= {"learning_rate": O["lr"], "target_tokens": 1024 * O["steps"], "optimizer": O["opt"], "weight_decay": O["wd"],
                  "embedding_rate": O["emb_rate"], "min_learning_rate_ratio": O["minr"]}
base["evaluation"]["every_tokens"] = 1024 * O["steps"]
if O["lps"]: base["model"]["layers_per_stage"] = [int(x) for x in O["lps"].split("+")]
run = RunSpec.model_validate(base)
inner = run.inner
L, H = 4, O["heads"]
from noloco_node.model.cut import cut_model
bound_layers = 0 if not k or O["layers"] == "free" else (cut_model(run.model)[-1].first_layer if free else 4)

# --- first weights, from the package
P, stage_of = {}, {}
U = T = None
def dense_init():
    m = run.model.model_copy(update={"subspace_rank": None, "subspace_last_stage_free": False})
    out = {}
    for i in range(2):
        s = build_stage(m, i)
        names = s.full_names()
        out |= {names[n]: p.detach().clone() for n, p in s.named_parameters()}
    return out
for i in range(2):
    s = build_stage(run.model, i)
    names = s.full_names()
    for n, p in s.named_parameters():
        P[names[n]] = p.detach().clone(); stage_of[names[n]] = i
    if i == 0 and s.subspace is not None:
        U = s.subspace.basis.clone(); T = s.subspace.fixed(torch.arange(256)).clone()
EMB = "model.embed_tokens.weight"
WR = ["self_attn.o_proj", "mlp.down_proj"]
dense = dense_init() if k and O["layers"] == "free" else {}
if k and O["layers"] == "free":
    for l in range(L):
        for w in WR:
            P[f"model.layers.{l}.{w}.weight"] = dense[f"model.layers.{l}.{w}.weight"]
if k:
    if O["tfile"]:
        T = torch.load(O["tfile"]).float()
    if O["tsplit"]:  # T lies in the complement of U, of the same size in all
        T = T - T @ U @ U.t(); T = T * (O["std"] * math.sqrt(256 * d) / T.norm())
    if O["perp"]:
        P[EMB] = -(T @ U).contiguous()
    if O["emb"] == "trained":
        P[EMB] = T + P[EMB] @ U.t()   # an ordinary embedding
    elif O["emb"] == "fixed":
        P[EMB].zero_()

class Opt:
    def __init__(self):
        self.parts = []
        for i in range(2):
            own = {n: p for n, p in P.items() if stage_of[n] == i}
            lay = FlatLayout.of(own)
            flat = lay.flatten(own); grad = torch.zeros_like(flat)
            v, g = lay.views(flat), lay.views(grad)
            for n in own:
                P[n] = v[n].detach().requires_grad_(); P[n].grad = g[n]
            self.parts.append((lay, flat, grad, InnerOptimizer(lay, flat, grad, inner)))
    def step(self, rate):
        with torch.no_grad():
            for lay, flat, grad, opt in self.parts:
                n = float(grad.norm())
                grad.mul_(min(1.0, inner.clip_norm / (n + 1e-6)))
                opt.step(rate); grad.zero_()
    def moments(self):
        out, steps = {}, None
        for lay, flat, grad, opt in self.parts:
            st = opt.state(); steps = st["optimizer_steps"]
            a, b = lay.views(st["exp_avg"]), lay.views(st["exp_avg_sq"])
            out |= {n: (a[n].clone(), b[n].clone()) for n in a}
        return out, steps
    def restore(self, mom, steps):
        for lay, flat, grad, opt in self.parts:
            opt.load({"exp_avg": lay.flatten({e.name: mom[e.name][0] for e in lay.entries}),
                      "exp_avg_sq": lay.flatten({e.name: mom[e.name][1] for e in lay.entries}), "optimizer_steps": steps})
opt = Opt()
if O["emb"] == "fixed": P[EMB].requires_grad_(False)

hd = d // H
pos = torch.arange(64).float()
inv = 1.0 / (10000.0 ** (torch.arange(0, hd, 2).float() / hd))
fr = torch.outer(pos, inv); COS, SIN = torch.cat([fr, fr], -1).cos(), torch.cat([fr, fr], -1).sin()
SIGN = torch.cat([-torch.ones(hd // 2), torch.ones(hd // 2)]); SINS = SIN * SIGN
def rope(x): return x * COS + x.roll(hd // 2, -1) * SINS
def norm(x, w): return F.rms_norm(x, (x.shape[-1],), w, 1e-6)
watch = None
def write(l, which, h):
    W = P[f"model.layers.{l}.{which}.weight"]
    y = F.linear(F.linear(h, W), U) if l < bound_layers else F.linear(h, W)
    if watch is not None and l < bound_layers:
        y.retain_grad(); watch.append((l, which, h.detach(), y))
    return y
def embed(ids):
    e = F.embedding(ids, P[EMB])
    return e if not k or O["emb"] == "trained" else F.embedding(ids, T) + F.linear(e, U)
def forward(ids):
    B, S = ids.shape
    x = embed(ids)
    for l in range(L):
        p = f"model.layers.{l}."
        h = norm(x, P[p + "input_layernorm.weight"])
        qkv = F.linear(h, torch.cat([P[p + f"self_attn.{c}_proj.weight"] for c in "qkv"]))
        q, kk, v = qkv.view(B, S, 3 * H, hd).transpose(1, 2).split(H, 1)
        a = F.scaled_dot_product_attention(rope(q), rope(kk), v, is_causal=True)
        x = x + write(l, "self_attn.o_proj", a.transpose(1, 2).reshape(B, S, H * hd))
        h = norm(x, P[p + "post_attention_layernorm.weight"])
        gu = F.linear(h, torch.cat([P[p + "mlp.gate_proj.weight"], P[p + "mlp.up_proj.weight"]]))
        g, u = gu.chunk(2, -1)
        x = x + write(l, "mlp.down_proj", F.silu(g) * u)
    if watch is not None:
        x.retain_grad(); watch.append((-1, "stream", None, x))
    return F.linear(norm(x, P["model.norm.weight"]), P["lm_head.weight"])
windows = windows_of(run.data, 256)
walk = windows.walk(seed, "000000")
vin, vlab = windows.validation(windows.validation_indices(run.evaluation.windows))
def evaluate():
    with torch.no_grad():
        return float(F.cross_entropy(forward(vin).flatten(0, 1), vlab.flatten()))

def orth(M):
    q, r = torch.linalg.qr(M.double()); return (q * r.diagonal().sign()).float()
def top(M, k):
    w, v = torch.linalg.eigh(M.double()); return v[:, -k:].flip(1).float().contiguous()
def used():
    M = torch.zeros(d, d)
    for l in range(bound_layers):
        for w in WR:
            A = P[f"model.layers.{l}.{w}.weight"].detach(); B = U @ A; M += B @ B.t() / B.square().sum()
    B = (P[EMB].detach() @ U.t()); M += 2 * B.t() @ B / B.square().sum()
    return M / M.trace()
def move(V, keep_embedding):
    """A new basis V; the moments follow."""
    global U, T, opt, k
    mom, steps = opt.moments()
    R = V.t() @ U
    for n in list(P):
        p, (a, b) = P[n].detach().clone(), mom[n]
        if n == EMB and O["emb"] == "bound":
            old = p @ U.t(); new = p @ R.t()
            if keep_embedding: T = T + old - new @ V.t()
            p, a, b = new, a @ R.t(), b @ (R * R).t()
        elif any(n == f"model.layers.{l}.{w}.weight" for l in range(bound_layers) for w in WR):
            p, a, b = R @ p, R @ a, (R * R) @ b
        P[n] = p.contiguous(); mom[n] = (a, b)
    U, k = V, V.shape[1]
    opt = Opt(); opt.restore(mom, steps)
plan = {}
for part in filter(None, O["plan"].split(",")):
    at, what = part.split(":"); plan[int(at)] = what
began, cpu0 = time.monotonic(), time.process_time()
losses, notes, curve = [], [], []
M_grad = torch.zeros(d, d); M_act = torch.zeros(d, d)
T0 = None if T is None else T.clone()
M_table = torch.zeros(256, d)
held = HERE / f"{name}.pt"
first = 0
if held.exists():
    was = torch.load(held, weights_only=False)
    U, T, k, T0, losses, notes, curve, first, M_grad, M_act, cpu_before = (was[x] for x in "U T k T0 losses notes curve step M_grad M_act cpu".split())
    for n in P: P[n] = was["P"][n]
    opt = Opt(); opt.restore(was["mom"], was["steps"])
    for _ in range(first): walk.take(16)
    cpu0 -= cpu_before
def hold(step):
    mom, steps = opt.moments()
    held_new = held.with_suffix(".new"); torch.save({"P": {n: p.detach().clone() for n, p in P.items()}, "mom": mom, "steps": steps, "U": U, "T": T, "k": k, "T0": T0, "losses": losses,
                "notes": notes, "curve": curve, "step": step, "M_grad": M_grad, "M_act": M_act, "cpu": time.process_time() - cpu0}, held_new); held_new.replace(held)
last_held = time.monotonic()
for step in range(first, O["stop"] or O["steps"]):
    if time.monotonic() - last_held > 45: hold(step); last_held = time.monotonic()
    if time.monotonic() - began > O["limit"] or (HERE / "pause").exists():
        hold(step); print(name, "held at", step, flush=True); sys.exit(75)
    if what := plan.get(step):
        before = evaluate()
        if what.startswith("grow"):
            n = int(what[4:]); full = basis_of(seed, d, n + k)
            V = torch.cat([U, orth(full - U @ (U.t() @ full))[:, : n - k]], 1) if n > k else U
            move(V, False)
        elif what == "draw":
            move(basis_of(seed * 1000 + step, d, k), False)
        elif what in ("grad", "gradT"):
            G = M_grad / M_grad.trace(); move(top(O["mix"] * used() + (1 - O["mix"]) * G, k), what == "gradT")
        elif what in ("grass", "grassT"):
            S = M_act / M_act.trace(); S = S / torch.linalg.matrix_norm(S, 2)
            move(orth(U + O["eta"] * (S @ U - U @ (U.t() @ S @ U))), what == "grassT")
        elif what == "svdT":  # directions that A and c use most stay
            move(top(used(), k), True)
        after = evaluate()
        notes.append([step, what, round(before, 4), round(after, 4), round(float((U.t() @ T0).norm() if False else 0), 3)])
        print(name, "renewal", notes[-1], flush=True)
        M_grad.zero_(); M_act.zero_()
    soon = [s for s in plan if 0 < s - step <= O["window"] and not plan[s].startswith("grow")]
    watch = [] if soon else None
    ids, lab = windows.train(walk.take(16))
    loss = F.cross_entropy(forward(ids).flatten(0, 1), lab.flatten())
    loss.backward()
    if watch:
        with torch.no_grad():
            for l, which, h, y in watch:
                gy = y.grad.flatten(0, -2)
                if which == "stream":
                    M_act += gy.t() @ gy
                else:
                    G = gy.t() @ h.flatten(0, -2); M_grad += G @ G.t()
        watch = None
    rate = learning_rate((step + 1) * 1024, peak=inner.learning_rate, minimum_ratio=inner.min_learning_rate_ratio, warmup=inner.warmup_tokens, target=inner.target_tokens)
    opt.step(rate)
    losses.append(float(loss.detach()))
    if (step + 1) % O["log"] == 0:
        curve.append([step + 1, round(evaluate(), 4), round(sum(losses[-100:]) / 100, 4)])
        print(name, *curve[-1], f"{time.monotonic()-began:.0f}s cpu {time.process_time()-cpu0:.0f}s", flush=True)
tail = losses[-max(1, len(losses) // 10):]
out = {"name": name, "args": sys.argv[2:], "val": round(evaluate(), 4), "train": round(sum(tail) / len(tail), 4), "curve": curve, "notes": notes,
       "trained": sum(p.numel() for p in P.values() if p.requires_grad), "wall": round(time.monotonic() - began), "cpu": round(time.process_time() - cpu0)}
print(json.dumps(out), flush=True)
if O["stop"]: hold(O["stop"])
else: held.unlink(missing_ok=True)
if O["save"]:
    torch.save({"P": {n: p.detach() for n, p in P.items()}, "U": U, "T": T}, O["save"])
with open(HERE / "results.jsonl", "a") as f: f.write(json.dumps(out) + "\n")
