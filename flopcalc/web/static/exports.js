// Exports: what a view shows as a file or a line.

function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export const saveText = (name, text, type) => save(name, new Blob([text], { type }));

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-weight", "opacity"];

// A picture with its colours written into it, so that it looks the same outside of the page.
function standAlone(picture) {
  const copy = picture.cloneNode(true);
  const [, , width, height] = picture.getAttribute("viewBox").split(" ").map(Number);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
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
  const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  ground.setAttribute("width", width);
  ground.setAttribute("height", height);
  ground.setAttribute("fill", getComputedStyle(document.body).backgroundColor);
  copy.prepend(ground);
  return { text: new XMLSerializer().serializeToString(copy), width, height };
}

export function saveSvg(name, picture) {
  saveText(`${name}.svg`, standAlone(picture).text, "image/svg+xml");
}

export async function savePng(name, picture) {
  const { text, width, height } = standAlone(picture);
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

// Tables of a view as CSV; exact values stand in data-value where the cell is rounded.
export function tablesToCsv(root) {
  const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const read = (cell) => quote(cell.dataset.value ?? cell.querySelector("data")?.value ?? cell.textContent.trim());
  return [...root.querySelectorAll("table")]
    .map((each) => [...each.rows].map((row) => [...row.cells].map(read).join(",")).join("\n"))
    .join("\n\n") + "\n";
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // not a secure origin, or not allowed: the text stays selectable
  }
}
