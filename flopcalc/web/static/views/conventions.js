// The same step under our three conventions and under those that people quote.
import { h, table } from "../dom.js";
import { sayCounts, t, word } from "../i18n.js";
import { exact, percent, share } from "../numbers.js";

export const channel = "conventions";
export const isQuick = () => true;

export function questions(setup) {
  const hasQuote = setup.mfu || setup.tflops || setup.tokens_per_second;
  return hasQuote ? ["conventions", "translate"] : ["conventions"];
}

export function render(answers, { notes, reword, onOpenField }) {
  return answers.map(({ conventions, translate }) => [
    translate && !translate.error ? sayTranslation(translate.translation) : null,
    translate && !translate.error ? showTranslation(translate) : null,
    table(t("conventions.components"), [t("column.component"), "model", "full", "hardware"], [
      ...conventions.components.map((row) => [word(`component.${row.name}`, row.name), exact(row.model), exact(row.full), exact(row.hardware)]),
      [t("column.total"), exact(conventions.totals.model), exact(conventions.totals.full), exact(conventions.totals.hardware)],
    ], { className: "summed" }),
    h("p", { class: "help" }, t("conventions.help")),
    translate?.error ? h("p", { class: "error", role: "alert" }, reword(translate.error)) : null,
    translate && !translate.error ? null : showQuoted(conventions, onOpenField),
    notes([...new Set([...conventions.notes, ...(translate?.translation?.notes ?? [])])]),
  ]);
}

const source = (row, name) => [sayCounts("counts", name, row.counts), row.leaves_out ? t("conventions.without", { what: sayCounts("leaves_out", name, row.leaves_out) }) : "", " ",
  row.url?.startsWith("https:") ? h("a", { href: row.url, rel: "noreferrer" }, t("conventions.source")) : null];

function showQuoted(conventions, onOpenField) {
  return [
    table(t("conventions.quoted"), [t("column.convention"), t("column.flops"), t("column.ratio"), t("column.counts")],
      conventions.quoted.map((row) => [row.name, row.flops === null ? h("span", { title: row.reason }, "–") : exact(row.flops),
        row.flops === null ? "–" : share(row.flops, conventions.totals.model), source(row, row.name)]),
      { className: "quoted", texts: [3] }),
    h("p", {}, h("button", { type: "button", class: "link", onclick: () => onOpenField("mfu") }, t("conventions.quote"))),
  ];
}

// The MFU that we would quote, beside the one that was.
function sayTranslation({ rows, quoted_convention: name }) {
  const [own, quoted] = ["model", name].map((each) => rows.find((row) => row.quoted_convention === each));
  return h("p", { class: "answer" }, h("strong", { class: "figure" }, `MFU ${percent(own.mfu)}`), " ", t("conventions.answer"), quoted ? t("conventions.from", { name, mfu: percent(quoted.mfu) }) : "");
}

function showTranslation({ translation }) {
  return [
    table(t("conventions.translated"),
      [t("column.convention"), t("column.flops"), "TFLOP/s", "MFU", t("column.difference"), t("column.counts")],
      translation.rows.map((row) => [`${row.quoted_convention}${row.fits ? " ✓" : ""}`, exact(row.flops), row.tflops_per_gpu.toFixed(1),
        percent(row.mfu), row.difference === null ? "–" : `${(100 * row.difference).toFixed(2)} %`,
        source(row, row.quoted_convention)]), { className: "quoted", texts: [5] }),
  ];
}
