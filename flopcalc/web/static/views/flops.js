// FLOPs by module: a treemap that can be zoomed, each box with its formula, and the same as a table.
import { drawTreemap, findNode, makeTree } from "../charts.js";
import { h, path, table } from "../dom.js";
import { t, word } from "../i18n.js";
import { add, exact, flops, share } from "../numbers.js";

export const channel = null; // the headline's own answer is all that is needed

export function render(answers, context) {
  return answers.map((answer) => show(answer, context));
}

// Set-ups side by side: each component's FLOPs, and its share of its own set-up.
export function compare(answers, { names }) {
  const parts = [...new Set(answers.flatMap(({ estimate }) => estimate.components.map((row) => row.name)))];
  const of = ({ estimate }, name) => {
    const row = estimate.components.find((each) => each.name === name);
    return row ? [flops(add(row.forward, row.backward)), share(add(row.forward, row.backward), estimate.flops.total)] : ["–", "–"];
  };
  const isNarrow = names.length > 3; // columns
  return [table(t("flops.compared"), [t("column.component"), ...names.flatMap((name) => [name, t("column.share")])], [
    ...parts.map((name) => [word(`component.${name}`, name), ...answers.flatMap((answer) => of(answer, name))]),
    [t("column.total"), ...answers.flatMap(({ estimate }) => [flops(estimate.flops.total), `${(Number(estimate.flops.total) / Number(answers[0].estimate.flops.total)).toFixed(3)} ×${isNarrow ? "" : ` ${names[0][0]}`}`])],
  ], { className: isNarrow ? "summed many" : "summed" })];
}

function show(answer, { state, width, onZoom, onOpen, explained, notes }) {
  const { estimate, groups: top } = answer;
  const rows = estimate.modules.map((row) => ({ ...row, exactValue: add(row.forward, row.backward) }))
    .map((row) => ({ ...row, value: Number(row.exactValue) }));
  const whole = makeTree(rows);
  const tree = findNode(whole, state.zoom) ?? whole;
  const groups = (path) => Math.max(0, top.findIndex((each) => path === each || path.startsWith(`${each}.`)));
  const picture = drawTreemap(tree, {
    width, height: Math.max(300, Math.min(520, Math.round(width * 0.62))), label: t("flops.picture", { model: estimate.model.name }),
    groups, onZoom, onOpen, selected: state.op,
    describe: (node, value, sum, isLeaf) => isLeaf
      ? t("flops.leaf", { path: node.path, count: exact(node.row.exactValue), share: share(value, sum) })
      : t("flops.group", { path: node.path, count: flops(value), share: share(value, sum) }),
  });
  const passes = ["forward", "backward", "recompute"].filter((name) => estimate.flops[name]);
  const sum = (row) => add(row.forward, row.backward, row.recompute ?? 0);
  const shown = rows.filter((row) => row.value).sort((one, other) => other.value - one.value);
  return [
    tree === whole ? null : crumbs(tree, whole, onZoom),
    picture,
    explained(answer),
    table(t("flops.components"), [t("column.component"), t("column.flops"), t("column.share"), ...passes.map((name) => t(`column.${name}`))], [
      ...estimate.components.map((row) => [word(`component.${row.name}`, row.name), flops(sum(row)), share(sum(row), estimate.flops.total), ...passes.map((name) => exact(row[name] ?? 0))]),
      [t("column.total"), flops(estimate.flops.total), "", ...passes.map((name) => exact(estimate.flops[name]))],
    ], { className: "summed" }),
    h("details", {}, h("summary", {}, t("flops.modules", { count: shown.length })),
      table(t("flops.modules", { count: shown.length }),
        [t("column.module"), "×", t("column.forward"), t("column.backward"), t("column.share"), t("column.parameters")],
        shown.map((row) => [path(row.path), row.count, exact(row.forward), exact(row.backward),
          share(row.exactValue, estimate.flops.total), exact(row.parameters)]), { className: "paths" })),
    notes(estimate.notes),
  ];
}

function crumbs(tree, whole, onZoom) {
  const list = [h("li", {}, h("button", { type: "button", class: "link", onclick: () => onZoom("") }, t("flops.whole")))];
  const names = tree.path.split(".");
  names.forEach((name, at) => {
    const place = names.slice(0, at + 1).join(".");
    const isLast = at === names.length - 1;
    const node = findNode(whole, place);
    list.push(h("li", {}, isLast ? h("span", { "aria-current": "location" }, name)
      : node ? h("button", { type: "button", class: "link", onclick: () => onZoom(place) }, name) : name));
  });
  return h("nav", { class: "crumbs", "aria-label": t("flops.zoom") }, h("ol", {}, list));
}
