const SVG = "http://www.w3.org/2000/svg", POLL = 1000;
const $ = id => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");
let last = null, failed = 0, news = { busy: new Set(), met: [], came: new Set() };

// Everything that comes from a node is put in as text, never as markup.
function tell(id, text, kind) { const at = $(id); at.textContent = text; if (kind !== undefined) at.className = kind; }
function make(name, attributes, ...inside) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  for (const one of inside) made.append(one);
  return made;
}
function element(name, kind, ...inside) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  made.append(...inside.map(one => one instanceof Node ? one : document.createTextNode(String(one))));
  return made;
}

const known = value => value !== null && value !== undefined && Number.isFinite(value);
const whole = value => known(value) ? Math.round(value).toLocaleString("en") : "–";
const short = id => id ? "…" + id.slice(-6) : "–";
// A name is its volunteer's word, and another node may bear the same: the end of the peer id always stands beside it.
const called = node => node.name ? `${node.name} ${short(node.peer_id)}` : short(node.peer_id);
function figure(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return size >= 1000 ? whole(value) : value.toPrecision(4).replace(/\.?0+$/, "");
}
function bytes(value) {
  for (const unit of ["B", "kB", "MB", "GB"]) { if (value < 1000) return value.toFixed(unit === "B" ? 0 : 1) + " " + unit; value /= 1000; }
  return value.toFixed(1) + " TB";
}
function lasting(seconds) {
  if (!known(seconds)) return "?";
  const s = Math.max(0, Math.round(seconds)), m = Math.floor(s / 60), h = Math.floor(m / 60);
  return h ? `${h} h ${String(m % 60).padStart(2, "0")} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
}
const clock = when => new Date(when * 1000).toLocaleTimeString("en-GB");

// The picture: a column for each stage, a dot for each node. Places are kept by peer id, so that dots stay where they are.
function place(stages, nodes, width) {
  const columns = Array.from({ length: stages }, () => []);
  for (const peer of nodes) if (columns[peer.stage]) columns[peer.stage].push(peer);
  const wide = Math.max(width, 52 * stages), each = wide / stages;
  const most = Math.max(1, ...columns.map(column => column.length));
  const radius = most > 60 ? 5 : most > 16 ? 8 : 12;
  const gap = 2 * radius + (radius > 8 ? 14 : 6);
  const across = Math.max(1, Math.min(Math.floor((each - 14) / gap), Math.ceil(most / 8)));
  const spots = new Map();
  columns.forEach((column, stage) => {
    column.sort((a, b) => a.peer_id < b.peer_id ? -1 : 1);
    column.forEach((peer, index) => {
      const inRow = Math.min(across, column.length - Math.floor(index / across) * across);
      const x = each * (stage + .5) + (index % across - (inRow - 1) / 2) * gap;
      spots.set(peer.peer_id, { peer, x, y: 38 + Math.floor(index / across) * gap + radius });
    });
  });
  return { columns, spots, wide, each, radius, high: Math.max(96, 50 + Math.ceil(most / across) * gap + radius) };
}
function colour(peer, pace) {
  if (!peer.answers || peer.state === "joining") return "var(--quiet)";
  if (peer.state !== "training") return "var(--dim)";
  const behind = peer.lag / Math.max(1, 20 * pace);
  return behind > 3 ? "var(--bad)" : behind > 1 ? "var(--warn)" : "var(--accent)";
}
function title(text) { const made = make("title", {}); made.textContent = text; return made; }
function label(text, attributes) { const made = make("text", attributes); made.textContent = text; return made; }
function canvas(wide, high) {
  const picture = make("svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": "nodes by stage" });
  picture.style.width = wide + "px";
  return picture;
}
function dot(peer, x, y, radius, pace) {
  const silent = !peer.answers;
  return make("circle", { cx: x, cy: y, r: radius, fill: silent ? "none" : colour(peer, pace), stroke: silent ? "var(--quiet)" : "none", "stroke-width": 2, "stroke-dasharray": silent ? "3 3" : "none" });
}
// A column for each stage, with its name and how many nodes it has; one that nobody serves stands out.
function pave(picture, counts, each, high, missing, strong) {
  counts.forEach((count, stage) => {
    const gone = missing.includes(stage);
    picture.prepend(make("rect", { x: stage * each + 3, y: 1, width: each - 6, height: high - 2, rx: 8, fill: "var(--grid)", "fill-opacity": stage === strong ? 1 : .45, stroke: gone ? "var(--bad)" : "none" }));
    picture.append(label(each > 90 ? `stage ${stage}${stage === 0 ? " (text)" : ""} · ${count}` : `${stage} · ${count}`, { x: (stage + .5) * each, y: 19, "text-anchor": "middle" }));
    if (gone) picture.append(label("nobody", { x: (stage + .5) * each, y: 48, "text-anchor": "middle" }));
  });
}
function pulse(spot, radius) {
  const ring = make("circle", { cx: spot.x, cy: spot.y, r: radius + 7, fill: "none", stroke: "var(--good)", "stroke-width": 3 });
  ring.animate([{ opacity: 1 }, { opacity: 0 }], { duration: 1000, fill: "forwards" });
  return ring;
}
function legend(id, rows) {
  $(id).replaceChildren(...rows.map(([tone, text]) => { const mark = element("i", ""); mark.style.background = tone; return element("span", "", mark, text); }));
}
function chart(id, lines) {
  const at = $(id), wide = Math.max(220, at.clientWidth || 300), high = 130, left = 58, top = 8, bottom = 18;
  const picture = make("svg", { viewBox: `0 0 ${wide} ${high}`, height: high, role: "img" });
  const points = lines.flatMap(line => line.points);
  if (points.length < 2) {
    picture.append(label("not enough yet", { x: wide / 2, y: high / 2, "text-anchor": "middle" }));
    return at.replaceChildren(picture);
  }
  const times = points.map(p => p[0]), values = points.map(p => p[1]);
  const from = Math.min(...times), until = Math.max(...times, from + 1);
  let low = Math.min(...values), peak = Math.max(...values);
  // What spans decades is drawn by its order of magnitude.
  const steep = low > 0 && peak / low > 30, scale = steep ? Math.log10 : v => v, back = steep ? v => 10 ** v : v => v;
  low = scale(low); peak = scale(peak);
  if (peak - low < 1e-9 * Math.abs(peak) || peak === low) { low -= Math.abs(low) * .1; peak += Math.abs(peak) * .1 || 1; }
  const x = t => left + (wide - left - 8) * (t - from) / (until - from), y = v => top + (high - top - bottom) * (1 - (scale(v) - low) / (peak - low));
  for (const share of [0, .5, 1]) {
    const value = back(low + share * (peak - low));
    picture.append(make("line", { x1: left, x2: wide - 8, y1: y(value), y2: y(value), stroke: "var(--grid)" }));
    picture.append(label(figure(Number(value.toPrecision(3))), { x: left - 6, y: y(value) + 4, "text-anchor": "end" }));
  }
  picture.append(label(clock(from), { x: left, y: high - 4 }), label(clock(until), { x: wide - 8, y: high - 4, "text-anchor": "end" }));
  for (const line of lines) {
    if (line.dots || line.points.length < 2) for (const [t, v] of line.points) picture.append(make("circle", { cx: x(t), cy: y(v), r: 3, fill: line.tone }));
    else picture.append(make("polyline", { points: line.points.map(([t, v]) => `${x(t).toFixed(1)},${y(v).toFixed(1)}`).join(" "), fill: "none", stroke: line.tone, "stroke-width": 1.6, "stroke-linejoin": "round" }));
  }
  at.replaceChildren(picture);
}
function reveal(id) { $(id).closest("section").hidden = false; }
function rows(id, pairs) {
  reveal(id);
  $(id).replaceChildren(...(pairs.length ? pairs : [["nothing yet", ""]]).map(([name, value]) => element("tr", "", element("td", "dim", name), element("td", "", value))));
}
function columns(id, names, lines) {
  const row = (kind, cells) => element("tr", "", ...cells.map(cell => element(kind, "", cell)));
  reveal(id);
  $(id).replaceChildren(row("th", names), ...lines.map(cells => row("td", cells)));
}
const lagging = lag => known(lag) && lag <= -.5 ? `${whole(-lag)} ahead` : whole(lag);
const sum = counts => Object.values(counts || {}).reduce((a, b) => a + b, 0);

// What both kinds of page show, made of a node's state or of a swarm's.
function ofNode(s) {
  const trouble = s.warnings.map(w => `${clock(w.time)} ${w.text}`), copied = s.download;
  if (s.missing_stages.length) trouble.push(`No replica of stage ${s.missing_stages.join(", ")} is there: microbatches are held back.`);
  if (s.event_loop_age_seconds > 10) trouble.push(`The node hangs: its event loop has not come round for ${lasting(s.event_loop_age_seconds)}.`);
  const nodes = s.nodes_per_stage, many = nodes.length > 4;
  const where = [...(s.stage === null ? [] : [`stage ${s.stage} of ${s.stages}`, `node ${short(s.peer_id)}`]), ...(s.version ? [`version ${s.version}`] : []), ...(s.reachability ? [s.reachability.words] : [])];
  const self = { self: true, peer_id: s.peer_id, stage: s.stage, state: "training", answers: true, lag: 0, tokens_per_second: s.tokens_per_second, load: s.in_hand, outer_steps_taken: s.outer_steps_taken, version: s.version };
  return {
    name: s.run ? s.run.name : "noloco-node", where: where.join(" · "), whose: "this node", trouble,
    state: s.state.replaceAll("_", " "), tone: s.ready ? "good" : s.state === "ended" ? "" : "warn",
    detail: s.state === "ended" ? s.detail : `${s.detail}, for ${lasting(s.time - s.since)}`,
    share: copied ? copied.received / Math.max(1, copied.total) : null,
    far: copied ? `copying a stage peer's state: ${bytes(copied.received)} of ${bytes(copied.total)}` : null,
    tiles: [
      ["tokens/s, swarm", whole(s.swarm_tokens_per_second)], ["tokens/s, own", whole(s.tokens_per_second)],
      ["training loss", figure(s.training_loss)], ["validation loss", figure(s.validation_loss)],
      ["replica divergence", figure(s.replica_divergence)], ["inner steps", whole(s.inner_steps)], ["outer steps", whole(s.outer_steps_taken)],
      many ? [`nodes, of ${nodes.length} stages`, whole(sum(nodes))] : ["nodes by stage", nodes.length ? nodes.join(" + ") : "–"],
      ["microbatches in hand", whole(s.in_hand)],
    ],
    stages: Math.max(1, s.stages || nodes.length || 1), nodes: s.stage === null ? s.peers : [...s.peers, self], counts: null,
    more: s.introduced > s.peers.length ? `${s.introduced - s.peers.length} more nodes are known` : "",
    pace: s.swarm_tokens_per_second, training: s.curves.loss, speeds: [s.curves.swarm_tokens_per_second, s.curves.tokens_per_second],
  };
}
const WORDS = { training: "trains", over: "the run is over", empty: "nobody answers", missing_stage: "stands still", finishing: "comes to its end", no_swarm: "no swarm to show" };
const TONES = { training: "good", missing_stage: "bad", empty: "bad", no_swarm: "warn" };
function ofSwarm(s) {
  const trouble = [], has = s.run !== undefined;
  if (has && s.missing_stages.length) trouble.push(`No node that answers serves stage ${s.missing_stages.join(", ")}.`);
  if (s.seed.event_loop_age_seconds > 10) trouble.push(`The seed hangs: its event loop has not come round for ${lasting(s.seed.event_loop_age_seconds)}.`);
  if (s.seed.look_age_seconds > 60) trouble.push(`The seed last looked at the swarm ${lasting(s.seed.look_age_seconds)} ago.`);
  const head = { name: has ? s.run.name : "noloco-node seed", where: has ? `${s.stages.length} stages · run ${s.run.id}` : "", whose: "this seed", trouble,
    state: WORDS[s.state] || s.state, tone: TONES[s.state] || "", detail: has ? "" : s.seed.detail };
  if (!has) return head;
  const middle = (name, of) => [of ? `${name}, ${of.nodes === 1 ? "of one node" : `median of ${whole(of.nodes)}`}` : name, of ? figure(of.value) : "–"];
  return {
    ...head, share: null, far: null,
    tiles: [
      middle("training loss", s.training_loss), middle("validation loss", s.validation_loss), middle("replica divergence", s.replica_divergence),
      [s.speed_from === "records" ? "tokens/s, as nodes say" : "tokens/s, measured", whole(s.tokens_per_second)],
      ["nodes that answer", whole(s.nodes_answering)], ["unreachable", whole(s.stages.reduce((all, stage) => all + stage.unreachable, 0))],
      ["stages served", `${s.stages.filter(stage => stage.serving).length} of ${s.stages.length}`],
      ["came", whole(s.joins)], ["left", whole(s.departures.left)], ["vanished", whole(s.departures.lost)], ["reassigned", whole(s.reassignments)],
    ],
    stages: s.stages.length, nodes: s.nodes, counts: s.stages.map(stage => sum(stage.nodes)),
    more: s.introduced > s.nodes.length ? `${whole(s.introduced - s.nodes.length)} more are known from records` : "",
    pace: s.tokens_per_second, training: s.curves.training_loss, speeds: [s.curves.tokens_per_second],
  };
}

function header(v, s) {
  document.title = `${v.name} · ${v.state}`;
  tell("run", v.name);
  tell("where", v.where);
  tell("whose", v.whose);
  tell("state", v.state, "pill " + v.tone);
  tell("detail", v.detail);
  tell("trouble", v.trouble.join("\n"));
  if (!v.tiles) return;
  const share = s.target ? Math.min(1, s.trained_tokens / s.target) : 0;
  $("bar").value = v.share === null ? share : v.share;
  tell("how-far", v.far !== null ? v.far : s.target && !(s.state === "over" && !s.trained_tokens) ? `${whole(s.trained_tokens)} of ${whole(s.target)} tokens (${(100 * share).toFixed(1)} %)` +
    (s.seconds_left === null ? "" : ` · about ${lasting(s.seconds_left)} left`) : "");
  $("tiles").replaceChildren(...v.tiles.map(([label, value]) => element("div", "", element("b", "", value), element("span", "dim", label))));
}
function about(node, v) {
  const lines = [...(node.self ? ["this node"] : [...(node.name ? [node.name] : []), node.peer_id]), `stage ${node.stage}, ${node.state}, version ${node.version}`];
  if (!node.self) lines.push(node.answers ? `it answers ${v.whose}` : "known from its record only",
    ...(known(node.lag) ? [`${whole(Math.abs(node.lag))} tokens ${node.lag < 0 ? "ahead of" : "behind"} ${v.counts ? "the swarm" : "this node"}`] : []),
    v.counts ? `${whole(node.tokens)} tokens trained, as it says` : `${whole(node.together)} tokens trained with this node`);
  lines.push(`${whole(node.tokens_per_second)} tokens/s${known(node.capacity) ? ` of ${whole(node.capacity)} that it could` : ""}, ${whole(node.outer_steps_taken)} outer steps`);
  if (known(node.load)) lines.push(`${node.load} microbatches in hand`);
  if (node.under_way) lines.push(`${node.under_way} microbatches of this node under way to it`);
  if (node.newcomer) lines.push("a newcomer, not averaged with yet");
  if (node.left_alone) lines.push("left alone: " + node.left_alone);
  return lines.join("\n");
}
function swarm(v, s, moves) {
  const at = $("swarm"), { columns, spots, wide, each, radius, high } = place(v.stages, v.nodes, at.clientWidth || 360);
  const picture = canvas(wide, high), links = make("g", {}), own = s.peer_id ? spots.get(s.peer_id) : null;
  picture.append(links);
  pave(picture, v.counts || columns.map(column => column.length), each, high, s.missing_stages, own ? s.stage : null);
  for (const { peer, x, y } of spots.values()) {
    const shown = make("g", {}, title(about(peer, v)), dot(peer, x, y, radius, v.pace || 1));
    const held = Math.min(8, known(peer.load) ? peer.load : 0), around = 2 * Math.PI * (radius + 3);
    if (held) shown.append(make("circle", { cx: x, cy: y, r: radius + 3, fill: "none", stroke: "var(--second)", "stroke-width": 2.5, "stroke-dasharray": `${around * held / 8} ${around}`, transform: `rotate(-90 ${x} ${y})` }));
    if (peer.self) shown.append(make("circle", { cx: x, cy: y, r: Math.max(2, radius / 3), fill: "var(--card)" }));
    picture.append(shown);
    if (moves && news.came.has(peer.peer_id)) picture.append(pulse({ x, y }, radius));
  }
  tell("more", v.more);
  at.replaceChildren(picture);
  if (own) happened(s, picture, links, spots, own, radius, moves);
}
// Microbatches travel between neighbouring stages and come back as gradients; averages link stage peers.
function happened(s, picture, links, spots, own, radius, moves) {
  for (const { peer, x, y } of spots.values()) {
    if (Math.abs(peer.stage - s.stage) !== 1 || !peer.answers) continue;
    const works = news.busy.has(peer.peer_id);
    links.append(make("line", { x1: own.x, y1: own.y, x2: x, y2: y, stroke: works ? "var(--second)" : "var(--quiet)", "stroke-width": works ? 2 : 1, "stroke-opacity": works ? .7 : .35 }));
    if (!works || !moves) continue;
    const [from, to] = peer.stage > s.stage ? [own, { x, y }] : [{ x, y }, own];
    for (const [start, end, wait, fill] of [[from, to, 0, "var(--second)"], [to, from, 450, "var(--good)"]]) {
      const bead = make("circle", { cx: 0, cy: 0, r: radius > 8 ? 5 : 3, fill, opacity: 0 });
      picture.append(bead);
      bead.animate([{ transform: `translate(${start.x}px,${start.y}px)`, opacity: 1 }, { transform: `translate(${end.x}px,${end.y}px)`, opacity: 1 }],
        { duration: 450, delay: wait + Math.random() * 80, easing: "ease-in-out" });
    }
  }
  for (const step of news.met) {
    const spot = step.partner && spots.get(step.partner);
    if (spot) {
      const bend = Math.max(own.x, spot.x) + 26 + radius;
      picture.append(make("path", { d: `M${own.x},${own.y} Q${bend},${(own.y + spot.y) / 2} ${spot.x},${spot.y}`, fill: "none", stroke: "var(--good)", "stroke-width": 3 }));
    }
    if (moves) for (const one of spot ? [own, spot] : [own]) picture.append(pulse(one, radius));
  }
}
// What has happened since the state before: with whom microbatches were trained, who averaged, and who came.
function changes(s, before) {
  const made = { busy: new Set(), met: [], came: new Set() };
  if (before === null || before.peer_id !== s.peer_id) return made;
  if (s.happenings && before.happenings) {
    const until = Math.max(0, ...before.happenings.map(one => one.time));
    made.came = new Set(s.happenings.filter(one => one.time > until).map(one => one.peer_id));
  }
  if (!s.peers) return made;
  const had = new Map(before.peers.map(peer => [peer.peer_id, peer.together]));
  made.busy = new Set(s.peers.filter(peer => had.has(peer.peer_id) && peer.together > had.get(peer.peer_id)).map(peer => peer.peer_id));
  const until = Math.max(0, ...before.exchanges.map(step => step.time));
  made.met = s.exchanges.filter(step => step.time > until);
  return made;
}
const SEEN = ["node", "stage", "state", "tokens/s", "behind by", "outer steps", "loss", "divergence", "trained, tokens"];
const seen = node => [called(node), node.stage, node.answers || node.state === "paused" ? node.state : "silent", whole(node.tokens_per_second), node.answers ? lagging(node.lag) : "–", whole(node.outer_steps_taken), figure(node.training_loss), figure(node.replica_divergence), whole(node.tokens)];
function tablesOfNode(s) {
  const done = s.contribution;
  const hourly = count => `${bytes(count)}, ${bytes(3600 * count / Math.max(1, s.uptime_seconds))} an hour`;
  const kinds = counts => Object.entries(counts || {}).filter(([, count]) => count).sort().map(([kind, count]) => [`· ${kind}`, hourly(count)]);
  columns("members", [...SEEN, "holds", "under way", "trained together"], s.peers.slice().sort((a, b) => (b.answers - a.answers) || (a.stage - b.stage))
    .map(peer => [...seen(peer), whole(peer.load), peer.under_way, whole(peer.together)]));
  rows("contribution", done ? [
    ["tokens trained", whole(done.tokens)], ["microbatches drawn", whole(done.drawn)], ["trained to their end", whole(done.trained)],
    ["served for others", whole(done.served)], ["device at work", lasting(done.busy_seconds)], ["up for", lasting(s.uptime_seconds)],
    ["sent", hourly(sum(done.bytes_sent))], ...kinds(done.bytes_sent), ["received", hourly(sum(done.bytes_received))], ...kinds(done.bytes_received),
    ...(done.bytes_nearby ? [["of both, on this machine", hourly(done.bytes_nearby)]] : []),
  ] : []);
  rows("exchanges", s.exchanges.slice().reverse().map(step => [
    `${clock(step.time)} · ${step.kind.replace("_", " ")}${step.partner ? " with " + short(step.partner) : ""}`, `${known(step.seconds) ? step.seconds.toFixed(step.seconds < 10 ? 2 : 0) : "–"} s`,
  ]));
  const faults = [];
  for (const [name, value] of Object.entries(s.faults)) {
    if (typeof value === "number") { if (value) faults.push([name.replaceAll("_", " "), whole(value)]); }
    else for (const [why, count] of Object.entries(value)) if (count) faults.push([`${name}: ${why === "unknown_method" ? "not served then, as while joining or paused" : why.replaceAll("_", " ")}`, whole(count)]);
  }
  if (s.outer_steps.aborted) faults.push(["outer steps that came to nothing", whole(s.outer_steps.aborted)]);
  rows("faults", faults.length ? faults : [["nothing so far", ""]]);
  const at = $("log"), follows = at.scrollHeight - at.scrollTop - at.clientHeight < 30;
  reveal("log");
  at.replaceChildren(...s.log.map(line => element("div", line.level.replace(/[^A-Z]/g, ""), `${clock(line.time)} ${line.text}`)));
  if (follows) at.scrollTop = at.scrollHeight;
}
const WHAT = { joined: "came to", left: "left", lost: "vanished from", reassigned: "reassigned to" };
function tablesOfSwarm(s) {
  columns("stages", ["stage", "train", "join", "finish", "leave", "unreachable", "tokens/s they could", "trained", "last is behind by", "divergence"],
    s.stages.map((stage, number) => [number, stage.nodes.training, stage.nodes.joining, stage.nodes.finishing, stage.nodes.draining, stage.unreachable, whole(stage.capacity), whole(stage.trained_tokens), whole(stage.lag), figure(stage.replica_divergence && stage.replica_divergence.value)]));
  const here = s.nodes.slice().sort((a, b) => (b.answers - a.answers) || (b.seen_seconds - a.seen_seconds));
  columns("members", [...SEEN, "seen at work"], [
    ...here.map(node => [...seen(node), lasting(node.seen_seconds)]),
    ...s.departed.map(one => [called(one), one.stage, `gone at ${clock(one.until)}`, "–", "–", "–", "–", "–", whole(one.tokens), lasting(one.seen_seconds)]),
  ]);
  rows("happenings", s.happenings.slice().reverse().map(one => [`${clock(one.time)} · ${called(one)} ${WHAT[one.what] || one.what} stage ${one.stage}`, ""]));
  const versions = Object.entries(s.versions).filter(([, count]) => count).map(([version, count]) => [`version ${version}`, `${whole(count)} nodes`]);
  rows("versions", [...versions, ["records that this seed holds", whole(s.seed.records)], ["its version", s.seed.version], ["up for", lasting(s.seed.uptime_seconds)]]);
  for (const name of ["nodes", "trained_tokens"]) { reveal(name); chart(name, [{ points: s.curves[name], tone: "var(--accent)" }]); }
}
function show(s, moves) {
  const v = s.seed ? ofSwarm(s) : ofNode(s), tones = ["var(--accent)", "var(--second)"];
  header(v, s);
  if (!v.tiles) return;
  swarm(v, s, moves && !still.matches);
  chart("loss", [{ points: v.training, tone: tones[0] }, { points: s.curves.validation_loss, tone: tones[1], dots: true }]);
  chart("replica_divergence", [{ points: s.curves.replica_divergence, tone: tones[0] }]);
  chart("speed", v.speeds.map((points, index) => ({ points, tone: tones[index] })));
  const words = v.counts ? [["training, of the last stage", "validation, of stage 0"], ["variance across replicas; medians of what nodes say"], ["by the motion of the nodes' clocks"]]
    : [["training", "validation"], ["variance across replicas, at this node's outer steps"], ["swarm, by this node's clock", "this node"]];
  ["loss", "replica_divergence", "speed"].forEach((name, row) => legend(`${name}-legend`, words[row].map((text, index) => [tones[index], text])));
  legend("swarm-legend", [["var(--accent)", "trains"], ["var(--warn)", "lags by 20 s of the swarm's work"], ["var(--bad)", "by a minute"], ["var(--dim)", "comes to its end, or leaves"], ["var(--quiet)", "joins; dashed: its record claims it, and nobody answers"],
    ...(v.counts ? [] : [["var(--second)", "microbatches; a ring: how many a node holds"], ["var(--good)", "gradients back; averages"]])]);
  (v.counts ? tablesOfSwarm : tablesOfNode)(s);
}

// Asks again and again.
async function look() {
  try {
    const answer = await fetch("api/state", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(answer.status);
    const state = await answer.json(), before = last;
    failed = 0;
    $("all").className = "";
    last = state;
    news = changes(state, before);
    show(state, true);
  } catch (error) {
    failed += 1;
    if (failed <= 2) return;
    $("all").className = "stale";
    tell("state", "no answer", "pill bad");
    tell("detail", last ? `No answer has come since ${clock(last.time)}.` : "Nothing answers here.");
  }
}
addEventListener("resize", () => last && show(last, false));
(async () => {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise(done => setTimeout(done, POLL));
  }
})();
