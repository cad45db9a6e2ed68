// A time as "3 min ago".

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
