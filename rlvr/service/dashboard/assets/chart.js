// A line chart as SVG. Colours come from the style sheet, so it follows the theme.
//
// The legend shows the values under the pointer or the arrow keys: nothing moves, and nothing covers a curve. A drag
// across the chart opens the address of that part of the steps; the form above the charts does the same by keyboard.

import { savePicture } from "rlvr-dashboard/picture.js";

const HEIGHT = 230;
const PAD = { left: 52, right: 12, top: 26, bottom: 38 };

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

function nearest(points, x) {
  let low = 0;
  let high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? low - 1 : low;
}

export const Chart = {
  props: {
    name: String, lines: Array, share: Boolean, x: String, hint: String, unit: String, log: String, csv: String, zoom: String,
  },
  data: () => ({ width: 400, at: null, drag: null }),
  mounted() {
    this.observer = new ResizeObserver(([entry]) => (this.width = Math.max(160, Math.round(entry.contentRect.width))));
    this.observer.observe(this.$refs.frame);
  },
  unmounted() {
    this.observer.disconnect();
  },
  computed: {
    named() {
      return this.lines.filter((line) => line.kind !== "raw");
    },
    frame() {
      const points = this.lines.flatMap((line) => line.points);
      // A band of a few seeds may be many times as high as the runs: it does not widen the axis.
      const own = this.lines.filter((line) => line.kind === "band").flatMap((line) => line.points.map((p) => p[1]));
      const ends = this.lines.filter((line) => line.kind !== "band").flatMap((line) => line.points.flatMap((p) => p.slice(1)));
      const xs = points.map((p) => p[0]);
      const least = (all) => all.reduce((a, b) => (b < a ? b : a), Infinity);
      const most = (all) => all.reduce((a, b) => (b > a ? b : a), -Infinity);
      const [logX, logY] = [this.log.includes("x"), this.log.includes("y")];
      let [left, right] = [least(xs), most(xs)];
      let [low, high] = [least([...own, ...ends]), most([...own, ...ends])];
      if (logY) [low, high] = [low / 1.15, high * 1.15];
      else if (this.share) [low, high] = [0, 1];
      else {
        const room = high === low ? Math.abs(high) * 0.1 || 1 : (high - low) * 0.06;
        [low, high] = [low >= 0 && low < room * 4 ? 0 : low - room, high + room];
      }
      if (left === right) [left, right] = logX ? [left / 2, right * 2] : [left - 1, right + 1];
      const inner = this.width - PAD.left - PAD.right;
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
        xs: [...new Set(xs)].sort((a, b) => a - b),
      };
    },
    summary() {
      const axis = this.x.split(" ")[0];
      const parts = this.named.map((line) => {
        const first = line.points[0];
        const last = line.points[line.points.length - 1];
        return `${line.name || this.name} ${this.value(first)} at ${axis} ${first[0]}, ${this.value(last)} at ${last[0]}`;
      });
      const unit = this.unit ? ` in ${this.unit}` : "";
      return `${this.name}${unit}: ${parts.join("; ")}. Arrow keys read the values.`;
    },
  },
  methods: {
    value(point) {
      const text = format(point && point[1], this.share);
      return point && point.length > 2 ? `${text} (${format(point[2], this.share)} to ${format(point[3], this.share)})` : text;
    },
    place(event) {
      return event.clientX - this.$refs.frame.getBoundingClientRect().left;
    },
    press(event) {
      if (this.zoom && event.pointerType !== "touch") this.drag = [this.place(event), this.place(event)];
      this.move(event);
    },
    move(event) {
      const xs = this.frame.xs.map((x) => [x]);
      this.at = xs[nearest(xs, this.frame.back(this.place(event)))][0];
      if (this.drag) this.drag = [this.drag[0], this.place(event)];
    },
    release() {
      const drag = this.drag;
      this.drag = null;
      if (!drag || Math.abs(drag[1] - drag[0]) < 12) return;
      const [from, until] = drag.map(this.frame.back).sort((a, b) => a - b);
      window.location.assign(`${this.zoom}from=${Math.floor(from)}&to=${Math.ceil(until)}#curves`);
    },
    leave() {
      this.at = this.drag = null;
    },
    key(event) {
      const xs = this.frame.xs;
      const here = this.at === null ? xs.length - 1 : xs.indexOf(this.at);
      const go = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: xs.length - 1 }[event.key];
      if (go === undefined) return;
      event.preventDefault();
      this.at = xs[Math.min(xs.length - 1, Math.max(0, go))];
    },
    legend() {
      const shown = this.at;
      const items = this.named.map((line) => {
        const exact = shown === null ? line.points[line.points.length - 1] : line.points.find((p) => p[0] === shown);
        return Vue.h("li", { key: line.name }, [
          Vue.h("span", { class: `swatch s${line.colour % 8} ${line.kind}`, "aria-hidden": "true" }),
          Vue.h("span", { class: "name" }, line.name || this.name),
          Vue.h("b", format(exact && exact[1], this.share)),
          exact && exact.length > 2 ? Vue.h("small", `${format(exact[2], this.share)} to ${format(exact[3], this.share)}`) : null,
        ]);
      });
      const place = shown === null ? "latest" : `${this.x.split(" ")[0]} ${shown}`;
      return Vue.h("ul", { class: "legend", "aria-live": "polite" }, [...items, Vue.h("li", { class: "place" }, place)]);
    },
    axes() {
      const f = this.frame;
      const parts = [];
      const ys = f.logY ? powers(f.low, f.high, 4) : this.share ? [0, 0.25, 0.5, 0.75, 1] : steps(f.low, f.high, 4);
      for (const y of ys) {
        parts.push(Vue.h("line", { class: "grid", x1: PAD.left, x2: this.width - PAD.right, y1: f.y(y), y2: f.y(y) }));
        parts.push(Vue.h("text", { x: PAD.left - 6, y: f.y(y) + 4, "text-anchor": "end" }, format(y, this.share, f.logY ? 1 : 0)));
      }
      const count = Math.max(2, Math.floor(this.width / 90));
      const xs = f.logX ? powers(f.left, f.right, count) : steps(f.left, f.right, count).map((x) => Number(x.toFixed(6))).filter(Number.isInteger);
      for (const x of xs) {
        parts.push(Vue.h("text", { x: f.x(x), y: HEIGHT - PAD.bottom + 16, "text-anchor": "middle" }, x.toLocaleString("en-US")));
      }
      const scale = (log) => (log ? ", log scale" : "");
      parts.push(Vue.h("text", { class: "unit", x: 2, y: 12 }, `${this.unit}${scale(f.logY)}`));
      parts.push(
        Vue.h("text", { class: "unit", x: this.width - PAD.right, y: HEIGHT - 6, "text-anchor": "end" }, `${this.x}${scale(f.logX)}`),
      );
      return parts;
    },
    curve(line) {
      const f = this.frame;
      const colour = `s${line.colour % 8}`;
      const points = line.points;
      const path = (all) => all.map(([x, y], n) => `${n ? "L" : "M"}${f.x(x).toFixed(1)} ${f.y(y).toFixed(1)}`).join("");
      const parts = [];
      if (line.kind === "band") {
        const outline = [...points.map((p) => [p[0], p[3]]), ...points.map((p) => [p[0], p[2]]).reverse()];
        parts.push(Vue.h("path", { class: `area ${colour}`, d: `${path(outline)}Z` }));
      }
      const isMeasured = line.kind === "dots" || line.kind === "ends";
      // Measurements at the same place stand beside each other.
      const beside = this.lines.filter((other) => other.kind === "ends");
      const shift = line.kind === "ends" ? (beside.indexOf(line) - (beside.length - 1) / 2) * 7 : 0;
      for (const p of isMeasured ? points : []) {
        if (p.length < 4) continue;
        const x = f.x(p[0]) + shift;
        parts.push(Vue.h("line", { class: `bar ${colour}`, x1: x, x2: x, y1: f.y(p[2]), y2: f.y(p[3]) }));
      }
      if (line.kind !== "ends") parts.push(Vue.h("path", { class: `curve ${line.kind} ${colour}`, d: path(points) }));
      const all = isMeasured || points.length <= 3;
      const dots = line.kind === "raw" ? [] : all ? points : points.filter((p) => p[0] === this.at);
      return [...parts, ...dots.map((p) => Vue.h("circle", { class: `dot ${colour}`, cx: f.x(p[0]) + shift, cy: f.y(p[1]), r: 3.2 }))];
    },
  },
  render() {
    const f = this.frame;
    const top = PAD.top;
    const bottom = HEIGHT - PAD.bottom;
    const cross = this.at === null ? [] : [Vue.h("line", { class: "cross", x1: f.x(this.at), x2: f.x(this.at), y1: top, y2: bottom })];
    const chosen = this.drag
      ? [Vue.h("rect", { class: "chosen", x: Math.min(...this.drag), y: top, width: Math.abs(this.drag[1] - this.drag[0]), height: bottom - top })]
      : [];
    const order = ["raw", "band", "line", "dots", "ends"];
    const drawn = [...this.lines].sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind));
    const links = [Vue.h("button", { type: "button", onClick: () => savePicture(this.$refs.svg, this.name, this.named) }, "PNG")];
    if (this.csv) links.unshift(Vue.h("a", { class: "button", href: this.csv, "aria-label": `${this.name} as CSV` }, "CSV"));
    return Vue.h("figure", { class: "chart" }, [
      Vue.h("figcaption", {}, [
        Vue.h("div", { class: "head" }, [Vue.h("h3", {}, this.name), Vue.h("span", { class: "end files" }, links)]),
        Vue.h("p", { class: "dim", title: this.hint }, this.hint),
      ]),
      Vue.h("div", { ref: "frame", class: "frame" }, [
        Vue.h(
          "svg",
          {
            ref: "svg", width: this.width, height: HEIGHT, role: "img", tabindex: 0, "aria-label": this.summary,
            onPointermove: this.move, onPointerdown: this.press, onPointerup: this.release, onPointerleave: this.leave,
            onKeydown: this.key, onBlur: () => (this.at = null),
          },
          [...this.axes(), ...chosen, ...cross, ...drawn.flatMap((line) => this.curve(line))],
        ),
      ]),
      this.legend(),
    ]);
  },
};
