// The page: asks for news (a file has them inside), and draws what is known. Everything that was told becomes text, never markup.

const SPANS = [["2 min", 120], ["10 min", 600], ["1 h", 3600], ["all", Infinity]];
const STAGES = {
  pause: "wait for the step in flight", "update.receive": "receive tensors", "update.copy": "copy into the model",
  "update.derive": "derive what layers need", "update.flush": "flush: drop stale KV", continue: "resume: empty the allocator",
};
const CLOSE = 48; // events of the closest view
const MAX_TICKS = 4000, MAX_EVENTS = 4096, ROWS = 200;
const LEAST = 20; // seconds that the charts of a server show at least
const MARKED = ["flush", "release", "resume", "idle", "failure", "start"];
const root = document.documentElement;
const $ = (id) => document.getElementById(id);
const filed = $("data").textContent !== "";

let key = filed ? "" : sessionStorage.getItem("caesura-key") ?? "";
let shown = filed ? Infinity : SPANS[1][1];
let axis = "time", most = Infinity; // of the charts of memory: what they go by, and how many events
let picture = null; // the last image: its number, time, size, and a small PNG
let news = null, events = [], older = [], ticks = [], hover = null, listed = "";

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
    if (news?.status) {
      news.answered = false;
      draw();
    }
    trouble(`This server does not answer (${error.message}). What you see is old.`);
  }
  setTimeout(poll, wait);
}

async function ask() {
  // The newest event is asked for again: a look at steady memory is extended.
  const after = events.length ? events[events.length - 1].seq - 1 : 0;
  const since = ticks.length ? ticks[ticks.length - 1][0] : 0;
  const address = `${location.pathname.replace(/\/+$/, "")}/data?after=${after}&since=${since}&image=${picture?.number ?? 0}`;
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
  if (data.image) picture = data.image;
  if (restarted) {
    events = [];
    older = [];
    ticks = [];
    return true;
  }
  const last = ticks.length ? ticks[ticks.length - 1][0] : 0;
  ticks.push(...data.ticks.filter((tick) => tick[0] > last));
  if (ticks.length > MAX_TICKS) ticks = []; // the server has a thinner record of all of it
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

// Drawing.

function draw() {
  const status = news.status;
  $("board").hidden = !status;
  if (!status) return trouble("The engine has not answered yet.");
  trouble(news.answered ? "" : `The engine does not answer. What you see is ${span(news.age_s)} old.`);
  $("board").classList.toggle("stale", !news.answered);
  put("title", titleOf(news));
  document.title = $("title").textContent;
  const seen = filed ? `. Seen on ${new Date(1000 * news.now).toLocaleDateString("en-CA")} at ${clock(news.now)}` : "";
  put("engine", `${status.model_path} (${status.dtype} on ${status.device}), pid ${status.pid}, up ${span(status.uptime_s)}${seen}`);
  put("foot", `Caesura ${status.version}${filed ? "" : `, looked at ${clock(news.now)}`}.`);
  drawState(status);
  drawTiles(status);
  drawPicture(status);
  drawSamples(status);
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
  const free = memory.available === null ? "" : `, ${size(memory.available)} available`;
  const note = `${released}reserved; ${size(memory.allocated)} allocated${free}`;
  fact("memory-card", released ? "paused" : "good", "reserved", size(memory.reserved), note);
}

function tile([figure, name, note]) {
  const made = element("div");
  made.append(element("b", "", figure), element("span", "", name), element("small", "", note));
  return made;
}

function drawTiles(status) {
  const { kv, totals } = status;
  const updated = sum(totals.updates.map((update) => update.committed));
  const failed = sum(totals.updates.map((update) => update.failed));
  const paused = sum(totals.pauses.map((pause) => pause.count));
  const seconds = sum(totals.pauses.map((pause) => pause.seconds));
  const hits = totals.prompt_tokens ? `${(100 * totals.cached_tokens / totals.prompt_tokens).toFixed(0)} %` : "no";
  const lasted = pausesOf(events).filter(([, end]) => end).map(([begin, end]) => end.at - begin.at);
  const usual = lasted.length ? `, ${span(median(lasted))} in the median, at most ${span(largest(lasted))}` : "";
  const commit = events.findLast((event) => event.cause === "update_commit");
  // While nothing runs, the last second is none of the present.
  const speed = news.throughput === null ? "–" : count(status.generation === "paused" ? 0 : news.throughput);
  const counted = news.replicas.length ? ", summed over replicas" : ""; // each counts its own
  const { images } = status, finished = sum(Object.values(totals.finished_requests));
  const stages = images && `${count(images.encoding)} encoding, ${count(images.denoising)} denoising, ${count(images.decoding)} decoding`;
  const prefills = `${count(status.prefilling_requests)} in prefill`;
  $("tiles").replaceChildren(...[
    [speed, images ? "denoise steps/s" : "tokens/s", `${count(status.generated_tokens)} since start`],
    [count(status.running_requests + status.prefilling_requests), "running", `${stages ?? prefills}, at most ${count(status.max_running_requests)}`],
    [count(status.waiting_requests), "waiting", `${count(status.num_retractions)} retractions`],
    images
      ? [count(finished), "images ended", `${count(totals.finished_requests.length ?? 0)} complete, ${count(totals.finished_requests.abort ?? 0)} aborted`]
      : [`${(100 * kv.held / Math.max(kv.total, 1)).toFixed(1)} %`, "KV held", `of ${count(kv.total)} tokens; ${count(kv.cached)} cached, ${hits} hits`],
    [count(paused), `pauses${counted}`, `${span(seconds)} in all${usual}`],
    [count(updated), `weight updates${counted}`, `${failed ? `${count(failed)} failed` : "none failed"}${commit ? `; last: ${commit.detail}` : ""}`],
  ].map(tile));
  $("conclusions").replaceChildren(...conclusionsOf(events).map(tile));
}

function drawSamples(status) {
  const { staleness } = status.totals, ended = sum(staleness.counts), most = largest(staleness.counts, 1);
  $("latency-card").hidden = !news.latencies.length;
  $("latencies").replaceChildren(...news.latencies.map((each) => {
    const row = element("tr");
    const figures = [...[each.p50, each.p90, each.p99].map(span), count(each.count)];
    row.append(element("td", "", each.name), ...figures.map((text) => element("td", "n", text)));
    return row;
  }));
  $("update-card").hidden = !news.update;
  if (news.update) {
    const { at, updates, seconds } = news.update, total = sum(Object.values(seconds));
    let before = 0;
    put("update-note", `Completed at ${clock(at)}, ${span(total)} in these stages${updates > 1 ? `; the mean of ${updates}` : ""}. Time between calls of the trainer is not in it.`);
    $("update").replaceChildren(...Object.entries(STAGES).map(([name, text]) => {
      const row = bar(text, seconds[name] ?? 0, Math.max(total, 1e-9), before, span(seconds[name] ?? 0), name);
      before += seconds[name] ?? 0;
      return row;
    }));
  }
  $("staleness-card").hidden = !ended;
  const last = staleness.counts.findLastIndex((each) => each > 0);
  $("staleness").replaceChildren(...staleness.counts.slice(0, Math.max(last, 1) + 1).map((each, epochs) => {
    const name = epochs === 0 ? "none" : epochs === 1 ? "1 update" : epochs > 8 ? "9 or more" : `${epochs} updates`;
    return bar(name, each, most, 0, `${count(each)} (${(100 * each / Math.max(ended, 1)).toFixed(0)} %)`, "kv");
  }));
  $("samples").hidden = $("latency-card").hidden && $("update-card").hidden && $("staleness-card").hidden;
}

// A row with a bar from `before` on, of a whole.
function bar(name, value, whole, before, text, kind) {
  const row = element("tr"), cell = element("td", "share"), drawn = element("i", `key ${kind.replace("update.", "stage-")}`);
  drawn.style.marginLeft = `${(100 * before / whole).toFixed(2)}%`;
  drawn.style.width = `${(100 * value / whole).toFixed(2)}%`;
  cell.append(drawn);
  row.append(element("td", "", name), cell, element("td", "n", text));
  return row;
}

function drawPicture(status) {
  put("unit", status.images ? "step" : "token");
  put("rate", status.images ? "denoise steps per second" : "tokens per second");
  $("kv-held").hidden = Boolean(status.images);
  $("picture").hidden = !picture;
  if (!picture) return;
  const source = `data:image/png;base64,${picture.png}`;
  if ($("last-image").src !== source) $("last-image").src = source;
  put("picture-note", `${picture.width} x ${picture.height} pixels, made through this server at ${clock(picture.at)}; shown small, to whoever may ask for images here.`);
}

function timeAxis() {
  const known = [older[0]?.start, events[0]?.at, ticks[0]?.[0]].filter((at) => at !== undefined);
  const end = filed ? Math.max(events[events.length - 1].until, ticks[ticks.length - 1]?.[0] ?? 0) : news.now;
  const start = Math.max(smallest([...known, end - (filed ? 1 : LEAST)]), end - shown);
  return { name: "time", start, end, at: (event) => event.at, until: (event) => event.until };
}

// Every event has the same room.
function eventAxis() {
  const place = (event) => event.seq, last = events[events.length - 1].seq;
  return { name: "event", start: Math.max(events[0].seq, last + 1 - most), end: last + 1, at: place, until: place };
}

function drawCharts(status) {
  for (const button of $("spans").children) button.setAttribute("aria-pressed", button.value === String(shown));
  for (const button of $("axes").children) button.setAttribute("aria-pressed", button.value === `${axis} ${most}`);
  const time = timeAxis(), pauses = pausesOf(events);
  $("load").hidden = filed && !ticks.length;
  $("memory").hidden = !events.length;
  if (!$("load").hidden) drawLoad(status, time, pauses);
  const told = news.replicas.find(({ state }) => state === "serving");
  put("memory-title", told ? `Memory of ${told.name}` : "Memory");
  if (!$("memory").hidden) drawMemory(axis === "time" ? time : eventAxis(), pauses);
  point();
}

function drawLoad(status, time, pauses) {
  const runs = runsOf(ticks), paused = pauses.map(([begin, end]) => [begin.at, end?.at ?? Infinity]);
  const recent = ticks.filter((tick) => tick[0] >= time.start);
  const flow = runs.flatMap((run) => rates(run, paused)).filter((piece) => piece.length);
  const seen = flow.flat().filter(([at]) => at >= time.start);
  const values = (value) => runs.map((run) => steady(run.map((tick) => [tick[0], value(tick)]), paused));

  const text = `${count(news.throughput ?? 0)} ${$("rate").textContent} now`;
  const throughput = new Chart($("throughput"), time, [0, largest(seen.map(([, value]) => value), 10)], text, { height: 110, named: short });
  throughput.line(flow, "tokens", { filled: true });
  throughput.finish(pauses, []);

  const waiting = `${status.running_requests} requests running, ${status.waiting_requests} waiting`;
  const requests = new Chart($("requests"), time, [0, largest(recent.map((tick) => Math.max(tick[3], tick[4])), 3)], waiting, { named: short });
  requests.line(values((tick) => tick[3]), "running", { filled: true });
  requests.line(values((tick) => tick[4]), "waiting");
  requests.finish(pauses, []);

  drawReplicas(time, pauses, runs);
  if (status.images) return;
  const share = (tick) => 100 * tick[5] / Math.max(status.kv.total, 1);
  const held = [0, largest(recent.map(share), 5)];
  const kv = new Chart($("kv"), time, held, "share of the KV pool", { named: (value) => `${value} %`, labels: true });
  kv.line(values(share), "kv", { filled: true });
  kv.finish(pauses, []);
  drawDrift(status, time, pauses, runs);
}

function drawDrift({ drift }, time, pauses, runs) {
  $("drift-card").hidden = !drift;
  if (!drift) return;
  const power = (value) => (value ? value.toExponential(0) : "0");
  const update = drift.update ? `, the last update by ${power(drift.update.mean_abs)}` : "";
  const text = `${drift.state}: epoch ${drift.weights_epoch}, ${count(drift.tokens)} tokens by ${power(drift.mean_abs)}, at most ${power(drift.max_abs)}${update}`;
  put("drift-note", text);
  const points = runs.map((run) => run.filter((tick) => typeof tick[9] === "number").map((tick) => [tick[0], tick[9]]));
  const chart = new Chart($("drift"), time, [0, largest(points.flat().map(([, value]) => value), 1e-6)], text, { height: 60, lines: 2, named: power, labels: true });
  chart.line(points.filter((piece) => piece.length), "waiting");
  chart.finish(pauses, []);
}

// A strip for each replica: its samples, and when it did not serve.
function drawReplicas(time, pauses, runs) {
  const strips = $("replicas"), { replicas } = news;
  strips.hidden = !replicas.length;
  while (strips.children.length < replicas.length) {
    const strip = element("div"), svg = shape("svg", { class: "chart" });
    strip.append(element("div", "legend"), svg);
    strips.append(strip);
    listen(svg);
  }
  const most = largest(ticks.flatMap((tick) => tick[7]), 3);
  replicas.forEach(({ name, state, reason }, index) => {
    const [caption, svg] = strips.children[index].children, last = ticks[ticks.length - 1]?.[7][index] ?? -1;
    const text = state === "serving" ? `${name}: serves ${count(Math.max(last, 0))} samples` : `${name}: does not serve: ${reason}`;
    caption.textContent = text;
    const chart = new Chart(svg, time, [0, most], text, { height: 46, lines: 1, named: short, labels: index === replicas.length - 1 });
    const absent = runs.flatMap((run) => piecewise(run, (tick) => tick[7][index] === -1));
    for (const [from, to] of absent) chart.add("rect", { class: "absent", x: chart.x(from), y: chart.top, width: Math.max(2, chart.x(to) - chart.x(from)), height: chart.bottom - chart.top });
    chart.line(runs.map((run) => run.map((tick) => [tick[0], Math.max(tick[7][index] ?? 0, 0)])), "running", { filled: true });
    chart.finish(pauses, []);
  });
}

// [from, to] of each stretch of ticks for which `holds`.
function piecewise(run, holds) {
  const found = [];
  run.forEach((tick, index) => {
    if (!holds(tick)) return;
    if (index && holds(run[index - 1])) found[found.length - 1][1] = tick[0];
    else found.push([tick[0], tick[0]]);
  });
  return found;
}

function drawMemory(along, pauses) {
  const seen = events.slice(Math.max(0, events.findLastIndex((event) => along.at(event) <= along.start)));
  drawReserved(along, pauses, seen);
  drawAllocated(along, pauses, seen);
  drawReturned(along, pauses, seen.filter((event) => along.at(event) >= along.start));
  drawParts(along, pauses, seen);
}

const bothEnds = (along, event) => [...new Set([along.at(event), along.until(event)])];

function drawReserved(along, pauses, seen) {
  const levels = seen.flatMap((event) => [
    ...(event.returned > 0 ? [[along.at(event), event.reserved + event.returned]] : []), // the drop
    ...bothEnds(along, event).map((place) => [place, event.reserved]),
  ]);
  const folded = along.name === "time" ? older.filter((stretch) => stretch.end >= along.start) : [];
  const looks = along.name === "time" && !news.replicas.length ? ticks.filter((tick) => tick[0] >= along.start).map((tick) => [tick[0], tick[6]]) : [];
  const line = looks.length ? [...levels, ...looks].sort((a, b) => a[0] - b[0]) : levels;
  const pieces = along.name === "time" ? piecesOf(line, looks.length ? runsOf(ticks) : []) : [line];
  const bounds = closeUp([...line.map(([, bytes]) => bytes), ...folded.flatMap((stretch) => [stretch.reserved_min, stretch.reserved_max])]);
  const chart = new Chart($("timeline"), along, bounds, "reserved memory", { height: 230, top: 44, lines: 6, named: count, unit: MIB });
  if (folded.length) {
    const edge = (bound) => folded.flatMap((stretch) => [stretch.start, stretch.end].map((at) => [chart.x(at), chart.y(stretch[bound])]));
    chart.area(edge("reserved_max"), edge("reserved_min"), "folded");
  }
  chart.line(pieces, "reserved");
  chart.dots(seen.filter(ends).map((event) => [along.at(event), event.reserved]), "floor");
  for (const pause of pauses) chart.block(pause, 26, 6, "pause");
  for (const update of updatesOf(events)) chart.block(update, 15, 6, update[1]?.cause === "update_failed" ? "update failed" : "update");
  for (const event of seen.filter((each) => ends(each))) chart.block([event, event], 26, 6, "continue");
  for (const event of seen.filter((each) => MARKED.includes(each.cause) && chart.inside(each))) {
    chart.add("path", { class: `mark ${event.cause}`, d: `M${(chart.x(along.at(event)) - 3.5).toFixed(1)},4h7l-3.5,6z` });
  }
  chart.finish(pauses, seen);
}

function drawAllocated(along, pauses, seen) {
  const points = seen.flatMap((event) => bothEnds(along, event).map((place) => [place, event.allocated]));
  const chart = new Chart($("allocated"), along, closeUp(points.map(([, bytes]) => bytes)), "allocated memory", { named: count, unit: MIB });
  chart.line(along.name === "time" ? piecesOf(points, []) : [points], "allocated");
  chart.finish(pauses, seen);
}

function drawReturned(along, pauses, seen) {
  const gave = seen.filter((event) => event.returned !== null), left = seen.filter((event) => event.residual !== null);
  const values = [0, ...gave.map((event) => event.returned), ...left.map((event) => event.residual)];
  const low = smallest(values), high = largest(values), room = Math.max(0.12 * (high - low), MIB / 16);
  const text = `${gave.length} emptyings returned ${size(sum(gave.map((event) => event.returned)))}`;
  const named = (value) => `${value > 0 ? "+" : ""}${Number(value.toFixed(3))}`;
  const chart = new Chart($("returned"), along, [low - room, high + room], text, { height: 120, named, labels: true, unit: MIB });
  const width = Math.max(1.5, Math.min(9, 0.5 * chart.width / Math.max(1, seen.length)));
  const zero = chart.y(0);
  for (const event of gave) {
    const y = chart.y(event.returned), kind = event.cause === "continue" ? "bar" : "bar elsewhere";
    chart.add("rect", { class: kind, x: chart.x(along.at(event)) - width / 2, y: Math.min(y, zero), width, height: Math.abs(zero - y) });
  }
  for (const event of left) chart.add("circle", { class: "left", cx: chart.x(along.at(event)), cy: chart.y(event.residual), r: 2.6 });
  chart.add("line", { class: "zero", x1: LEFT, x2: chart.width - RIGHT, y1: zero, y2: zero });
  chart.finish(pauses, seen);
}

function drawParts(along, pauses, seen) {
  const used = TAGS.filter((tag) => events.some((event) => event.by_tag[tag] > 0));
  const top = largest(seen.map((event) => event.reserved), MIB);
  const chart = new Chart($("parts"), along, [0, top], "reserved memory by what holds it", { height: 240, lines: 5, named: count, labels: true, unit: MIB });
  // A part stands until the next look at it.
  const places = seen.map((event, index) => [along.at(event), index + 1 < seen.length ? along.at(seen[index + 1]) : along.end]);
  let below = seen.map(() => 0);
  for (const tag of used) {
    const above = seen.map((event, index) => below[index] + event.by_tag[tag]);
    const edge = (bytes) => places.flatMap((both, index) => both.map((place) => [chart.x(place), chart.y(bytes[index])]));
    chart.area(edge(above), edge(below), `fill-${tag}`);
    below = above;
  }
  chart.finish(pauses, seen);
  $("tags").replaceChildren(...used.map(tagRow));
}

function tagRow(tag) {
  const values = events.map((event) => event.by_tag[tag]), last = events[events.length - 1];
  const row = element("tr"), name = element("td"), share = element("td", "share"), bar = element("i", `fill-${tag}`);
  name.append(element("i", `fill-${tag}`), word(tag), element("small", "", MEANINGS[tag]));
  bar.style.width = `${(100 * last.by_tag[tag] / Math.max(last.reserved, 1)).toFixed(1)}%`;
  share.append(bar);
  const figures = [values[values.length - 1], smallest(values), largest(values)];
  row.append(name, ...figures.map((bytes) => element("td", "n", size(bytes))), share);
  return row;
}

function drawEvents() {
  if (!events.length) return;
  const last = events[events.length - 1], state = `${news.status.pid} ${last.seq} ${last.until}`;
  if (state === listed) return; // so that a selection stays
  listed = state;
  const rows = events.slice(-ROWS).reverse().map((event) => {
    const row = element("tr"), told = element("td"), lasted = event.until - event.at;
    told.append(element("b", `tag ${event.cause}`, word(event.cause)), event.detail);
    const optional = [event.returned === null ? "" : size(event.returned), event.residual === null ? "" : size(event.residual, true)];
    const figures = [count(event.step), String(event.weights_epoch), size(event.reserved), size(event.allocated), ...optional];
    const when = element("td", "", exactly(event.at) + (lasted >= 0.1 ? ` + ${span(lasted)}` : ""));
    row.append(element("td", "n", String(event.seq)), when, told, ...figures.map((text) => element("td", "n", text)));
    return row;
  });
  $("events").replaceChildren(...rows);
  put("shown", `Newest first, the last ${count(rows.length)} of ${count(last.seq)}.`);
}

// Hands.

function point() {
  for (const svg of document.querySelectorAll("svg.chart")) svg.chart?.point(hover);
}

function leave() {
  hover = null;
  $("tooltip").hidden = true;
  point();
}

function explain(move, chart) {
  const along = chart.axis, place = chart.place(move), byTime = along.name === "time";
  hover = { name: along.name, place };
  const distance = (event) => Math.max(along.at(event) - place, place - along.until(event), 0);
  const event = events.length ? events.reduce((near, each) => (distance(each) <= distance(near) ? each : near)) : null;
  const tick = byTime ? ticks.findLast((each) => each[0] <= place) : undefined;
  const lines = [];
  if (byTime) lines.push(clock(place));
  if (tick) lines.push(`${tick[3]} running, ${tick[4]} waiting, ${size(tick[6])} reserved`);
  if (event) {
    lines.push(`#${event.seq} ${what(event)}`, `at ${exactly(event.at)}, step ${count(event.step)}, epoch ${event.weights_epoch}`);
    lines.push(`${size(event.reserved)} reserved, ${size(event.allocated)} allocated`);
    if (event.returned !== null) lines.push(`${size(event.returned)} returned`);
    if (event.residual !== null) lines.push(`${size(event.residual, true)} since the pause began`);
  }
  const tooltip = $("tooltip");
  tooltip.textContent = lines.join("\n");
  tooltip.hidden = false;
  tooltip.style.left = `${Math.max(10, Math.min(move.clientX + 16, innerWidth - tooltip.offsetWidth - 10))}px`;
  tooltip.style.top = `${Math.max(10, move.clientY - tooltip.offsetHeight - 14)}px`;
  point();
}

function choice(group, text, value, choose) {
  const button = element("button", "", text);
  button.type = "button";
  button.value = value;
  button.addEventListener("click", () => {
    choose();
    leave();
    drawCharts(news.status);
  });
  $(group).append(button);
}

function listen(svg) {
  svg.addEventListener("mousemove", (move) => svg.chart && explain(move, svg.chart));
  svg.addEventListener("mouseleave", leave);
}

for (const svg of document.querySelectorAll("svg.chart")) listen(svg);
for (const [text, seconds] of SPANS) choice("spans", text, seconds, () => (shown = seconds));
for (const [text, name, many] of [["by time", "time", Infinity], ["by event", "event", Infinity], [`last ${CLOSE} events`, "event", CLOSE]]) {
  choice("axes", text, `${name} ${many}`, () => ([axis, most] = [name, many]));
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
if (filed) {
  take(JSON.parse($("data").textContent));
  draw();
} else {
  poll();
}
