// Layouts of a training run: the best ones, and time over memory of all that fit, with the front.
import { drawScatter, findRange, legend } from "../charts.js";
import { fact, h, table } from "../dom.js";
import { list, says, t, word } from "../i18n.js";
import { amount, bytes, duration, exact, metric, money, percent, seconds, tick } from "../numbers.js";
import { listEnergy } from "./energy.js";

export const channel = "plan";
export const needs = () => ["device", "gpus", "tokens"];
export const isLong = true;
export const questions = () => ["plan"];

export function render(answers, { width, notes, reword }) {
  return answers.map(({ plan: { plan, points } }) => {
    const front = points.filter((point) => point.is_front).sort((one, other) => one.step_time_s - other.step_time_s);
    const x = { range: findRange(points.map((point) => point.memory_bytes / 2 ** 30)), format: (value) => `${Number(value.toPrecision(4))}`, label: t("plan.x") };
    const times = points.map((point) => point.step_time_s);
    const y = { range: [Math.min(...times) * 0.9, Math.max(...times) * 1.1], isLog: true, format: (value) => tick(seconds(value)), label: t("plan.y") };
    const best = plan.best[0];
    const text = (point) => says(point.layout, list(seconds(point.step_time_s), bytes(point.memory_bytes)));
    return [
      h("p", { class: "answer" }, h("strong", { class: "figure" }, seconds(best.step_time_s.mid)), " ",
        t("plan.best", { low: seconds(best.step_time_s.low), high: seconds(best.step_time_s.high), batch: exact(plan.global_batch), seq: exact(plan.seq) })),
      h("p", {}, h("strong", {}, describeLayout(best.layout)), " ", h("span", { class: "minor" }, best.name)),
      h("dl", { class: "facts" }, fact(t("plan.run"), duration(best.days.mid)), fact(t("plan.runHours"), amount(best.gpu_hours.mid)), best.usd && fact(t("plan.runCost"), money(best.usd.mid)),
        fact("MFU", percent(best.mfu)), listEnergy(best.energy, "run")),
      plan.helps_most && h("p", { class: "advice" }, h("strong", {}, t("time.advice")), " ", reword(plan.helps_most)),
      drawScatter({ width, height: Math.max(300, Math.min(460, width * 0.58)), x, y, label: t("plan.picture", { count: points.length }),
        points: [...points.filter((point) => !point.is_front).map((point) => ({ x: point.memory_bytes / 2 ** 30, y: point.step_time_s, r: 2.5, className: "faint", text: text(point) })),
          ...front.map((point) => ({ x: point.memory_bytes / 2 ** 30, y: point.step_time_s, r: 5, className: "c3", text: text(point) }))],
        lines: [{ points: front.map((point) => [point.memory_bytes / 2 ** 30, point.step_time_s]), className: "front" }] }),
      legend([{ name: t("plan.front"), colour: "c3" }, { name: t("plan.others"), colour: "faint" }]),
      table(t("plan.layouts"), [t("plan.layout"), t("plan.step"), t("plan.low"), t("plan.high"), "MFU", "HFU", t("plan.memory"), t("plan.days"), t("plan.hours"), t("plan.energy"), t("plan.cost")],
        plan.best.map((row) => [h("span", { title: describeLayout(row.layout) }, row.name), seconds(row.step_time_s.mid), seconds(row.step_time_s.low), seconds(row.step_time_s.high), percent(row.mfu), percent(row.hfu), bytes(row.memory_bytes.total),
          duration(row.days.mid), amount(row.gpu_hours.mid), row.energy_kwh === null ? "–" : metric(row.energy_kwh * 1000, "Wh"), row.usd === null ? "–" : money(row.usd.mid)]), { className: width < 900 ? "many" : "" }),
      h("details", {}, h("summary", {}, t("plan.frontTable", { count: front.length })), table(t("plan.frontTable", { count: front.length }), [t("plan.layout"), t("plan.step"), t("plan.memory")],
        front.map((point) => [point.layout, seconds(point.step_time_s), bytes(point.memory_bytes)]))),
      table(t("plan.losers"), [t("plan.reason"), t("plan.count"), t("plan.nearest"), t("plan.why")],
        plan.losers.map((row) => [word(`reason.${row.reason}`, row.reason), exact(row.layouts), row.nearest.name, row.why]), { texts: [2, 3], className: "stacked" }),
      h("p", { class: "help" }, t("plan.searched", { divide: exact(plan.layouts.divide), fit: exact(plan.layouts.fit) })),
      notes(plan.notes),
    ];
  });
}

// A layout in words, without the degrees that do nothing.
function describeLayout(layout) {
  const degrees = ["tp", "cp", "ep", "pp", "virtual", "dp"].filter((name) => layout[name] > 1).map((name) => t(`layout.${name}`, { count: layout[name] }));
  return list(...degrees, layout.zero ? t("layout.zero", { stage: layout.zero }) : "", t("layout.micro_batch", { count: layout.micro_batch }),
    layout.recompute === "none" ? "" : t("layout.recompute", { what: word(`word.recompute.${layout.recompute}`, layout.recompute) }));
}
