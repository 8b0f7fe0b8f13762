"use strict";
// The board: which runs are shown, and the four views of them. What comes from a run is set as text; the tables of a report come
// as HTML that the server has escaped.
const POLL_MS = 2000;
const byId = (id) => document.getElementById(id);
const VIEWS = ["report", "data", "chat", "job"];
let view = "report", shown = [], listed = [], seen = "", drawnFor = "", chat = [], answering = null, chatOf = "", waits = "", tookMs = 0;

async function call(path, body) {
  const options = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(`api/${path}`, options);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || answer.statusText);
  return found;
}

function trouble(text) {
  const box = byId("trouble");
  if (box.textContent !== text) box.textContent = text;
  box.hidden = !text;
}

const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const ofRuns = () => shown.map((key) => `run=${encodeURIComponent(key)}`).join("&");
const first = () => shown[0];

// ---- which runs

function readAddress() {
  const [, name = "", ...keys] = location.hash.slice(1).split("/");
  if (VIEWS.includes(name)) view = name;
  shown = keys.filter(Boolean).map(decodeURIComponent);
}

function go() {
  history.replaceState(null, "", `#/${view}/${shown.map(encodeURIComponent).join("/")}`);
  for (const tab of byId("tabs").children) {
    const isSelected = tab.dataset.view === view;
    tab.setAttribute("aria-selected", isSelected);
    tab.tabIndex = isSelected ? 0 : -1;
  }
  byId("panel").setAttribute("aria-labelledby", `tab-${view}`);
  byId("drawn").hidden = view !== "report" && view !== "data";
  byId("chat").hidden = view !== "chat";
  byId("job").hidden = view !== "job";
  drawnFor = "";
  const isOfOne = view !== "report" && shown.length > 1;
  byId("whose").hidden = !isOfOne;
  setText(byId("whose"), isOfOne ? `of ${first()}, the first of the chosen runs` : "");
  document.title = shown.join(" · ") || "Runs";
  trouble("");
  drawList();
  update();
}

// Rows are kept and changed in place, so that the focus stays where it is.
function drawList() {
  const list = byId("runs");
  const rows = new Map([...list.children].map((row) => [row.dataset.key, row]));
  listed.forEach((run, i) => {
    let row = rows.get(run.key);
    if (!row) {
      row = document.createElement("li");
      row.dataset.key = run.key;
      const box = Object.assign(document.createElement("input"), { type: "checkbox" });
      box.setAttribute("aria-label", `compare ${run.key}`);
      box.addEventListener("change", () => {
        shown = box.checked ? [...shown, run.key] : shown.filter((key) => key !== run.key);
        go();
      });
      const button = Object.assign(document.createElement("button"), { type: "button" });
      for (const part of ["name", "mark", "numbers"]) button.append(Object.assign(document.createElement("span"), { className: part }));
      button.addEventListener("click", () => { shown = [run.key]; go(); });
      row.append(box, button);
    }
    rows.delete(run.key);
    const [box, button] = row.children;
    const isShown = shown.includes(run.key);
    row.classList.toggle("shown", isShown);
    box.checked = isShown;
    if (isShown) button.setAttribute("aria-current", "true"); else button.removeAttribute("aria-current");
    const [name, mark, numbers] = button.children;
    setText(name, run.key);
    setText(mark, run.state);
    mark.className = `mark ${/^[a-z]+$/.test(run.state) ? run.state : ""}`;
    setText(numbers, run.step ? `step ${run.step.toLocaleString("en")}${run.loss ? `, loss ${run.loss}` : ""}` : "no step yet");
    if (list.children[i] !== row) list.insertBefore(row, list.children[i] || null);
  });
  rows.forEach((row) => row.remove());
  byId("none").hidden = listed.length > 0;
}

// ---- the views

// The tables are replaced only when they change; open details and the focus among them stay.
function replaceSections(target, html) {
  const places = (kind) => [...target.querySelectorAll(kind)];
  const open = places("details").map((one) => one.open);
  const focused = places("summary").indexOf(document.activeElement);
  const parts = new DOMParser().parseFromString(html, "text/html").body.childNodes;
  target.replaceChildren(...parts);
  places("details").forEach((one, i) => { one.open = open[i] || false; });
  if (focused >= 0) places("summary")[focused]?.focus();
}

async function updateReport() {
  const asked = `report/${ofRuns()}`;
  const found = await call(`report?${ofRuns()}&seen=${drawnFor === asked ? seen : ""}`);
  if (view !== "report" || asked !== `report/${ofRuns()}`) return;
  // an answer that nothing has changed names no runs that wait: those of the answer before still do
  if (found.waiting) waits = found.waiting.join("\n");
  trouble(waits);
  if (found.version === seen && drawnFor === asked) return;
  replaceSections(byId("head"), found.head);
  replaceSections(byId("charts"), found.sections);
  byId("controls").hidden = !found.data.runs.length;
  seen = found.version;
  drawnFor = asked;
  if (found.data.runs.length) show(found.data);
}

async function updateData() {
  const asked = `data/${first()}`;
  if (drawnFor === asked) return;
  drawnFor = asked;
  byId("head").replaceChildren();
  byId("controls").hidden = true;
  byId("charts").replaceChildren(Object.assign(document.createElement("p"), { className: "soft", textContent: "Reading the data of this run…" }));
  try {
    const found = await call(`data?run=${encodeURIComponent(first())}`);
    if (drawnFor !== asked) return;
    const note = Object.assign(document.createElement("p"), { className: "soft" });
    const mark = Object.assign(document.createElement("mark"), { textContent: "marked" });
    note.append("The model learns to write the ", mark, " text and reads the rest. Documents share packs, and see only themselves.");
    byId("head").replaceChildren(note);
    replaceSections(byId("charts"), found.sections);
    show(found.data);
  } catch (error) {
    if (drawnFor === asked) byId("charts").replaceChildren();
    throw error;
  }
}

function facts(box, pairs) {
  const wanted = pairs.filter(([, text]) => text);
  if (box.textContent === wanted.flat().join("")) return;
  box.replaceChildren(...wanted.map(([name, text]) => {
    const pair = document.createElement("div");
    pair.append(Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: text }));
    return pair;
  }));
}

let job = null;
async function updateJob() {
  const key = first();
  const found = await call(`job?run=${encodeURIComponent(key)}`);
  if (key !== first() || (view !== "job" && view !== "chat")) return;
  job = found;
  if (view === "chat") return drawCheckpoints(key, found.checkpoints);
  facts(byId("state"), [["run", key], ["state", found.state], ["reason", found.reason], ["checkpoint", found.checkpoint], ["trained by", found.holder]]);
  const runs = Boolean(found.holder) || found.state === "starting";
  byId("stop").disabled = !runs;
  setText(byId("command"), found.folder ? `cd ${found.folder}\n${found.command}` : found.command || "none");
  byId("continue").disabled = runs || Boolean(found.refusal) || found.state === "finished";
  setText(byId("refusal"), runs ? "It is running." : found.state === "finished" ? "It is finished." : found.refusal);
  byId("screen-part").hidden = !found.screen;
  setText(byId("screen"), found.screen);
}

async function act(path, body, said) {
  try {
    await call(path, body);
    setText(byId("said"), said);
    await updateJob();
  } catch (error) { setText(byId("said"), error.message); }
}

// ---- chat

function drawCheckpoints(key, names) {
  if (chatOf !== key) { chatOf = key; newChat(); }
  const box = byId("checkpoint");
  if ([...box.options].map((one) => one.value).join("/") !== names.join("/")) {
    const before = box.value;
    box.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(before)) box.value = before;
  }
  byId("send").disabled = !names.length || Boolean(answering);
  if (!names.length) trouble("This run has no checkpoint and no export yet: there is nothing to ask.");
}

function newChat() {
  answering?.abort();
  chat = [];
  byId("log").replaceChildren();
}

function turn(role, text) {
  const box = Object.assign(document.createElement("div"), { className: role, textContent: text });
  box.setAttribute("aria-label", role === "user" ? "you" : "model");
  byId("log").append(box);
  box.scrollIntoView({ block: "nearest" });
  return box;
}

async function ask() {
  const text = byId("message").value.trim();
  if (!text || answering || !byId("checkpoint").value) return;
  byId("message").value = "";
  const messages = chat = [...chat, { role: "user", content: text }];
  turn("user", text);
  const box = turn("assistant waits", "");
  answering = new AbortController();
  byId("halt").hidden = false;
  byId("send").disabled = true;
  trouble("");
  let answer = "", failed = "";
  try {
    const asked = { run: first(), checkpoint: byId("checkpoint").value, messages, max_new_tokens: +byId("most").value, temperature: +byId("temperature").value };
    const response = await fetch("api/chat", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked), signal: answering.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines.map(JSON.parse)) {
        if (line.error) failed = line.error;
        answer += line.text || "";
      }
      box.textContent = answer;
      byId("log").scrollTop = byId("log").scrollHeight;
    }
  } catch (error) { if (error.name !== "AbortError") failed = error.message; }
  answer = answer.replace(/\n$/, "");
  box.textContent = answer || (failed ? "" : "(nothing)");
  box.className = "assistant";
  if (failed) { trouble(failed); if (!answer) box.remove(); }
  if (chat === messages) chat = answer ? [...chat, { role: "assistant", content: answer }] : chat.slice(0, -1);
  answering = null;
  byId("halt").hidden = true;
  byId("send").disabled = false;
}

// ---- the clock

async function update() {
  if (!shown.length) return;
  const began = performance.now();
  try {
    if (view === "report") await updateReport();
    else if (view === "data") await updateData();
    else await updateJob();
  } catch (error) { trouble(error.message); }
  tookMs = performance.now() - began;
}

async function poll() {
  if (!document.hidden) {
    try {
      listed = (await call("runs")).runs;
      if (!shown.length && listed.length) { shown = [listed[0].key]; go(); }
      else { drawList(); await update(); }
    } catch (error) { trouble(`The board does not answer: ${error.message}`); }
  }
  setTimeout(poll, Math.max(POLL_MS, 10 * tookMs));  // a long report is drawn less often
}

byId("tabs").addEventListener("click", (event) => {
  if (event.target.dataset.view) { view = event.target.dataset.view; go(); }
});
byId("tabs").addEventListener("keydown", (event) => {
  const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -VIEWS.indexOf(view), End: VIEWS.length - 1 - VIEWS.indexOf(view) };
  if (!(event.key in moves)) return;
  event.preventDefault();
  view = VIEWS[(VIEWS.indexOf(view) + moves[event.key] + VIEWS.length) % VIEWS.length];
  go();
  byId(`tab-${view}`).focus();
});
byId("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
byId("halt").addEventListener("click", () => answering?.abort());
byId("clear").addEventListener("click", newChat);
byId("stop").addEventListener("click", () => act("stop", { run: first() }, "The run was asked to stop; it saves at its next step."));
byId("continue").addEventListener("click", () => act("continue", { run: first(), command: job.command }, "The command was started; it goes on when the board ends."));
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); byId("panel").focus(); });
addEventListener("hashchange", () => { readAddress(); go(); });
readAddress();
go();
poll();
