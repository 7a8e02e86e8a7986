// Pictures as plain SVG: a treemap, scatters with linear or logarithmic axes, and stacked bars.
import { h, s } from "./dom.js";
import { hierarchy, treemap, treemapSquarify } from "./vendor/d3-hierarchy.min.js";

const COLOURS = 8;
const MOST_TAGS = 6; // names in a scatter

export function colourOf(index) {
  return `c${index % COLOURS}`;
}

// ---- treemap ---------------------------------------------------------------------------------------------------------

// A tree of modules from rows with a path and a value; chains of single children become one node.
export function makeTree(rows) {
  const root = { path: "", name: "", children: new Map(), value: 0 };
  for (const row of rows) {
    if (!row.value) continue;
    let node = root;
    for (const name of row.path.split(".")) {
      const path = node.path ? `${node.path}.${name}` : name;
      if (!node.children.has(name)) node.children.set(name, { path, name, children: new Map(), value: 0 });
      node = node.children.get(name);
    }
    node.row = row;
  }
  return fold(root);
}

function fold(node) {
  let children = [...node.children.values()].map(fold);
  if (node.row && children.length) {
    children.push({ path: node.path, name: node.row.kind, row: node.row, children: [] }); // work of its own
  } else if (!node.row && children.length === 1 && node.path) {
    const [only] = children;
    return { ...only, name: `${node.name}.${only.name}` };
  }
  return { path: node.path, name: node.name, row: children.length ? null : node.row, children };
}

export function findNode(tree, path) {
  if (tree.path === path && tree.children.length) return tree;
  for (const child of tree.children) {
    const found = findNode(child, path);
    if (found) return found;
  }
  return null;
}

export function drawTreemap(tree, { width, height, label, describe, onZoom, onOpen, selected, groups }) {
  const root = hierarchy(tree, (node) => (node.children.length ? node.children : null))
    .sum((node) => (node.row ? node.row.value : 0))
    .sort((one, other) => other.value - one.value);
  treemap().tile(treemapSquarify).size([width, height]).paddingOuter(2).paddingTop((node) => (node.depth ? 19 : 2))
    .paddingInner(2).round(true)(root);
  const picture = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "treemap", role: "group", "aria-label": label });
  for (const node of root.descendants()) {
    if (node === root) continue;
    const [x, y, w, hh] = [node.x0, node.y0, node.x1 - node.x0, node.y1 - node.y0];
    if (w < 1 || hh < 1) continue;
    const isLeaf = !node.children;
    const open = () => (isLeaf ? onOpen(node.data.path) : onZoom(node.data.path));
    const text = describe(node.data, node.value, root.value, isLeaf);
    const name = fit(node.data.name, w - 8);
    // The rectangle is the button: its name then need not begin with the text that fits into it.
    const button = s("rect", {
      x, y, width: w, height: hh, rx: 2, role: "button", tabindex: "0", "aria-label": text, "data-path": node.data.path, onclick: open,
      onkeydown: (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          open();
        }
      },
    }, s("title", {}, text));
    const isSelected = isLeaf && selected === node.data.path;
    const box = s("g", { class: `${isLeaf ? "leaf" : "group"} ${colourOf(groups(node.data.path))}${isSelected ? " selected" : ""}`, "data-path": node.data.path },
      button,
      name && hh >= 15 ? s("text", { x: x + 5, y: y + 14, "aria-hidden": "true" }, name) : null,
      isLeaf && name && hh >= 34 && w > 60
        ? s("text", { x: x + 5, y: y + 29, class: "minor", "aria-hidden": "true" }, `${((100 * node.value) / root.value).toFixed(1)} %`) : null);
    picture.append(box);
  }
  return picture;
}

function fit(text, width) {
  const most = Math.floor(width / 6.7);
  if (most < 3) return "";
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

// ---- axes ------------------------------------------------------------------------------------------------------------

function makeScale([low, high], [from, to], isLog) {
  const read = isLog ? Math.log10 : (value) => value;
  const [a, b] = [read(low), read(high)];
  return (value) => from + ((read(value) - a) / (b - a || 1)) * (to - from);
}

function listTicks(low, high, isLog, most = 6) {
  const ticks = [];
  if (isLog) {
    const first = Math.ceil(Math.log10(low) - 1e-9);
    const last = Math.floor(Math.log10(high) + 1e-9);
    const step = Math.max(1, Math.ceil((last - first + 1) / most));
    const decades = Math.log10(high / low);
    const marks = decades < 1 ? [1, 2, 3, 4, 5, 6, 8] : decades < Math.max(2, most / 3) ? [1, 2, 5] : [1];
    for (let power = first - 1; power <= last; power += step) {
      for (const mark of marks) {
        const tick = mark * 10 ** power;
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
      }
    }
    return ticks;
  }
  const raw = (high - low) / most || 1;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * size).find((each) => each >= raw);
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) ticks.push(tick);
  return ticks;
}

// points: {x, y, r, className, text, label beside it, mark inside it}; lines: {points, className, label above its end}; both in
// the data's units. `x.ticks` are the values to name, where a scale's own would say less.
export function drawScatter({ width, height, x, y, points, lines, label }) {
  const box = { left: 88, right: width - 12, top: 10, bottom: height - 42 };
  const across = makeScale(x.range, [box.left, box.right], x.isLog);
  const up = makeScale(y.range, [box.bottom, box.top], y.isLog);
  const picture = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": label });
  const thin = (ticks) => ticks.filter((_, at) => width >= 500 || at % 2 === (ticks.length - 1) % 2);
  for (const tick of x.ticks ? thin(x.ticks) : listTicks(...x.range, x.isLog, width < 500 ? 4 : 7)) {
    picture.append(s("line", { class: "grid", x1: across(tick), x2: across(tick), y1: box.top, y2: box.bottom }),
      s("text", { class: "tick", x: across(tick), y: box.bottom + 16,
        "text-anchor": across(tick) > box.right - 20 ? "end" : "middle" }, x.format(tick)));
  }
  for (const tick of listTicks(...y.range, y.isLog)) {
    picture.append(s("line", { class: "grid", x1: box.left, x2: box.right, y1: up(tick), y2: up(tick) }),
      s("text", { class: "tick", x: box.left - 6, y: up(tick) + 4, "text-anchor": "end" }, y.format(tick)));
  }
  picture.append(
    s("text", { class: "axis", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, x.label),
    s("text", { class: "axis", transform: `translate(13 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, y.label));
  for (const line of lines) {
    picture.append(s("polyline", { class: `line ${line.className ?? ""}`,
      points: line.points.map(([a, b]) => `${across(a).toFixed(1)},${up(b).toFixed(1)}`).join(" ") }));
    if (line.label) picture.append(s("text", { class: "tag roof", x: box.right, y: up(line.points.at(-1)[1]) - 6, "text-anchor": "end" }, line.label));
  }
  const tags = []; // names and letters stand above all points
  const places = []; // of names, as [left, top, width]
  const named = new Set();
  for (const point of points) {
    const [x0, y0] = [across(point.x), up(point.y)];
    if (point.label && !named.has(point.label) && places.length < MOST_TAGS) {
      const wide = point.label.length * 6.2;
      const place = [[x0 + 9, y0 - 19], [x0 + 9, y0 + 7], [x0 - 9 - wide, y0 - 19], [x0 - 9 - wide, y0 + 7]].find(([left, top]) => left > box.left && left + wide < box.right
        && top > box.top && top + 12 < box.bottom && places.every(([a, b, w]) => left > a + w + 4 || left + wide < a - 4 || Math.abs(top - b) > 12));
      if (place) {
        named.add(point.label);
        places.push([...place, wide]);
        tags.push(s("text", { class: "tag", x: place[0], y: place[1] + 10 }, point.label));
      }
    }
    picture.append(s("circle", { class: `point ${point.className ?? ""}`, cx: x0, cy: y0, r: point.r }, s("title", {}, point.text)));
    if (point.mark) tags.push(s("text", { class: "letter", x: x0, y: y0 + 4, "text-anchor": "middle" }, point.mark));
  }
  picture.append(...tags);
  return picture;
}

export function findRange(values, { isLog = false, margin = 0.08 } = {}) {
  const known = values.filter((value) => Number.isFinite(value) && (!isLog || value > 0));
  if (!known.length) return [1, 10];
  const [low, high] = [Math.min(...known), Math.max(...known)];
  if (isLog) return [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high) + 1e-9)];
  return [Math.max(0, low - margin * (high - low)), high + margin * (high - low || high)];
}

// ---- bars ------------------------------------------------------------------------------------------------------------

// `unit` is what one step of the axis counts in, as 2 ** 30 for GiB. One stacked bar for each row: {name, parts: [{name, value, text, colour}], marks: [{value, text}], interval: [a, b]}.
export function drawBars({ width, rows, most, format, label, unit = 1 }) {
  const band = 64;
  const height = rows.length * band + 34;
  const right = width - 16;
  const across = makeScale([0, most], [8, right], false);
  const picture = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": label });
  for (const tick of listTicks(0, most / unit, false, width < 500 ? 3 : 6).map((each) => each * unit)) {
    picture.append(s("line", { class: "grid", x1: across(tick), x2: across(tick), y1: 18, y2: height - 28 }),
      s("text", { class: "tick", x: across(tick), y: height - 10, "text-anchor": tick ? "middle" : "start" }, format(tick)));
  }
  rows.forEach((row, at) => {
    const top = at * band + 22;
    let sum = 0;
    picture.append(s("text", { class: "name", x: 8, y: top - 6 }, row.name));
    for (const part of row.parts) {
      if (part.value <= 0) continue;
      const [from, to] = [across(sum), across(sum + part.value)];
      const name = fit(part.name, to - from - 8);
      picture.append(s("g", { class: colourOf(part.colour) },
        s("title", {}, part.text),
        s("rect", { x: from, y: top, width: Math.max(to - from, 0.5), height: 30 }),
        name ? s("text", { x: from + 5, y: top + 20 }, name) : null));
      sum += part.value;
    }
    if (row.interval) {
      const [low, high] = row.interval.map(across);
      picture.append(s("g", { class: "interval" }, s("title", {}, row.intervalText),
        s("line", { x1: low, x2: high, y1: top + 37, y2: top + 37 }),
        s("line", { x1: low, x2: low, y1: top + 33, y2: top + 41 }),
        s("line", { x1: high, x2: high, y1: top + 33, y2: top + 41 })));
    }
    for (const mark of row.marks ?? []) {
      picture.append(s("g", { class: "mark" }, s("title", {}, mark.text),
        s("text", { x: Math.min(across(mark.value) + 4, right), y: top - 8, "text-anchor": "end" }, mark.text),
        s("line", { x1: across(mark.value), x2: across(mark.value), y1: top - 4, y2: top + 36 })));
    }
  });
  return picture;
}

export function legend(entries) {
  return h("ul", { class: "legend" }, entries.map(({ name, colour, value }) =>
    h("li", {}, h("span", { class: `swatch ${colour}`, "aria-hidden": "true" }), name, value ? h("span", { class: "minor" }, ` ${value}`) : null)));
}
