// Saves a chart as SVG or PNG: its drawing with the colours written into it, under its title and above its legend.

import { make } from "./chart.js";

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "fill-opacity", "font-size"];
const [SCALE, MARGIN, ROW] = [2, 14, 18];

function copyWithStyles(svg) {
  const copy = svg.cloneNode(true);
  const [from, to] = [svg.querySelectorAll("*"), copy.querySelectorAll("*")];
  from.forEach((element, place) => {
    const computed = getComputedStyle(element);
    for (const name of STYLES) to[place].setAttribute(name, computed.getPropertyValue(name));
    to[place].removeAttribute("class");
  });
  return copy.childNodes;
}

function compose(chart) {
  const [width, height] = [chart.width, Number(chart.svg.getAttribute("height"))];
  const { backgroundColor, color } = getComputedStyle(chart.figure);
  const swatches = chart.figure.querySelectorAll(".swatch");
  const legend = chart.named.flatMap((line, place) => {
    const y = height + 46 + place * ROW;
    const fill = getComputedStyle(swatches[place]).backgroundColor;
    return [
      make("rect", { x: MARGIN, y: y - 5, width: 14, height: 4, fill }),
      make("text", { x: MARGIN + 22, y, fill: color, "font-size": 12 }, line.name || chart.name),
    ];
  });
  const size = [width + 2 * MARGIN, height + 40 + ROW * chart.named.length + MARGIN];
  const picture = make("svg", { xmlns: "http://www.w3.org/2000/svg", width: size[0], height: size[1], "font-family": "sans-serif" },
    make("rect", { width: size[0], height: size[1], fill: backgroundColor }),
    make("text", { x: MARGIN, y: 24, fill: color, "font-size": 15, "font-weight": "bold" }, chart.name),
    make("g", { transform: `translate(${MARGIN} 34)` }, ...copyWithStyles(chart.svg)), ...legend);
  return [`data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(picture))}`, ...size];
}

async function rasterize(address, width, height) {
  const image = new Image();
  image.src = address;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [SCALE * width, SCALE * height];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/png");
}

export async function savePicture(chart, kind) {
  const [address, width, height] = compose(chart);
  const link = document.createElement("a");
  link.download = `${chart.name.replace(/[^A-Za-z0-9_-]+/g, "-").toLowerCase()}.${kind}`;
  link.href = kind === "svg" ? address : await rasterize(address, width, height);
  link.click();
}
