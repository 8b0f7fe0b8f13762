"use strict";
// Draws charts of runs: from the JSON in #data, or from what `show` gets. Choices are kept over a refresh, per page.
let DATA = { runs: [] };
const COLORS = ["#2f7ed8", "#e0741b", "#1f9d6b", "#b4519d", "#8a72d4", "#9a7b4f"];
const PHASES = { data: "#e0741b", forward: "#2f7ed8", backward: "#1f9d6b", optimizer: "#8a72d4", validation: "#b4519d", checkpoint: "#9a7b4f", other: "#8b8f98" };
const KEY = "report:" + (document.body.dataset.kept || location.pathname);
let state = { smooth: 0, log: false, axis: "step", hidden: [] };
try { state = { ...state, ...JSON.parse(localStorage.getItem(KEY) || "{}") }; } catch (error) { /* storage is off */ }
const keep = () => { try { localStorage.setItem(KEY, JSON.stringify(state)); } catch (error) { /* storage is off */ } };
const AXES = { step: "step", tokens: "tokens trained on", labels: "tokens with a label", minutes: "minutes of training" };
const color = (i) => COLORS[i % COLORS.length];
const svgNode = (name, attributes, text) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  return node;
};
const short = (v) => {
  const a = Math.abs(v);
  if (a >= 1e9) return +(v / 1e9).toPrecision(3) + "G";
  if (a >= 1e6) return +(v / 1e6).toPrecision(3) + "M";
  if (a >= 1e4) return +(v / 1e3).toPrecision(3) + "k";
  return a !== 0 && a < 1e-3 ? v.toExponential(1) : String(+v.toPrecision(4));
};

// Exponential average with the bias of its start removed; weight 0 leaves the values as they are.
function smoothed(ys, weight) {
  let sum = 0, mass = 0;
  return ys.map((y) => { sum = weight * sum + (1 - weight) * y; mass = weight * mass + (1 - weight); return sum / mass; });
}

// A run's curve over the chosen axis: tokens and minutes are known at logged steps, and interpolated between them.
function placed(run, curve) {
  const axis = run.axes[state.axis];
  if (!axis || axis[0].length < 2) return curve;
  const [steps, values] = axis;
  let k = 1;
  return [curve[0].map((step) => {
    while (k < steps.length - 1 && steps[k] < step) k++;
    const part = (step - steps[k - 1]) / (steps[k] - steps[k - 1]);
    return values[k - 1] + part * (values[k] - values[k - 1]);
  }), curve[1]];
}

function ticks(low, high, isLog, count = 4) {
  if (isLog) {
    const all = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
      for (const m of [1, 2, 5]) all.push(m * 10 ** e);
    const inside = all.filter((v) => v >= low * 0.999 && v <= high * 1.001);
    const decades = inside.filter((v) => Math.abs(Math.log10(v) % 1) < 1e-9);
    return decades.length >= 3 ? decades : inside.length >= 2 ? inside : [low, high];
  }
  const raw = (high - low) / count, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw * 0.999);
  const out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return out;
}

function frame(title, isWide) {
  const figure = document.createElement("figure");
  if (isWide) figure.className = "wide";
  const heading = document.createElement("h2");
  heading.textContent = title;
  figure.append(heading);
  return figure;
}

// Charts are drawn in the pixels of their column, so that labels have the same size on every screen.
function chartSize(isWide = false) {
  const columns = getComputedStyle(document.getElementById("charts")).gridTemplateColumns.split(" ").map(parseFloat);
  const isTwice = isWide && columns.length > 1;
  return [Math.max((isTwice ? 2 * columns[0] + 10 : columns[0]) - 20, 200), isTwice ? 400 : isWide ? 230 : columns.length > 1 ? 190 : 150];
}

// lines: [{name, color, xs, ys, dots, dash}]
function lineChart(title, lines, { isWide = false, isLog = false, fromZero = false } = {}) {
  lines = lines.map((l) => {
    const ok = l.ys.map((y, i) => i).filter((i) => Number.isFinite(l.ys[i]) && (!isLog || l.ys[i] > 0));
    return { ...l, xs: ok.map((i) => l.xs[i]), ys: ok.map((i) => l.ys[i]) };
  }).filter((l) => l.xs.length);
  if (!lines.length) return null;
  const [W, H] = chartSize(isWide), L = 46, R = 8, T = 6, B = 34;
  const xs = lines.flatMap((l) => l.xs), ys = lines.flatMap((l) => l.ys);
  const x0 = Math.min(...xs), x1 = Math.max(...xs, x0 + (state.axis === "minutes" ? 1e-3 : 1));
  let y0 = Math.min(...ys), y1 = Math.max(...ys);
  if (fromZero && !isLog) y0 = Math.min(0, y0);
  if (y1 <= y0) { y1 = y0 + (Math.abs(y0) || 1) * 0.1; if (title.endsWith("(%)") && y0 <= 100) y1 = Math.min(y1, 100); if (!fromZero && !isLog) y0 -= (Math.abs(y0) || 1) * 0.1; }
  const t = isLog ? Math.log : (v) => v;
  const X = (x) => L + (x - x0) / (x1 - x0) * (W - L - R);
  const Y = (y) => H - B - (t(y) - t(y0)) / (t(y1) - t(y0)) * (H - T - B);
  const svg = svgNode("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  for (const v of ticks(y0, y1, isLog, isWide ? 7 : 4)) {
    svg.append(svgNode("line", { class: "grid", x1: L, x2: W - R, y1: Y(v), y2: Y(v) }));
    svg.append(svgNode("text", { x: L - 5, y: Y(v) + 4, "text-anchor": "end" }, short(v)));
  }
  for (const v of ticks(x0, x1, false).filter((v) => state.axis === "minutes" || Number.isInteger(v)))
    svg.append(svgNode("text", { x: X(v), y: H - B + 14, "text-anchor": v === x1 ? "end" : "middle" }, short(v)));
  svg.append(svgNode("text", { x: (L + W - R) / 2, y: H - 5, "text-anchor": "middle" }, AXES[state.axis]));
  for (const l of lines) {
    const path = (values) => values.map((y, i) => `${i ? "L" : "M"}${X(l.xs[i]).toFixed(1)},${Y(y).toFixed(1)}`).join("");
    const isSmooth = state.smooth > 0 && l.smooth;
    svg.append(svgNode("path", { d: path(l.ys), fill: "none", stroke: l.color, "stroke-width": 1.4, "stroke-dasharray": l.dash || "", opacity: isSmooth ? 0.25 : 1 }));
    if (isSmooth) svg.append(svgNode("path", { d: path(smoothed(l.ys, state.smooth)), fill: "none", stroke: l.color, "stroke-width": 1.8 }));
    if ((l.dots && l.xs.length < 60) || l.xs.length === 1) l.xs.forEach((x, i) => svg.append(svgNode("circle", { cx: X(x), cy: Y(l.ys[i]), r: 2.6, fill: l.color })));
  }
  const figure = frame(title, isWide);
  figure.append(svg);
  hover(figure, svg, lines, X, Y, { x0, x1, W, L, R, H, T, B });
  return figure;
}

function hover(figure, svg, lines, X, Y, box) {
  const cursor = svgNode("line", { class: "grid", y1: box.T, y2: box.H - box.B, visibility: "hidden" });
  svg.append(cursor);
  const tip = document.createElement("div");
  tip.className = "tip"; tip.hidden = true;
  figure.append(tip);
  svg.addEventListener("pointermove", (event) => {
    const rect = svg.getBoundingClientRect();
    const px = (event.clientX - rect.left) / rect.width * box.W;
    const x = box.x0 + (px - box.L) / (box.W - box.L - box.R) * (box.x1 - box.x0);
    const near = lines.map((l) => l.xs.reduce((best, v, i) => Math.abs(v - x) < Math.abs(l.xs[best] - x) ? i : best, 0));
    const first = lines[0].xs[near[0]];
    cursor.setAttribute("x1", X(first)); cursor.setAttribute("x2", X(first)); cursor.setAttribute("visibility", "visible");
    tip.replaceChildren();
    const head = document.createElement("div"); head.textContent = `${AXES[state.axis]} ${short(first)}`; tip.append(head);
    lines.forEach((l, k) => {
      if (Math.abs(l.xs[near[k]] - first) > (box.x1 - box.x0) / 20) return;
      const row = document.createElement("div"), dot = document.createElement("span");
      dot.className = "dot"; dot.style.background = l.color;
      row.append(dot, `${l.name ? l.name + " " : ""}${short(l.ys[near[k]])}`);
      tip.append(row);
    });
    tip.hidden = false;
    const left = event.clientX - figure.getBoundingClientRect().left;
    tip.style.left = Math.min(left + 12, figure.clientWidth - tip.offsetWidth - 4) + "px";
    tip.style.top = "34px";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
}

// Each run's seconds by phase, one stacked bar per run.
function phaseChart(runs) {
  const shown = runs.filter((r) => Object.keys(r.phases).length);
  if (!shown.length) return null;
  const figure = frame("Time by phase"), [W] = chartSize(), row = 34;
  const names = [...new Set(shown.flatMap((r) => Object.keys(r.phases)))];
  const svg = svgNode("svg", { viewBox: `0 0 ${W} ${shown.length * row + 6}`, role: "img", "aria-label": "Time by phase" });
  shown.forEach((run, i) => {
    const total = names.reduce((sum, n) => sum + (run.phases[n] || 0), 0);
    let x = 0;
    svg.append(svgNode("text", { x: 0, y: i * row + 11 }, (runs.length > 1 ? run.name + " " : "") + `${short(total)} s`));
    for (const n of names) {
      const width = (run.phases[n] || 0) / total * W;
      const bar = svgNode("rect", { x, y: i * row + 16, width: Math.max(width, 0), height: 14, fill: PHASES[n] || "#8b8f98" });
      bar.append(svgNode("title", {}, `${n}: ${short(run.phases[n] || 0)} s, ${(100 * (run.phases[n] || 0) / total).toFixed(1)} %`));
      svg.append(bar);
      x += width;
    }
  });
  figure.append(svg, legend(names.map((n) => [n, PHASES[n] || "#8b8f98"])));
  return figure;
}

function legend(entries) {
  const box = document.createElement("div");
  box.style.fontSize = "12px";
  for (const [name, fill] of entries) {
    const item = document.createElement("span"), dot = document.createElement("span");
    dot.className = "dot"; dot.style.background = fill; item.style.cssText = "margin-right: 10px; white-space: nowrap";
    item.append(dot, name); box.append(item, " ");
  }
  return box;
}

// Documents by length, and the causal mask of one pack: each document attends inside its own triangle.
function lengthChart(run) {
  const { edges, documents } = run.lengths;
  if (!documents || !documents.length) return null;
  const [W, H] = chartSize(), B = 22, top = Math.max(...documents), figure = frame("Documents by length (tokens)");
  const svg = svgNode("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "Documents by length" });
  const end = edges[edges.length - 1];
  documents.forEach((n, i) => {
    const bar = svgNode("rect", { x: edges[i] / end * W, width: Math.max(W / documents.length - 1, 1), y: H - B - n / top * (H - B - 8), height: n / top * (H - B - 8), fill: COLORS[0] });
    bar.append(svgNode("title", {}, `${short(edges[i])} to ${short(edges[i + 1])} tokens: ${n}`));
    svg.append(bar);
  });
  if (run.packSize && run.packSize <= end)
    svg.append(svgNode("line", { x1: run.packSize / end * W, x2: run.packSize / end * W, y1: 0, y2: H - B, stroke: COLORS[1], "stroke-dasharray": "4 3" }));
  svg.append(svgNode("text", { x: 0, y: H - 6 }, "0"), svgNode("text", { x: W, y: H - 6, "text-anchor": "end" }, short(end)));
  figure.append(svg);
  return figure;
}

function maskChart(run) {
  const pack = run.lengths.pack;
  if (!pack || !pack.length) return null;
  const size = Math.max(run.packSize || 0, pack.reduce((a, b) => a + b, 0)), figure = frame("Mask of one pack");
  const [W] = chartSize(), left = (W - 186) / 2;
  const svg = svgNode("svg", { viewBox: `0 0 ${W} 190`, role: "img", "aria-label": "Mask of one pack" });
  const k = 186 / size;
  svg.append(svgNode("rect", { x: left, y: 2, width: 186, height: 186, fill: "none", class: "grid" }));
  let at = 0;
  pack.forEach((n, i) => {
    const a = left + at * k, y = 2 + at * k, s = n * k;
    const end = 2 + (run.lengths.until ? run.lengths.until[i] : at + n) * k;  // keys of a tree are seen by its branches, too
    const shape = svgNode("path", { d: `M${a},${y}L${a + s},${y + s}L${a + s},${end}L${a},${end}Z`, fill: color(i) });
    shape.append(svgNode("title", {}, `${run.lengths.until ? "part of a tree," : "document of"} ${n} tokens`));
    svg.append(shape);
    at += n;
  });
  figure.append(svg);
  return figure;
}

const PANELS = [["grad_norm", "Gradient norm", 1], ["lr", "Learning rate", 1], ["tokens_per_s", "Tokens per second", 1], ["mfu_frac", "MFU (%)", 100],
  ["tflops_per_s", "Useful TFLOP/s", 1], ["fill_frac", "Fill (%)", 100], ["memory_gib", "Peak memory (GiB)", 1], ["data_wait_s", "Data wait (ms per step)", 1000]];

function charts() {
  const main = document.getElementById("charts");
  if (!DATA.runs.length || !main.clientWidth) return;  // nothing has come yet; or it is not shown, and has no columns to draw in
  main.querySelectorAll("figure").forEach((figure) => figure.remove());
  const runs = DATA.runs.map((run, i) => ({ ...run, color: color(i) })).filter((run) => !state.hidden.includes(run.name));
  const several = DATA.runs.length > 1;
  const points = (run, key, scale = 1) => {
    const [xs, ys] = placed(run, run.curves[key] || [[], []]);
    return { xs, ys: ys.map((y) => y * scale) };
  };
  const validated = (run, kind, scale = 1) => Object.keys(run.curves).filter((key) => key.startsWith(kind + "/")).map((key, i) => ({
    name: (several ? run.name + " " : "") + key.slice(kind.length + 1).replaceAll("_", " "), color: several ? run.color : color(i + 1), dots: true, dash: "5 4", ...points(run, key, scale) }));
  const loss = runs.flatMap((run) => [
    { name: several ? run.name : "training", color: run.color, smooth: true, ...points(run, "loss") }, ...validated(run, "val_loss")]);
  const units = new Set(DATA.runs.map((run) => run.lossUnit));
  const [unit] = units.size === 1 ? units : [""];
  const figures = [lineChart(unit ? `Loss (${unit})` : "Loss", loss, { isWide: true, isLog: state.log })];
  if (figures[0]) figures[0].append(legend(loss.filter((l) => l.xs.length).map((l) => [l.name, l.color])));
  for (const [kind, title, scale] of [["val_token_accuracy", "Next token right in validation (%)", 100], ["val_perplexity", "Perplexity in validation", 1],
    ["val_accuracy", "Accuracy in validation (%)", 100], ["val_f1", "Macro F1 in validation (%)", 100], ["val_ece", "Calibration error in validation (%)", 100], ["val_pearson", "Correlation in validation", 1]])
    figures.push(lineChart(title, runs.flatMap((run) => validated(run, kind, scale))));
  const ofTasks = runs.flatMap((run) => Object.keys(run.curves)).filter((key) => key.startsWith("task_")).map((key) => key.split("/")[0]);
  for (const kind of new Set(ofTasks)) {
    const lines = runs.flatMap((run) => validated(run, kind, 100));
    figures.push(lineChart(kind === "task_score" ? "Score of tasks (%)" : `pass@${kind.slice(13)} of tasks (%)`, lines));
    if (figures[figures.length - 1]) figures[figures.length - 1].append(legend(lines.map((l) => [l.name, l.color])));
  }
  for (const [key, title, scale] of PANELS) {
    const lines = runs.filter((run) => run.curves[key]).map((run) => ({ name: several ? run.name : "", color: run.color, smooth: key === "grad_norm", ...points(run, key, scale) }));
    const spread = lines.flatMap((l) => l.ys).filter((y) => y > 0).sort((a, b) => a - b);
    const spikes = key === "grad_norm" && spread.length && spread[spread.length - 1] > 15 * spread[spread.length >> 1];
    if (key === "tflops_per_s" && runs.every((run) => run.curves.mfu_frac)) continue;
    figures.push(lineChart(title, lines, { isLog: spikes || (key === "grad_norm" && state.log), fromZero: !["lr", "grad_norm", "fill_frac"].includes(key) }));
  }
  figures.push(phaseChart(runs));
  if (!several) figures.push(lengthChart(DATA.runs[0]), maskChart(DATA.runs[0]));
  const samples = document.getElementById("samples");  // of a page about data, which come before the charts
  if (samples) samples.after(...figures.filter(Boolean)); else main.prepend(...figures.filter(Boolean));
}

function controls() {
  const box = document.getElementById("controls");
  box.replaceChildren();
  const control = (label, input, onInput) => {
    const element = document.createElement("label");
    element.append(input, label);
    input.addEventListener("input", () => { onInput(input); keep(); charts(); });
    box.append(element);
  };
  const field = (attributes) => Object.assign(document.createElement("input"), attributes);
  const select = Object.assign(document.createElement("select"));
  for (const axis in AXES) select.append(new Option(AXES[axis], axis, false, axis === state.axis));
  control("horizontal axis", select, (input) => { state.axis = input.value; });
  control("logarithmic loss", field({ type: "checkbox", checked: state.log }), (input) => { state.log = input.checked; });
  control("smoothing", field({ type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth }), (input) => { state.smooth = +input.value; });
  if (DATA.runs.length > 1) DATA.runs.forEach((run, i) => {
    const dot = document.createElement("span");
    dot.className = "dot"; dot.style.background = color(i);
    const name = document.createElement("span");
    name.append(dot, run.name);
    control(name, field({ type: "checkbox", checked: !state.hidden.includes(run.name) }), (input) => {
      state.hidden = input.checked ? state.hidden.filter((n) => n !== run.name) : [...state.hidden, run.name];
    });
  });
}

// Draws these runs from now on; the controls stay, and keep the focus, as long as the runs are the same.
function show(data) {
  const names = (runs) => JSON.stringify(runs.map((run) => run.name));
  const isNew = names(data.runs) !== names(DATA.runs) || !document.getElementById("controls").children.length;
  DATA = data;
  if (isNew) controls();
  charts();
}
const embedded = document.getElementById("data");
if (embedded) show(JSON.parse(embedded.textContent));
let drawn = innerWidth;
addEventListener("resize", () => { if (innerWidth !== drawn) { drawn = innerWidth; charts(); } });
