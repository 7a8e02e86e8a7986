// Exports: what a view shows as a file or a line.

function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export const saveText = (name, text, type) => save(name, new Blob([text], { type }));

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-weight", "opacity", "paint-order"];

const SVG = "http://www.w3.org/2000/svg";
const HEAD = 52; // pixels above a picture, for two lines
const ENTRY = 22; // height of a legend's line

function put(root, name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  root.append(element);
}

// A picture with its colours, title and legend written into it, so that it says the same outside of the page.
function standAlone(picture, [title, subtitle], legend) {
  const copy = picture.cloneNode(true);
  const [, , width, inner] = picture.getAttribute("viewBox").split(" ").map(Number);
  const height = HEAD + inner + (legend.length ? ENTRY * Math.ceil(legend.length / 2) + 8 : 0);
  copy.setAttribute("xmlns", SVG);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  copy.setAttribute("font-family", "system-ui, sans-serif");
  const originals = [...picture.querySelectorAll("*")];
  for (const [at, element] of [...copy.querySelectorAll("*")].entries()) {
    const style = getComputedStyle(originals[at]);
    for (const name of STYLES) {
      const value = style.getPropertyValue(name);
      if (value && value !== "none" || name === "fill") element.setAttribute(name, value);
    }
    for (const name of ["tabindex", "role", "aria-label", "data-path", "class"]) element.removeAttribute(name);
  }
  const body = getComputedStyle(document.body);
  const inside = document.createElementNS(SVG, "g");
  inside.setAttribute("transform", `translate(0 ${HEAD})`);
  inside.append(...copy.childNodes);
  put(copy, "rect", { width, height, fill: body.backgroundColor });
  put(copy, "text", { x: 8, y: 21, "font-size": 16, "font-weight": 600, fill: body.color }, title);
  put(copy, "text", { x: 8, y: 41, "font-size": 12, fill: body.color }, subtitle);
  copy.append(inside);
  for (const [at, entry] of legend.entries()) {
    const [x, y] = [8 + (at % 2) * (width / 2), HEAD + inner + 8 + ENTRY * Math.floor(at / 2)];
    put(copy, "rect", { x, y, width: 13, height: 13, fill: getComputedStyle(entry.querySelector(".swatch")).backgroundColor, stroke: body.color });
    put(copy, "text", { x: x + 20, y: y + 11, "font-size": 12, fill: body.color }, entry.textContent.trim());
  }
  copy.setAttribute("viewBox", `0 0 ${width} ${height}`);
  copy.setAttribute("height", height);
  return { text: new XMLSerializer().serializeToString(copy), width, height };
}

export function saveSvg(name, ...parts) {
  saveText(`${name}.svg`, standAlone(...parts).text, "image/svg+xml");
}

export async function savePng(name, ...parts) {
  const { text, width, height } = standAlone(...parts);
  const image = new Image();
  const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  try {
    image.src = url;
    await image.decode();
  } finally {
    URL.revokeObjectURL(url);
  }
  const canvas = document.createElement("canvas");
  const scale = 2;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  save(`${name}.png`, blob);
}

// Tables of a view as CSV: where a column has units, they stand in a column of their own, beside plain numbers.
export function tablesToCsv(root) {
  const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const plain = (text) => (/^-?[\d,]+(\.\d+)?$/.test(text) ? text.replaceAll(",", "") : text);
  const parts = (text) => /^(-?[\d,]+(?:\.\d+)?) ([^\d]+)$/.exec(text);
  return [...root.querySelectorAll("table")].map((table) => {
    const rows = [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
    const hasUnit = rows[0].map((_, column) => column > 0 && rows.slice(1).some((row) => parts(row[column] ?? "")));
    return rows.map((row, at) => row.flatMap((text, column) => {
      if (!hasUnit[column]) return [quote(plain(text))];
      if (at === 0) return [quote(text), quote(`${text} unit`)];
      const [, number, unit] = parts(text) ?? ["", plain(text), ""];
      return [quote(number.replaceAll(",", "")), quote(unit)];
    }).join(",")).join("\n");
  }).join("\n\n") + "\n";
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // not a secure origin, or not allowed: the text stays selectable
  }
}
