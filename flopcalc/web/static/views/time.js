// Where the time of a step goes, with its interval.
import { colourOf, drawBars, legend } from "../charts.js";
import { fact, h, path, table } from "../dom.js";
import { list, says, sayWork, t } from "../i18n.js";
import { amount, percent, seconds, tick } from "../numbers.js";
import { listEnergy } from "./energy.js";

export const channel = "time";
export const needs = () => ["device"];
export const questions = () => ["time"];

const KINDS = ["products", "attention", "memory", "optimizer", "launches", "host"];

export function render(answers, { width, notes, reword }) {
  const most = Math.max(...answers.map(({ time }) => time.prediction.step_time_s.high)) * 1.04;
  return answers.map(({ time: { prediction } }) => {
    const { low, mid, high } = prediction.step_time_s;
    const parts = KINDS.filter((kind) => prediction.breakdown[kind] > 0).map((kind) => ({
      name: t(`kind.${kind}`), value: prediction.breakdown[kind], colour: KINDS.indexOf(kind),
      text: says(t(`kind.${kind}`), list(seconds(prediction.breakdown[kind]), percent(prediction.breakdown[kind] / mid))),
    }));
    const modules = Object.entries(prediction.breakdown.modules);
    const sum = modules.reduce((total, [, value]) => total + value, 0);
    return [
      h("p", { class: "answer" }, h("strong", { class: "figure" }, seconds(mid)), ` ${t("time.answer")}${t("time.interval", { low: seconds(low), high: seconds(high) })}`),
      h("dl", { class: "facts" },
        fact(t("time.bound"), t(`bound.${prediction.bound}`)), fact("MFU", percent(prediction.mfu)), fact("HFU", percent(prediction.hfu)),
        prediction.tokens_per_s === null ? fact(t("time.samples"), amount(prediction.samples_per_s)) : fact(t("time.tokens"), amount(prediction.tokens_per_s)), fact(t("field.execution"), prediction.execution), fact(t("field.compute"), prediction.dtype),
        listEnergy(prediction.energy, "step")),
      drawBars({ width, most, format: (value) => (value ? tick(seconds(value)) : "0"), label: t("time.picture", { time: seconds(mid), low: seconds(low), high: seconds(high) }),
        rows: [{ name: list(prediction.model, sayWork(prediction.workload)), parts, interval: [low, high], intervalText: t("time.interval", { low: seconds(low), high: seconds(high) }).trim() }] }),
      legend(parts.map((part) => ({ name: part.name, colour: colourOf(part.colour), value: seconds(part.value) }))),
      h("p", { class: "advice" }, h("strong", {}, t("time.advice")), " ", reword(prediction.advice)),
      table(t("time.kinds"), [t("column.kind"), t("column.time"), t("column.share")],
        parts.map((part) => [part.name, seconds(part.value), percent(part.value / mid)])),
      h("details", {}, h("summary", {}, t("time.modules")), table(t("time.modules"), [t("column.module"), t("column.time"), t("column.share")],
        modules.map(([name, value]) => [path(name), seconds(value), percent(value / sum)]))),
      notes(prediction.notes),
    ];
  });
}
