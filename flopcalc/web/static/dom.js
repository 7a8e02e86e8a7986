// Small helpers for elements; text is always set as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
export const s = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

export const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

// The first column names the rows; the others are numbers, but for those that `texts` lists.
export function table(caption, headers, rows, { className = "", texts = [] } = {}) {
  const kind = (column) => (column && !texts.includes(column) ? "number" : null);
  const cell = (value, column) => {
    const content = value instanceof Node || Array.isArray(value) ? value : String(value ?? "–");
    return column === 0 ? h("th", { scope: "row" }, content) : h("td", { class: kind(column) }, content);
  };
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: className || null },
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, headers.map((each, column) =>
        h("th", { scope: "col", class: kind(column) }, each)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell))))));
}

// A module's path, which may break after its dots and nowhere else.
export const path = (text) => h("span", { class: "path" }, text.split(".").flatMap((part, at) => (at ? [".", h("wbr"), part] : [part])));

export function notes(list, title) {
  if (!list?.length) return null;
  return h("details", { class: "notes" }, h("summary", {}, title),
    h("ul", {}, list.map((each) => h("li", {}, each))));
}
