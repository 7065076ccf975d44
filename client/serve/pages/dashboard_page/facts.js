"use strict";
// What was told, as words and as figures. Nothing here knows the page: arguments in, values out.

const TAGS = ["runtime", "weights", "derived", "kv", "reference", "graphs", "answers", "workspace", "other"]; // as stacked
const MEANINGS = {
  weights: "parameters of the policy", derived: "what layers derive from them at commit",
  kv: "pages of the pool that have been used", reference: "other models, as far as they are on the device",
  graphs: "captured decode steps", answers: "kept for retries, allocated at start", workspace: "what else the engine has asked of the allocator",
  runtime: "what the process held before: Python, torch", other: "unused blocks of the allocator",
};
const WORDS = {
  kv: "KV cache", lease_expiry: "lease expiry", update_begin: "update begins", update_commit: "update commits",
  update_failed: "update failed", in_place: "in place",
};
const MIB = 2 ** 20;
const GAP = 20; // seconds between two events, beyond which nothing is known of the time between: running engines look every 5
const SETTLED = 10; // cycles after which an engine's workspaces have reached their sizes
const RATE_S = 0.9; // a throughput is over so much time at least, where there is so much between two pauses
const LEAST_S = 0.25; // and never over less: for a moment at the edge of a pause the time before the pause counts too

const word = (name) => WORDS[name] ?? name;
const count = (value) => Math.round(value).toLocaleString("en-US");
const short = (value) => (value >= 1e6 ? `${value / 1e6}M` : value >= 1e3 ? `${value / 1e3}k` : String(value));
const minus = (text) => text.replace("-", "−");
const sum = (values) => values.reduce((total, value) => total + value, 0);
const largest = (values, least = 0) => values.reduce((found, value) => Math.max(found, value), least);
const smallest = (values) => values.reduce((found, value) => Math.min(found, value), Infinity);

function median(values) {
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function size(bytes, sign = false) {
  const [unit, scale] = Math.abs(bytes) >= 10240 * MIB ? ["GiB", 1024 * MIB] : ["MiB", MIB];
  const value = Math.round(10 * bytes / scale) / 10 || 0;
  const text = value.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
  return `${sign && value > 0 ? "+" : ""}${minus(text)} ${unit}`;
}

function span(seconds) {
  if (seconds < 1) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
const exactly = (at) => `${clock(at)}.${Math.floor((10 * at) % 10)}`;
const what = (event) => `${word(event.cause)} ${event.detail}`.trimEnd();

// What serves: the name, the weights, and what the engine does.
function titleOf(news) {
  const { status } = news;
  const state = [status.generation === "paused" ? `paused ${word(status.pause_mode)}` : status.generation];
  if (status.weights !== "valid") state.push(`weights ${status.weights}`);
  if (status.released_tags.length) state.push("memory released");
  const name = news.model_name || status.model_path.split("/").pop();
  return [name, status.weight_version, news.answered ? state.join(", ") : "no answer"].filter(Boolean).join(" · ");
}

const ends = (event) => event.cause === "continue" || event.cause === "lease_expiry";

// [first event, last event] of each; null: it lasts.
function pausesOf(events) {
  const found = [];
  let begin = null;
  for (const event of events) {
    if (event.cause === "pause") begin ??= event;
    else if (begin && ends(event)) {
      found.push([begin, event]);
      begin = null;
    }
  }
  return begin ? [...found, [begin, null]] : found;
}

function updatesOf(events) {
  const found = [];
  let begin = null;
  for (const event of events) {
    if (event.cause === "update_begin") begin = event;
    else if (event.cause === "update_commit" || event.cause === "update_failed") {
      found.push([begin ?? event, event]);
      begin = null;
    }
  }
  return begin ? [...found, [begin, null]] : found;
}

// [figure, what it is, what to know about it]: what follows from all events.
function conclusionsOf(events) {
  const continues = events.filter(ends);
  const gave = continues.map((event) => event.returned).filter((bytes) => bytes !== null);
  const left = continues.map((event) => event.residual).filter((bytes) => bytes !== null);
  const found = [["–", "growth without KV pages", "needs two cycles of pause and continue"]];
  if (continues.length > 1) {
    const first = continues.length > SETTLED ? SETTLED - 1 : 0;
    const [from, to] = [continues[first], continues.at(-1)];
    const kv = to.by_tag.kv - from.by_tag.kv;
    found[0][0] = size(to.reserved - from.reserved - kv, true);
    found[0][2] = `over the last ${count(continues.length - 1 - first)} cycles; pages of the KV pool in use for the first time: ${size(kv, true)}`;
  }
  if (gave.length) found.push([size(sum(gave)), "returned at continue", `${size(median(gave))} in the median of ${count(gave.length)}`]);
  if (left.length) found.push([size(largest(left, -Infinity), true), "most left behind by a pause", "reserved after continue, compared with the start of the pause"]);
  return found;
}

// Tokens per second as pieces [[at, rate], …], none of which reaches into a pause: what came between two looks, over the
// time between them that the engine ran. `paused` has [from, to] of each pause, oldest first.
function rates(ticks, paused) {
  if (ticks.length < 2) return [];
  // The engine's own clock says when it was looked at; the answer was some time on its way.
  const began = smallest(ticks.map(([at, uptime]) => at - uptime));
  const ats = ticks.map(([, uptime]) => began + uptime);
  let next = 0, rested = 0;
  const ran = ats.map((at) => {
    for (; next < paused.length && paused[next][1] <= at; next++) rested += paused[next][1] - paused[next][0];
    return at - rested - (next < paused.length ? Math.max(0, at - paused[next][0]) : 0);
  });
  function rate(tick, from) {
    let before = tick - 1;
    const seconds = () => ran[tick] - ran[before];
    while (before > 0 && seconds() < RATE_S && (ats[before] > from || seconds() < LEAST_S)) before--;
    return seconds() > 0.01 ? (ticks[tick][2] - ticks[before][2]) / seconds() : null;
  }
  const pieces = [], last = ats[ats.length - 1];
  let from = ats[0], tick = 1;
  for (const [begin, end] of [...paused, [last, last]]) {
    const to = Math.min(begin, last);
    if (to > from) {
      while (ats[tick] <= from) tick++;
      const piece = [[from, rate(tick, from)]];
      for (; ats[tick] < to; tick++) piece.push([ats[tick], rate(tick, from)]);
      piece.push([to, rate(tick, from)]);
      pieces.push(piece.filter(([, value]) => value !== null));
    }
    from = Math.max(from, end);
  }
  return pieces;
}

// Points [at, value], oldest first, with more at the edges of pauses, so that no line slants into one or out of one: what was
// true before a pause is drawn until it begins, and what is true in it until it ends.
function steady(points, paused) {
  const found = points.slice(0, 1);
  let next = 0;
  for (let index = 1; index < points.length; index++) {
    const [[at, value], [until, then]] = [points[index - 1], points[index]];
    while (next < paused.length && paused[next][1] <= at) next++;
    for (let each = next; each < paused.length && paused[each][0] < until; each++) {
      const [begin, end] = paused[each];
      if (begin > at) found.push([begin, value]);
      if (begin > at && end >= until) found.push([begin, then]);
      if (end < until) found.push([end, value]);
    }
    found.push(points[index]);
  }
  return found;
}

// Ticks in runs, between which nobody knows what the engine did.
function runsOf(ticks) {
  const runs = [];
  for (const tick of ticks) {
    if (!runs.length || tick[8]) runs.push([]);
    runs[runs.length - 1].push(tick);
  }
  return runs;
}

// Points [at, ...] of events and ticks, oldest first, in pieces: not over a time in which nobody looked.
function piecesOf(points, runs) {
  const watched = (from, to) => runs.some((run) => run[0][0] <= from && to <= run[run.length - 1][0]);
  const pieces = [];
  points.forEach((point, index) => {
    const before = points[index - 1];
    if (!index || (point[0] - before[0] > GAP && !watched(before[0], point[0]))) pieces.push([]);
    pieces[pieces.length - 1].push(point);
  });
  return pieces;
}
