// Draws a tree of elements that the server sends as data: [tag, attributes, ...children], a child being a tree or text.
//
// Texts become text nodes, and attributes come from a list, so model output cannot act here. Vue compares a new tree
// with the last one and changes only the differences: focus, selection and scrolling stay.

import { Ago } from "rlvr-dashboard/ago.js";
import { Chart } from "rlvr-dashboard/chart.js";

const TAGS = new Set(
  ("a abbr article aside b button caption code datalist dd details div dl dt em fieldset footer form h1 h2 h3 header i " +
    "input kbd label legend li main mark meter nav ol optgroup option output p pre progress section select small span strong " +
    "summary table tbody td th thead time tr ul").split(" "),
);
const ATTRIBUTES = new Set(
  ("action checked class colspan for hidden id key list max maxlength method min name open placeholder role scope selected " +
    "rel step style tabindex title type value inputmode autocomplete disabled").split(" "),
);
const PARTS = { "x-chart": Chart, "x-ago": Ago };

function attributes(given, emit) {
  const allowed = {};
  for (const [name, value] of Object.entries(given || {})) {
    if (name === "href") {
      if (value.startsWith("#") || (value.startsWith("/") && !value.startsWith("//"))) allowed.href = value;
    } else if (name === "act") {
      allowed.onClick = () => emit("act", { name: value, value: given.value ?? null });
    } else if (ATTRIBUTES.has(name) || name.startsWith("aria-") || name.startsWith("data-")) {
      allowed[name] = value;
    }
  }
  return allowed;
}

function draw(node, emit) {
  if (typeof node === "string") return node;
  const [tag, given, ...children] = node;
  if (tag in PARTS) return Vue.h(PARTS[tag], { ...given });
  if (!TAGS.has(tag)) return null;
  return Vue.h(
    tag,
    attributes(given, emit),
    children.map((child) => draw(child, emit)),
  );
}

// Keys of a page: a link or a button that has `aria-keyshortcuts` is clicked by one of its keys. Keys that write, move
// in a text or read a chart stay what they are.
function pressShortcut(event) {
  if (event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
  const focused = event.target;
  if (focused.closest?.("input, textarea, select, [contenteditable]")) return;
  if (event.key.startsWith("Arrow") && focused.closest?.("svg, .text-block, .scrolls")) return;
  const found = [...document.querySelectorAll("[aria-keyshortcuts]")].find((element) =>
    element.getAttribute("aria-keyshortcuts").split(" ").includes(event.key),
  );
  if (!found) return;
  event.preventDefault();
  found.click();
}

export default {
  props: { tree: Array },
  emits: ["act"],
  mounted() {
    document.addEventListener("keydown", pressShortcut);
    for (const list of this.$el.querySelectorAll(".scrolls")) {
      const current = list.querySelector("[aria-current]"); // the one that is shown is in sight
      if (current) list.scrollTop = current.offsetTop - list.offsetTop - list.clientHeight / 2;
    }
  },
  unmounted() {
    document.removeEventListener("keydown", pressShortcut);
  },
  render() {
    return draw(this.tree, (name, value) => this.$emit(name, value));
  },
};
