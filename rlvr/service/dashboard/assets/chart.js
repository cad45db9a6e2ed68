// A line chart as SVG, and a time as "3 min ago". Colours come from the style sheet, so both follow the theme.
//
// The legend shows the values under the pointer or the arrow keys: nothing moves, and nothing covers a curve.

const HEIGHT = 190;
const PAD = { left: 48, right: 10, top: 10, bottom: 22 };

function steps(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw);
  const values = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) values.push(Math.abs(v) < step / 1e6 ? 0 : v);
  return values;
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
  props: { name: String, lines: Array, share: Boolean, x: String, hint: String },
  data: () => ({ width: 400, at: null }),
  mounted() {
    this.observer = new ResizeObserver(([entry]) => (this.width = Math.max(160, Math.round(entry.contentRect.width))));
    this.observer.observe(this.$refs.frame);
  },
  unmounted() {
    this.observer.disconnect();
  },
  computed: {
    frame() {
      const points = this.lines.flatMap((line) => line.points);
      const xs = points.map((p) => p[0]);
      const ys = points.map((p) => p[1]);
      let [left, right] = [Math.min(...xs), Math.max(...xs)];
      let [low, high] = this.share ? [0, 1] : [Math.min(...ys), Math.max(...ys)];
      if (left === right) [left, right] = [left - 1, right + 1];
      if (!this.share) {
        const room = high === low ? Math.abs(high) * 0.1 || 1 : (high - low) * 0.06;
        [low, high] = [low >= 0 && low < room * 4 ? 0 : low - room, high + room];
      }
      const inner = this.width - PAD.left - PAD.right;
      const tall = HEIGHT - PAD.top - PAD.bottom;
      return {
        left, right, low, high,
        x: (v) => PAD.left + ((v - left) / (right - left)) * inner,
        y: (v) => PAD.top + (1 - (v - low) / (high - low)) * tall,
        back: (px) => left + ((px - PAD.left) / inner) * (right - left),
        xs: [...new Set(xs)].sort((a, b) => a - b),
      };
    },
    summary() {
      const parts = this.lines.map((line) => {
        const first = line.points[0];
        const last = line.points[line.points.length - 1];
        return `${line.name} ${format(first[1], this.share)} at ${this.x} ${first[0]}, ${format(last[1], this.share)} at ${last[0]}`;
      });
      return `${this.name}: ${parts.join("; ")}. Arrow keys read the values.`;
    },
  },
  methods: {
    move(event) {
      const box = this.$refs.frame.getBoundingClientRect();
      const xs = this.frame.xs.map((x) => [x]);
      this.at = xs[nearest(xs, this.frame.back(event.clientX - box.left))][0];
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
      const items = this.lines.map((line, i) => {
        const exact = shown === null ? line.points[line.points.length - 1] : line.points.find((p) => p[0] === shown);
        return Vue.h("li", { key: line.name }, [
          Vue.h("span", { class: `swatch s${i % 8}`, "aria-hidden": "true" }),
          Vue.h("span", { class: "name" }, line.name || this.name),
          Vue.h("b", format(exact && exact[1], this.share)),
        ]);
      });
      const place = shown === null ? "latest" : `${this.x} ${shown}`;
      return Vue.h("ul", { class: "legend", "aria-live": "polite" }, [...items, Vue.h("li", { class: "place" }, place)]);
    },
  },
  render() {
    const f = this.frame;
    const grid = [];
    for (const y of this.share ? [0, 0.25, 0.5, 0.75, 1] : steps(f.low, f.high, 4)) {
      grid.push(Vue.h("line", { class: "grid", x1: PAD.left, x2: this.width - PAD.right, y1: f.y(y), y2: f.y(y) }));
      grid.push(Vue.h("text", { x: PAD.left - 6, y: f.y(y) + 4, "text-anchor": "end" }, format(y, this.share, 0)));
    }
    const whole = steps(f.left, f.right, Math.max(2, Math.floor(this.width / 90))).filter((x) => Number.isInteger(x));
    for (const x of whole) {
      grid.push(Vue.h("text", { x: f.x(x), y: HEIGHT - 6, "text-anchor": "middle" }, String(x)));
    }
    const lines = this.lines.flatMap((line, i) => {
      const path = line.points.map((p, n) => `${n ? "L" : "M"}${f.x(p[0]).toFixed(1)} ${f.y(p[1]).toFixed(1)}`).join("");
      const few = line.points.length <= 3;
      const dots = few ? line.points : line.points.filter((p) => p[0] === this.at);
      return [
        Vue.h("path", { class: `curve s${i % 8}`, d: path }),
        ...dots.map((p) => Vue.h("circle", { class: `dot s${i % 8}`, cx: f.x(p[0]), cy: f.y(p[1]), r: 3.5 })),
      ];
    });
    const cross =
      this.at === null ? [] : [Vue.h("line", { class: "cross", x1: f.x(this.at), x2: f.x(this.at), y1: PAD.top, y2: HEIGHT - PAD.bottom })];
    return Vue.h("figure", { class: "chart" }, [
      Vue.h("figcaption", {}, [Vue.h("h3", {}, this.name), Vue.h("p", { class: "dim", title: this.hint }, this.hint)]),
      Vue.h("div", { ref: "frame", class: "frame" }, [
        Vue.h(
          "svg",
          {
            width: this.width, height: HEIGHT, role: "img", tabindex: 0, "aria-label": this.summary,
            onPointermove: this.move, onPointerdown: this.move, onPointerleave: () => (this.at = null),
            onKeydown: this.key, onBlur: () => (this.at = null),
          },
          [...grid, ...cross, ...lines],
        ),
      ]),
      this.legend(),
    ]);
  },
};

const SPANS = [[60, 1, "s"], [3600, 60, "min"], [86400, 3600, "h"], [Infinity, 86400, "d"]];

export const Ago = {
  props: { at: Number },
  data: () => ({ now: Date.now() / 1000 }),
  mounted() {
    this.timer = setInterval(() => (this.now = Date.now() / 1000), 5000);
  },
  unmounted() {
    clearInterval(this.timer);
  },
  render() {
    const past = Math.max(0, this.now - this.at);
    const [, size, unit] = SPANS.find(([most]) => past < most);
    const when = new Date(this.at * 1000);
    return Vue.h("time", { datetime: when.toISOString(), title: when.toLocaleString() },
      past < 5 ? "now" : `${Math.floor(past / size)} ${unit} ago`);
  },
};
