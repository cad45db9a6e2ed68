// Line charts as SVG, of the data that the server writes into each figure. Colours come from the style sheet, so a chart
// follows the theme.
//
// The legend shows the values under the pointer or the arrow keys: nothing moves, and nothing covers a curve. A drag
// across the chart opens the address of that part of the steps; the form above the charts does the same by keyboard.

import { savePicture } from "./picture.js";

const HEIGHT = 230;
const PAD = { left: 52, right: 12, top: 26, bottom: 38 };
const ORDER = ["raw", "band", "line", "dots", "ends"];
const drawn = new WeakMap();

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export const make = (name, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
const makeHtml = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);

function steps(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw);
  const values = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) values.push(Math.abs(v) < step / 1e6 ? 0 : v);
  return values;
}

function powers(low, high, count) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const factors = last - first <= 2 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(((last - first) * factors.length) / (count * 2)));
  const values = [];
  for (let p = first; p <= last; p += every) for (const f of factors) values.push(f * 10 ** p);
  return values.filter((v) => v >= low * 0.999 && v <= high * 1.001);
}

function format(value, share, digits = 1) {
  if (value === undefined || value === null) return "–";
  if (share) return `${(100 * value).toFixed(digits)} %`;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

function nearest(values, x) {
  return values.reduce((best, value) => (Math.abs(value - x) < Math.abs(best - x) ? value : best));
}

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.frame = figure.querySelector(".frame");
    this.width = 400;
    this.at = this.drag = null;
    this.svg = make("svg", { height: HEIGHT, role: "img", tabindex: 0 });
    this.frame.replaceChildren(this.svg);
    for (const [name, act] of Object.entries({
      pointermove: this.move, pointerdown: this.press, pointerup: this.release, pointerleave: this.leave, keydown: this.key,
      blur: this.leave,
    })) this.svg.addEventListener(name, (event) => act.call(this, event));
    for (const button of figure.querySelectorAll("[data-picture]")) {
      button.addEventListener("click", () => savePicture(this, button.dataset.picture));
    }
    this.load();
    new ResizeObserver(([entry]) => {
      this.width = Math.max(160, Math.round(entry.contentRect.width));
      this.draw();
    }).observe(this.frame);
  }

  load() {
    this.source = this.figure.dataset.chart;
    Object.assign(this, JSON.parse(this.source));
    this.named = this.lines.filter((line) => line.kind !== "raw");
    this.xs = [...new Set(this.lines.flatMap((line) => line.points.map((p) => p[0])))].sort((a, b) => a - b);
    const axis = this.x.split(" ")[0];
    const parts = this.named.map(({ name, points }) => {
      const [first, last] = [points[0], points[points.length - 1]];
      return `${name || this.name} ${this.value(first)} at ${axis} ${first[0]}, ${this.value(last)} at ${last[0]}`;
    });
    const unit = this.unit ? ` in ${this.unit}` : "";
    this.svg.setAttribute("aria-label", `${this.name}${unit}: ${parts.join("; ")}. Arrow keys read the values.`);
    this.draw();
  }

  value(point) {
    const text = format(point[1], this.share);
    return point.length > 2 ? `${text} (${format(point[2], this.share)} to ${format(point[3], this.share)})` : text;
  }

  // The scales of both axes.
  measure() {
    const { lines, xs, width } = this;
    // A band of a few seeds may be many times as high as the runs: it does not widen the axis.
    const values = lines.flatMap((line) => line.points.flatMap((p) => (line.kind === "band" ? [p[1]] : p.slice(1))));
    const [logX, logY] = [this.log.includes("x"), this.log.includes("y")];
    let [left, right] = [xs[0], xs[xs.length - 1]];
    let [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
    if (logY) [low, high] = [low / 1.15, high * 1.15];
    else if (this.share) [low, high] = [0, 1];
    else {
      const room = high === low ? Math.abs(high) * 0.1 || 1 : (high - low) * 0.06;
      [low, high] = [low >= 0 && low < room * 4 ? 0 : low - room, high + room];
    }
    if (left === right) [left, right] = logX ? [left / 2, right * 2] : [left - 1, right + 1];
    const inner = width - PAD.left - PAD.right;
    const tall = HEIGHT - PAD.top - PAD.bottom;
    const to = (v, log) => (log ? Math.log10(v) : v);
    const place = (v, from, until, log) => (to(v, log) - to(from, log)) / (to(until, log) - to(from, log));
    return {
      left, right, low, high, logX, logY,
      x: (v) => PAD.left + place(v, left, right, logX) * inner,
      y: (v) => PAD.top + (1 - Math.min(1, Math.max(0, place(v, low, high, logY)))) * tall,
      back: (px) => {
        const share = Math.min(1, Math.max(0, (px - PAD.left) / inner));
        return logX ? left * (right / left) ** share : left + share * (right - left);
      },
    };
  }

  place(event) {
    return event.clientX - this.frame.getBoundingClientRect().left;
  }

  press(event) {
    if (this.zoom && event.pointerType !== "touch") this.drag = [this.place(event), this.place(event)];
    this.move(event);
  }

  move(event) {
    this.at = nearest(this.xs, this.scales.back(this.place(event)));
    if (this.drag) this.drag[1] = this.place(event);
    this.draw();
  }

  release() {
    const drag = this.drag;
    this.leave();
    if (!drag || Math.abs(drag[1] - drag[0]) < 12) return;
    const [from, until] = drag.map(this.scales.back).sort((a, b) => a - b);
    window.location.assign(`${this.zoom}from=${Math.floor(from)}&to=${Math.ceil(until)}#curves`);
  }

  leave() {
    this.at = this.drag = null;
    this.draw();
  }

  key(event) {
    const last = this.xs.length - 1;
    const here = this.at === null ? last : this.xs.indexOf(this.at);
    const go = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last }[event.key];
    if (go === undefined) return;
    event.preventDefault();
    this.at = this.xs[Math.min(last, Math.max(0, go))];
    this.draw();
  }

  legend() {
    const items = this.named.map((line) => {
      const point = this.at === null ? line.points[line.points.length - 1] : line.points.find((p) => p[0] === this.at);
      const item = makeHtml("li", {},
        makeHtml("span", { class: `swatch s${line.colour % 8} ${line.kind}`, "aria-hidden": "true" }),
        makeHtml("span", { class: "name" }, line.name || this.name),
        makeHtml("b", {}, format(point?.[1], this.share)));
      if (point?.length > 2) item.append(makeHtml("small", {}, `${format(point[2], this.share)} to ${format(point[3], this.share)}`));
      return item;
    });
    const place = this.at === null ? "latest" : `${this.x.split(" ")[0]} ${this.at}`;
    this.figure.querySelector(".legend").replaceChildren(...items, makeHtml("li", { class: "place" }, place));
  }

  axes(f) {
    const parts = [];
    const ys = f.logY ? powers(f.low, f.high, 4) : this.share ? [0, 0.25, 0.5, 0.75, 1] : steps(f.low, f.high, 4);
    for (const y of ys) {
      parts.push(make("line", { class: "grid", x1: PAD.left, x2: this.width - PAD.right, y1: f.y(y), y2: f.y(y) }));
      parts.push(make("text", { x: PAD.left - 6, y: f.y(y) + 4, "text-anchor": "end" }, format(y, this.share, f.logY ? 1 : 0)));
    }
    const count = Math.max(2, Math.floor(this.width / 90));
    const xs = f.logX ? powers(f.left, f.right, count) : steps(f.left, f.right, count).map((x) => Number(x.toFixed(6))).filter(Number.isInteger);
    for (const x of xs) {
      parts.push(make("text", { x: f.x(x), y: HEIGHT - PAD.bottom + 16, "text-anchor": "middle" }, x.toLocaleString("en-US")));
    }
    const scale = (log) => (log ? ", log scale" : "");
    parts.push(make("text", { class: "unit", x: 2, y: 12 }, `${this.unit}${scale(f.logY)}`));
    parts.push(make("text", { class: "unit", x: this.width - PAD.right, y: HEIGHT - 6, "text-anchor": "end" }, `${this.x}${scale(f.logX)}`));
    return parts;
  }

  curve(f, line) {
    const colour = `s${line.colour % 8}`;
    const points = line.points;
    const path = (all) => all.map(([x, y], n) => `${n ? "L" : "M"}${f.x(x).toFixed(1)} ${f.y(y).toFixed(1)}`).join("");
    const parts = [];
    if (line.kind === "band") {
      const outline = [...points.map((p) => [p[0], p[3]]), ...points.map((p) => [p[0], p[2]]).reverse()];
      parts.push(make("path", { class: `area ${colour}`, d: `${path(outline)}Z` }));
    }
    const isMeasured = line.kind === "dots" || line.kind === "ends";
    // Measurements at the same place stand beside each other.
    const beside = this.lines.filter((other) => other.kind === "ends");
    const shift = line.kind === "ends" ? (beside.indexOf(line) - (beside.length - 1) / 2) * 7 : 0;
    for (const p of isMeasured ? points : []) {
      if (p.length < 4) continue;
      const x = f.x(p[0]) + shift;
      parts.push(make("line", { class: `bar ${colour}`, x1: x, x2: x, y1: f.y(p[2]), y2: f.y(p[3]) }));
    }
    if (line.kind !== "ends") parts.push(make("path", { class: `curve ${line.kind} ${colour}`, d: path(points) }));
    const all = isMeasured || points.length <= 3;
    const dots = line.kind === "raw" ? [] : all ? points : points.filter((p) => p[0] === this.at);
    return [...parts, ...dots.map((p) => make("circle", { class: `dot ${colour}`, cx: f.x(p[0]) + shift, cy: f.y(p[1]), r: 3.2 }))];
  }

  draw() {
    const f = (this.scales = this.measure());
    const [top, bottom] = [PAD.top, HEIGHT - PAD.bottom];
    const parts = this.axes(f);
    if (this.drag) {
      const [from, until] = [Math.min(...this.drag), Math.max(...this.drag)];
      parts.push(make("rect", { class: "chosen", x: from, y: top, width: until - from, height: bottom - top }));
    }
    if (this.at !== null) parts.push(make("line", { class: "cross", x1: f.x(this.at), x2: f.x(this.at), y1: top, y2: bottom }));
    const lines = [...this.lines].sort((a, b) => ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind));
    this.svg.setAttribute("width", this.width);
    this.svg.replaceChildren(...parts, ...lines.flatMap((line) => this.curve(f, line)));
    this.legend();
  }
}

// Draws what is new or has changed.
export function drawCharts(within) {
  for (const figure of within.querySelectorAll("[data-chart]")) {
    const chart = drawn.get(figure);
    if (!chart) drawn.set(figure, new Chart(figure));
    else if (chart.source !== figure.dataset.chart) chart.load();
  }
}
