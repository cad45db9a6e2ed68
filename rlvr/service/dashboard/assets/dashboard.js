// What a page of the dashboard does in a browser: it follows its source, has keys, and sends ratings without leaving.
//
// The server draws all markup. `adopt` takes over what differs in a newer page, so that focus, selection, scrolling and
// what is being typed stay.

import { drawCharts } from "./chart.js";

const SPANS = [[60, 1, "s"], [3600, 60, "min"], [86400, 3600, "h"], [Infinity, 86400, "d"]];
const main = document.getElementById("main");
let stream = null;

function sayAges() {
  for (const element of main.querySelectorAll("time")) {
    const when = new Date(element.dateTime);
    const past = Math.max(0, (Date.now() - when) / 1000);
    const [, size, unit] = SPANS.find(([most]) => past < most);
    const text = past < 5 ? "now" : `${Math.floor(past / size)} ${unit} ago`;
    if (element.textContent !== text) element.textContent = text;
    element.title = when.toLocaleString();
  }
}

// Makes `old` like `fresh`. What the user has set stays: whether something is open, and what fields contain. Elements with
// a `data-key` are the same ones wherever they stand.
function adopt(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.isEqualNode(fresh)) return;
  if (old.dataset.chart && old.dataset.chart === fresh.dataset.chart) return;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value && name !== "open") old.setAttribute(name, value);
  }
  if (old.dataset.chart) return; // its script draws the rest
  const keyed = new Map([...old.children].filter((node) => node.dataset.key).map((node) => [node.dataset.key, node]));
  let next = old.firstChild;
  for (const node of [...fresh.childNodes]) {
    const key = node.dataset?.key;
    const same = key ? keyed.get(key) : next?.dataset?.key ? null : next;
    if (!same) old.insertBefore(node, next);
    else {
      if (same !== next) old.insertBefore(same, next);
      next = same.nextSibling;
      adopt(same, node);
    }
  }
  while (next) {
    const gone = next;
    next = next.nextSibling;
    gone.remove();
  }
}

function show(text) {
  const page = new DOMParser().parseFromString(text, "text/html");
  const fresh = page.getElementById("main");
  if (!fresh) return window.location.reload(); // the session has ended: the form asks for the key
  document.title = page.title;
  adopt(main, fresh);
  drawCharts(main);
  sayAges();
}

async function ask(options) {
  const answer = await fetch(window.location.href, options);
  if (answer.status !== 429) show(await answer.text());
}

// One stream a visible page: a browser allows few connections to a server.
function follow() {
  stream?.close();
  stream = null;
  if (document.hidden) return;
  stream = new EventSource(`${main.dataset.events}?seen=${encodeURIComponent(main.dataset.seen)}`);
  stream.onmessage = (event) => {
    if (event.data !== main.dataset.seen) ask().catch(() => {});
  };
}

// A link or a button that has `aria-keyshortcuts` is clicked by one of its keys. Keys that write, move in a text or read
// a chart stay what they are.
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

function submit(event) {
  if (event.target.method !== "post") return;
  event.preventDefault();
  const body = new URLSearchParams([[event.submitter.name, event.submitter.value]]);
  ask({ method: "POST", body }).catch(() => event.target.submit());
}

drawCharts(main);
for (const list of main.querySelectorAll(".scrolls")) {
  const current = list.querySelector("[aria-current]"); // the one that is shown is in sight
  if (current) list.scrollTop = current.offsetTop - list.offsetTop - list.clientHeight / 2;
}
document.addEventListener("keydown", pressShortcut);
document.addEventListener("submit", submit);
document.addEventListener("visibilitychange", follow);
setInterval(sayAges, 5000);
sayAges();
follow();
