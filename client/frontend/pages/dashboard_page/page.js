"use strict";
const TAGS = ["runtime", "weights", "derived", "kv", "reference", "graphs", "workspace", "other"];
const WORDS = {
  kv: "KV cache", lease_expiry: "lease expiry", update_begin: "update begins", update_commit: "update commits",
  update_failed: "update failed", in_place: "in place",
};
const SPANS = [["2 min", 120], ["10 min", 600], ["all", Infinity]];
const LEFT = 54, RIGHT = 8, MIB = 2 ** 20, MAX_TICKS = 1500, MAX_EVENTS = 4096, ROWS = 60;
const LEAST = 20; // seconds that a chart shows at least
const GAP = 20; // seconds without a look; Prometheus looks every 15
const root = document.documentElement;
const $ = (id) => document.getElementById(id);
const word = (name) => WORDS[name] ?? name;
const count = (value) => Math.round(value).toLocaleString("en-US");
const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");

let key = sessionStorage.getItem("caesura-key") ?? "";
let shown = SPANS[0][1];
let news = null, events = [], older = [], ticks = [], hover = null;

function size(bytes, sign = false) {
  const [unit, scale] = Math.abs(bytes) >= 10240 * MIB ? ["GB", 1024 * MIB] : ["MB", MIB];
  const value = (bytes / scale).toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
  return `${sign && bytes > 0 ? "+" : ""}${value.replace("-", "−")} ${unit}`;
}

function span(seconds) {
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function put(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Asking.

async function poll() {
  let wait = 1000;
  try {
    const waits = !$("login").hidden || (document.hidden && news !== null);
    if (!waits && (await ask())) wait = 0;
  } catch (error) {
    trouble(`This server does not answer (${error.message}). What you see is old.`);
  }
  setTimeout(poll, wait);
}

async function ask() {
  // The newest event is asked for again: a look at steady memory is extended.
  const after = events.length ? events[events.length - 1].seq - 1 : 0;
  const since = ticks.length ? ticks[ticks.length - 1][0] : 0;
  const address = `${location.pathname.replace(/\/+$/, "")}/data?after=${after}&since=${since}`;
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(address, { headers, cache: "no-store", signal: AbortSignal.timeout(10000) });
  $("login").hidden = answer.status !== 401;
  if (!$("login").hidden) {
    trouble(key ? "The key was refused." : "");
    return false;
  }
  if (!answer.ok) throw new Error(`status ${answer.status}: ${(await answer.text()).slice(0, 200)}`);
  const more = take(await answer.json());
  if (!more) draw();
  return more;
}

function take(data) {
  const restarted = news?.status && data.status && news.status.pid !== data.status.pid;
  news = data;
  if (restarted) {
    events = [];
    older = [];
    ticks = [];
    return true;
  }
  const last = ticks.length ? ticks[ticks.length - 1][0] : 0;
  ticks.push(...data.ticks.filter((tick) => tick[0] > last));
  if (ticks.length > MAX_TICKS) ticks.splice(0, ticks.length - MAX_TICKS);
  if (data.history) {
    const fresh = data.history.events;
    if (fresh.length && events.length && fresh[0].seq > events[events.length - 1].seq + 1) events = [];
    if (fresh.length) events = events.filter((event) => event.seq < fresh[0].seq).concat(fresh).slice(-MAX_EVENTS);
    if (data.history.older.length) older = data.history.older;
  }
  return Boolean(data.history?.more);
}

function trouble(text) {
  $("trouble").hidden = !text;
  put("trouble", text);
}

// What the events tell.

function pauses() {
  const found = [];
  let begin = null;
  for (const event of events) {
    if (event.cause === "pause") begin ??= event;
    else if (begin && (event.cause === "continue" || event.cause === "lease_expiry")) {
      found.push([begin.at, event.at]);
      begin = null;
    }
  }
  if (begin) found.push([begin.at, news.now]);
  return found;
}

function updates() {
  const found = [];
  let begin = null;
  for (const event of events) {
    if (event.cause === "update_begin") begin = event;
    else if (event.cause === "update_commit" || event.cause === "update_failed") {
      found.push([(begin ?? event).at, event.at, event.cause === "update_failed"]);
      begin = null;
    }
  }
  if (begin) found.push([begin.at, news.now, false]);
  return found;
}

// A throughput for each tick, over the second before it.
function rates() {
  const found = [];
  let first = 0;
  for (let last = 1; last < ticks.length; last++) {
    while (first + 1 < last && ticks[last][1] - ticks[first + 1][1] >= 0.9) first++;
    const seconds = ticks[last][1] - ticks[first][1];
    if (seconds > 0) found.push([ticks[last][0], (ticks[last][2] - ticks[first][2]) / seconds]);
  }
  return found;
}

// Drawing. Everything that was told becomes text, never markup.

function draw() {
  const status = news.status;
  $("board").hidden = !status;
  if (!status) return trouble("The engine has not answered yet.");
  trouble(news.answered ? "" : `The engine does not answer. What you see is ${span(news.age_s)} old.`);
  $("board").classList.toggle("stale", !news.answered);
  put("title", news.model_name || status.model_path.split("/").pop());
  put("engine", `${status.model_path} (${status.dtype} on ${status.device}), pid ${status.pid}, up ${span(status.uptime_s)}`);
  put("foot", `Caesura ${status.version}, looked at ${clock(news.now)}.`);
  drawState(status);
  drawTiles(status);
  drawCharts(status);
  drawEvents();
}

function fact(card, tone, id, text, note) {
  $(card).dataset.tone = tone;
  put(id, text);
  put(card.replace("-card", "-note"), note);
}

function drawState(status) {
  const generation = status.generation === "paused" ? `PAUSED ${word(status.pause_mode)}` : status.generation.toUpperCase();
  const notes = [];
  if (status.pause_age_s !== null) notes.push(`for ${span(status.pause_age_s)}`);
  if (status.pause_owner !== null) notes.push(`by ${status.pause_owner}`);
  if (status.lease_left_s !== null) notes.push(`lease ends in ${span(Math.max(0, status.lease_left_s))}`);
  if (status.generation === "running") {
    notes.push(status.last_step_age_s === null ? "no step yet" : `last step ${span(status.last_step_age_s)} ago`);
  }
  $("generation").dataset.state = status.generation;
  fact("generation-card", status.generation === "running" ? "good" : "paused", "generation", generation, notes.join(", "));

  const weights = [`epoch ${status.weights_epoch}, ${status.weights}`];
  if (status.weights_detail) weights.push(status.weights_detail);
  if (status.session) weights.push(`${status.session.kind} session, ${count(status.session.written_tensors)} tensors written`);
  if (status.update) weights.push(`${status.update.source}: ${size(status.update.written_bytes)} of ${size(status.update.total_bytes)}`);
  const tone = { valid: "good", updating: "busy" }[status.weights] ?? "bad";
  $("version").dataset.epoch = status.weights_epoch;
  fact("weights-card", tone, "version", status.weight_version || "no label", weights.join(", "));

  const memory = status.device_memory;
  const released = status.released_tags.length ? `released: ${status.released_tags.map(word).join(", ")}; ` : "";
  const note = `${released}reserved; ${size(memory.allocated)} allocated, ${size(memory.available)} available`;
  fact("memory-card", released ? "paused" : "good", "reserved", size(memory.reserved), note);
}

function drawTiles(status) {
  const { kv, totals } = status;
  const updated = totals.updates.reduce((sum, update) => sum + update.committed, 0);
  const failed = totals.updates.reduce((sum, update) => sum + update.failed, 0);
  const paused = totals.pauses.reduce((sum, pause) => sum + pause.count, 0);
  const seconds = totals.pauses.reduce((sum, pause) => sum + pause.seconds, 0);
  const hits = totals.prompt_tokens ? `${(100 * totals.cached_tokens / totals.prompt_tokens).toFixed(0)} %` : "no";
  const tiles = [
    [count(news.throughput), "tokens/s", `${count(status.generated_tokens)} since start`],
    [count(status.running_requests + status.prefilling_requests), "running", `${count(status.prefilling_requests)} in prefill, at most ${count(status.max_running_requests)}`],
    [count(status.waiting_requests), "waiting", `${count(status.num_retractions)} retractions`],
    [`${(100 * kv.held / Math.max(kv.total, 1)).toFixed(1)} %`, "KV held", `of ${count(kv.total)} tokens; ${count(kv.cached)} cached, ${hits} hits`],
    [count(paused), "pauses", `${span(seconds)} in all`],
    [count(updated), "weight updates", failed ? `${count(failed)} failed` : "none failed"],
  ];
  const made = tiles.map(([figure, name, note]) => {
    const tile = element("div");
    tile.append(element("b", "", figure), element("span", "", name), element("small", "", note));
    return tile;
  });
  $("tiles").replaceChildren(...made);
}

function shape(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const path = (points) => `M${points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L")}`;

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}

class Chart {
  constructor(id, height, top, most, text, { named = String, lines = 4, times = false } = {}) {
    this.svg = $(id);
    this.width = Math.max(this.svg.clientWidth, 200);
    this.height = height;
    this.bottom = height - (times ? 20 : 4);
    this.top = top;
    const known = [news.now - LEAST, older[0]?.start, events[0]?.at, ticks[0]?.[0]].filter((at) => at !== undefined);
    this.end = news.now;
    this.start = Math.max(Math.min(...known), news.now - shown);
    const step = nice(Math.max(most, 1e-9) / lines);
    this.most = Math.max(most, step) * 1.04;
    this.parts = [];
    for (let value = 0; value <= this.most; value += step) {
      const y = this.y(value);
      this.add("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y });
      this.add("text", { class: "end", x: LEFT - 8, y: y + 4 }, named(value));
    }
    if (times) this.times();
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("aria-label", text);
  }

  x(at) {
    const share = (Math.min(Math.max(at, this.start), this.end) - this.start) / (this.end - this.start);
    return LEFT + share * (this.width - LEFT - RIGHT);
  }

  y(value) {
    return this.bottom - (value / this.most) * (this.bottom - this.top);
  }

  add(name, attributes, text) {
    this.parts.push(shape(name, attributes, text));
  }

  block(from, to, y, height, kind) {
    if (to < this.start) return;
    const x = this.x(from);
    this.add("rect", { class: kind, x, y, width: Math.max(this.x(to) - x, 2.5), height });
  }

  // Points (seconds, value), oldest first; where nobody has looked for a while, the line is broken.
  line(points, kind, filled) {
    const pieces = [];
    points.slice(Math.max(0, points.findLastIndex(([at]) => at <= this.start))).forEach(([at, value], index, kept) => {
      if (!index || at - kept[index - 1][0] > GAP) pieces.push([]);
      pieces[pieces.length - 1].push([this.x(at), this.y(value)]);
    });
    for (const drawn of pieces.filter((piece) => piece.length > 1)) {
      const ground = [[drawn[drawn.length - 1][0], this.bottom], [drawn[0][0], this.bottom]];
      if (filled) this.add("path", { class: `area ${kind}`, d: `${path([...drawn, ...ground])}Z` });
      this.add("path", { class: `line ${kind}`, d: path(drawn) });
    }
  }

  times() {
    const step = [5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400].find(
      (seconds) => seconds / (this.end - this.start) * (this.width - LEFT) >= 66) ?? 86400;
    for (let at = Math.ceil(this.start / step) * step; at <= this.end; at += step) {
      const text = step < 60 ? clock(at) : clock(at).slice(0, 5);
      if (this.x(at) > LEFT + 24 && this.x(at) < this.width - 24) this.add("text", { class: "mid", x: this.x(at), y: this.height - 4 }, text);
    }
  }

  finish() {
    for (const [from, to] of pauses()) this.block(from, to, this.top, this.bottom - this.top, "band");
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.svg.dataset.start = this.start;
    this.svg.dataset.end = this.end;
    if (hover !== null && hover.at >= this.start) {
      const x = this.x(hover.at);
      this.add("line", { class: "cross", x1: x, x2: x, y1: 0, y2: this.height });
    }
    this.svg.replaceChildren(...this.parts);
  }
}

function drawCharts(status) {
  for (const button of $("spans").children) button.setAttribute("aria-pressed", Number(button.dataset.seconds) === shown);
  const begin = shown === Infinity ? 0 : news.now - shown - 2;
  const recent = ticks.filter((tick) => tick[0] >= begin);
  const most = (values) => values.reduce((a, b) => Math.max(a, b), 0);
  const flow = rates().filter(([at]) => at >= begin);
  const short = (value) => (value >= 1e6 ? `${value / 1e6}M` : value >= 1e4 ? `${value / 1e3}k` : String(value));

  const throughput = new Chart("throughput", 110, 6, Math.max(10, most(flow.map(([, value]) => value))),
    `${count(news.throughput)} tokens per second now`, { named: short });
  throughput.line(flow, "tokens", true);
  throughput.finish();

  const requests = new Chart("requests", 96, 6, Math.max(3, most(recent.map((tick) => Math.max(tick[3], tick[4])))),
    `${status.running_requests} requests running, ${status.waiting_requests} waiting`, { named: short });
  requests.line(recent.map((tick) => [tick[0], tick[3]]), "running", true);
  requests.line(recent.map((tick) => [tick[0], tick[4]]), "waiting", false);
  requests.finish();

  const share = recent.map((tick) => [tick[0], 100 * tick[5] / Math.max(status.kv.total, 1)]);
  const kv = new Chart("kv", 96, 6, Math.max(5, most(share.map(([, value]) => value))), "share of the KV pool", { named: (value) => `${value} %`, times: true });
  kv.line(share, "kv", true);
  kv.finish();
  drawMemory(recent, most);
}

function drawMemory(recent, most) {
  const used = TAGS.filter((tag) => events.some((event) => event.by_tag[tag] > 0));
  const last = events[events.length - 1];
  const entries = used.map((tag) => {
    const entry = element("span");
    entry.append(element("i", `fill-${tag}`), word(tag), element("b", "", size(last.by_tag[tag])));
    return entry;
  });
  $("tags").replaceChildren(...entries);

  const top = most([...events.map((event) => event.reserved), ...recent.map((tick) => tick[6])]);
  const chart = new Chart("memory", 280, 40, top / MIB, "reserved memory by what holds it", { named: count, lines: 5, times: true });
  const begin = Math.max(0, events.findLastIndex((event) => event.at <= chart.start));
  const seen = events.slice(begin);
  const below = new Array(2 * seen.length).fill(0);
  for (const tag of used) {
    const low = [], high = [];
    seen.forEach((event, index) => {
      // A part stands until the next look at it.
      const ends = [event.at, index + 1 < seen.length ? seen[index + 1].at : news.now];
      ends.forEach((at, side) => {
        const x = chart.x(at), slot = 2 * index + side;
        low.push([x, chart.y(below[slot] / MIB)]);
        below[slot] += event.by_tag[tag];
        high.push([x, chart.y(below[slot] / MIB)]);
      });
    });
    if (high.length) chart.add("path", { class: `fill-${tag}`, d: `${path([...high, ...low.reverse()])}Z` });
  }
  chart.line(recent.map((tick) => [tick[0], tick[6] / MIB]), "reserved", false);
  for (const [from, to] of pauses()) chart.block(from, to, 26, 6, "pause");
  for (const [from, to, failed] of updates()) chart.block(from, to, 15, 6, failed ? "update failed" : "update");
  for (const event of seen) {
    if (!["flush", "release", "resume", "idle", "failure", "start"].includes(event.cause) || event.at < chart.start) continue;
    const x = chart.x(event.at);
    chart.add("path", { class: `mark ${event.cause}`, d: `M${(x - 3.5).toFixed(1)},4h7l-3.5,6z` });
  }
  chart.finish();
}

function drawEvents() {
  const rows = events.slice(-ROWS).reverse().map((event) => {
    const row = element("tr"), what = element("td");
    what.append(element("b", `tag ${event.cause}`, word(event.cause)), event.detail);
    const figures = [count(event.step), String(event.weights_epoch), size(event.reserved), event.returned === null ? "" : size(event.returned)];
    row.append(element("td", "", clock(event.at)), what, ...figures.map((text) => element("td", "n", text)));
    return row;
  });
  $("events").replaceChildren(...rows);
}

// Hands.

function explain(move, svg) {
  const box = svg.getBoundingClientRect();
  const share = (move.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
  const [start, end] = [Number(svg.dataset.start), Number(svg.dataset.end)];
  hover = { at: start + Math.min(Math.max(share, 0), 1) * (end - start) };
  const tick = ticks.findLast((each) => each[0] <= hover.at);
  const event = events.findLast((each) => each.at <= hover.at);
  const lines = [clock(hover.at)];
  if (tick) lines.push(`${tick[3]} running, ${tick[4]} waiting, ${size(tick[6])} reserved`);
  if (event) lines.push(`last event: ${word(event.cause)} ${event.detail}`.trimEnd());
  const tooltip = $("tooltip");
  tooltip.textContent = lines.join("\n");
  tooltip.hidden = false;
  tooltip.style.left = `${Math.max(10, Math.min(move.clientX + 16, innerWidth - tooltip.offsetWidth - 10))}px`;
  tooltip.style.top = `${Math.max(10, move.clientY - tooltip.offsetHeight - 14)}px`;
  drawCharts(news.status);
}

for (const svg of document.querySelectorAll("svg.chart")) {
  svg.addEventListener("mousemove", (move) => explain(move, svg));
  svg.addEventListener("mouseleave", () => {
    hover = null;
    $("tooltip").hidden = true;
    drawCharts(news.status);
  });
}

for (const [text, seconds] of SPANS) {
  const button = element("button", "", text);
  button.type = "button";
  button.dataset.seconds = seconds;
  button.addEventListener("click", () => {
    shown = seconds;
    drawCharts(news.status);
  });
  $("spans").append(button);
}

$("login").addEventListener("submit", (submit) => {
  submit.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("caesura-key", key);
  $("key").value = "";
  ask().catch((error) => trouble(error.message));
});

root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
$("theme").addEventListener("click", () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
});
addEventListener("resize", () => news?.status && drawCharts(news.status));
poll();
