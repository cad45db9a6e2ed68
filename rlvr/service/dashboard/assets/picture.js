// Saves a chart as PNG: the SVG with its colours written into it, under its title and above its legend.

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "fill-opacity", "font-size"];
const SCALE = 2;
const MARGIN = 14;

function copyWithStyles(svg) {
  const copy = svg.cloneNode(true);
  const [from, to] = [svg.querySelectorAll("*"), copy.querySelectorAll("*")];
  from.forEach((element, place) => {
    const computed = getComputedStyle(element);
    for (const name of STYLES) to[place].setAttribute(name, computed.getPropertyValue(name));
    to[place].setAttribute("font-family", "sans-serif");
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
}

export async function savePicture(svg, name, lines) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(copyWithStyles(svg))}`;
  await image.decode();
  const figure = svg.closest("figure");
  const style = getComputedStyle(figure);
  const width = Number(svg.getAttribute("width"));
  const height = Number(svg.getAttribute("height"));
  const row = 18;
  const canvas = document.createElement("canvas");
  canvas.width = SCALE * (width + 2 * MARGIN);
  canvas.height = SCALE * (height + 40 + row * lines.length + MARGIN);
  const context = canvas.getContext("2d");
  context.scale(SCALE, SCALE);
  context.fillStyle = style.backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = style.color;
  context.font = "bold 15px sans-serif";
  context.fillText(name, MARGIN, 24);
  context.drawImage(image, MARGIN, 34, width, height);
  context.font = "12px sans-serif";
  const swatches = figure.querySelectorAll(".swatch");
  lines.forEach((line, place) => {
    const y = height + 46 + place * row;
    context.fillStyle = getComputedStyle(swatches[place]).backgroundColor;
    context.fillRect(MARGIN, y - 5, 14, 4);
    context.fillStyle = style.color;
    context.fillText(line.name || name, MARGIN + 22, y);
  });
  const link = document.createElement("a");
  link.download = `${name.replace(/[^A-Za-z0-9_-]+/g, "-").toLowerCase()}.png`;
  link.href = canvas.toDataURL("image/png");
  link.click();
}
