const SVG = "http://www.w3.org/2000/svg", POLL = 1000;
const $ = id => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");
let last = null, failed = 0;

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
  if (peak - low < 1e-9 * Math.abs(peak) || peak === low) { low -= Math.abs(low) * .1 || .5; peak += Math.abs(peak) * .1 || .5; }
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
function rows(id, pairs) {
  $(id).replaceChildren(...(pairs.length ? pairs : [["nothing yet", ""]]).map(([name, value]) => element("tr", "", element("td", "dim", name), element("td", "", value))));
}

// Asks again and again; `seen` gets each state and the one before it, `silent` is called where there was no answer.
async function look(seen, silent) {
  try {
    const answer = await fetch("api/state", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(answer.status);
    const state = await answer.json(), before = last;
    failed = 0;
    $("all").className = "";
    last = state;
    seen(state, before);
  } catch (error) {
    failed += 1;
    if (failed > 2) {
      $("all").className = "stale";
      silent();
    }
  }
}
async function follow(seen, silent) {
  for (;;) {
    if (!document.hidden) await look(seen, silent);
    await new Promise(done => setTimeout(done, POLL));
  }
}
