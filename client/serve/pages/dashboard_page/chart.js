// One chart of the page. Colours, fonts and widths are the style sheet's, by class.
//
// An axis says where things are: {name, start, end} and, of an event, at(event) and until(event), all in one unit. Charts
// with axes of one name have the cross-hair in common.

const LEFT = 54, RIGHT = 8;
const GRAIN = 4 * MIB; // the least that a close-up shows from bottom to top: the grain of allocators is no mountain
const DENSE = 500; // events beyond which a chart shows the whole rather than each
const STEPS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];

const path = (points) => `M${points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L")}`;

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}

function shape(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Bounds around values, not from zero.
function closeUp(values) {
  const low = smallest(values), high = largest(values, -Infinity);
  const room = Math.max(GRAIN - (high - low), 0.16 * (high - low)) / 2;
  return [Math.max(0, low - room), high + room];
}

class Chart {
  constructor(svg, axis, [low, high], text, { height = 96, top = 6, lines = 4, named = String, labels = false, unit = 1 } = {}) {
    Object.assign(this, { svg, axis, height, top, parts: [] });
    this.width = Math.max(svg.clientWidth, 200);
    this.bottom = height - (labels ? 20 : 4);
    const step = nice(Math.max(high - low, 1e-9) / unit / lines) * unit;
    this.low = low;
    this.high = low === 0 ? Math.max(high, step) * 1.04 : high;
    for (let index = Math.ceil(low / step - 1e-9); index * step <= this.high; index++) {
      const value = index * step || 0; // no minus zero
      const y = this.y(value);
      this.add("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y });
      this.add("text", { class: "end", x: LEFT - 8, y: y + 4 }, minus(named(value / unit)));
    }
    if (labels) this.labels();
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", text);
  }

  x(place) {
    const { start, end } = this.axis;
    return LEFT + (Math.min(Math.max(place, start), end) - start) / (end - start) * (this.width - LEFT - RIGHT);
  }

  y(value) {
    return this.bottom - (value - this.low) / (this.high - this.low) * (this.bottom - this.top);
  }

  add(name, attributes, text) {
    this.parts.push(shape(name, attributes, text));
  }

  // The stretch [first event, last event]; null: it lasts.
  ends([begin, end]) {
    const [x, right] = [this.x(this.axis.at(begin)), end ? this.x(this.axis.at(end)) : this.width - RIGHT];
    return [x, Math.max(right - x, 1.6)];
  }

  inside(event) {
    return event === null || this.axis.at(event) >= this.axis.start;
  }

  block(stretch, y, height, kind) {
    if (!this.inside(stretch[1])) return;
    const [x, width] = this.ends(stretch);
    this.add("rect", { class: kind, x, y, width, height });
  }

  // Pieces of points [place, value], oldest first. Nothing is drawn between two pieces.
  line(pieces, kind, { filled = false } = {}) {
    for (const piece of pieces) {
      const first = piece.findLastIndex(([place]) => place <= this.axis.start);
      const drawn = piece.slice(Math.max(0, first)).map(([place, value]) => [this.x(place), this.y(value)]);
      if (!drawn.length || this.axis.start > piece[piece.length - 1][0]) continue;
      if (filled) this.area(drawn, [[drawn[0][0], this.bottom], [drawn[drawn.length - 1][0], this.bottom]], `area ${kind}`);
      this.add("path", { class: `line ${kind}`, d: drawn.length > 1 ? path(drawn) : `${path(drawn)}h0.1` });
    }
  }

  dots(points, kind) {
    const seen = points.filter(([place]) => place >= this.axis.start);
    const d = seen.map(([place, value]) => `M${this.x(place).toFixed(1)},${this.y(value).toFixed(1)}h0.1`).join("");
    if (d) this.add("path", { class: `line ${kind}`, d });
  }

  // Between two lines of [x, y].
  area(upper, lower, kind) {
    this.add("path", { class: kind, d: `${path([...upper, ...lower.reverse()])}Z` });
  }

  labels() {
    const { name, start, end } = this.axis;
    const room = (this.width - LEFT) / (end - start), time = name === "time";
    const step = time ? STEPS.find((seconds) => seconds * room >= 66) ?? 86400 : Math.max(1, nice(66 / room));
    for (let place = Math.ceil(start / step) * step; place <= end; place += step) {
      const x = this.x(place);
      if (x < LEFT + (time ? 24 : 0) || x > this.width - 24) continue;
      const text = time ? clock(place).slice(0, step < 60 ? 8 : 5) : `#${place}`;
      this.add("text", { class: "mid", x, y: this.height - 4 }, text);
    }
  }

  // Everything is there: shade the pauses, behind all of it, and show it.
  finish(pauses, events) {
    const bands = pauses.filter(([, end]) => this.inside(end)).map((pause) => {
      const [x, width] = this.ends(pause);
      return `M${x.toFixed(1)},${this.top}h${width.toFixed(1)}V${this.bottom}h${(-width).toFixed(1)}Z`;
    });
    if (bands.length) this.parts.unshift(shape("path", { class: "band", d: bands.join("") }));
    this.cross = shape("line", { class: "cross", y1: 0, y2: this.height, visibility: "hidden" });
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.svg.classList.toggle("dense", events.length > DENSE);
    this.svg.replaceChildren(...this.parts, this.cross);
    this.svg.chart = this;
  }

  // Where a pointer is, in the unit of the axis.
  place(move) {
    const box = this.svg.getBoundingClientRect(), { start, end } = this.axis;
    const share = (move.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    return start + Math.min(Math.max(share, 0), 1) * (end - start);
  }

  // hover: {name, place}, of whatever chart; null: none.
  point(hover) {
    const shown = hover !== null && hover.name === this.axis.name && hover.place >= this.axis.start;
    this.cross.setAttribute("visibility", shown ? "visible" : "hidden");
    for (const end of shown ? ["x1", "x2"] : []) this.cross.setAttribute(end, this.x(hover.place));
  }
}
