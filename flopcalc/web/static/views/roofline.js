// Every product and attention call of the step under the device's roof.
import { drawScatter, legend } from "../charts.js";
import { h, path, table } from "../dom.js";
import { list, says, t } from "../i18n.js";
import { percent, seconds, short, tick } from "../numbers.js";

export const channel = "roofline";
export const needs = () => ["device"];
export const questions = () => ["roofline"];

const COLOURS = { forward: "c0", dgrad: "c1", wgrad: "c2", backward: "c3" };

export function render(answers, { width, notes, nameDevice }) {
  return answers.map(({ roofline: answer }) => {
    const { roofline } = answer;
    const calls = roofline.calls.map((call) => ({ ...call, rate: call.flops / call.seconds, all: call.seconds * call.calls }));
    const most = Math.max(...calls.map((call) => call.all));
    const span = (values) => [Math.min(...values) * 0.6, Math.max(...values) * 1.5];
    const x = { range: span([...calls.map((call) => call.flops_per_byte), roofline.ridge_flops_per_byte]), isLog: true,
      format: (value) => tick(short(value)), label: t("roofline.x") };
    const y = { range: span([...calls.map((call) => call.rate), roofline.peak_flops_per_s]), isLog: true,
      format: (value) => tick(short(value)), label: t("roofline.y") };
    const low = Math.max(x.range[0], y.range[0] / roofline.bytes_per_s);
    const roof = [[low, low * roofline.bytes_per_s], [roofline.ridge_flops_per_byte, roofline.peak_flops_per_s], [x.range[1], roofline.peak_flops_per_s]];
    const point = (call) => ({ x: call.flops_per_byte, y: call.rate, r: 3 + 9 * Math.sqrt(call.all / most), className: COLOURS[call.direction],
      text: says(`${call.module} ${t(`direction.${call.direction}`)}`, list(call.shape, short(call.rate, "FLOP/s"), `${call.flops_per_byte.toFixed(1)} FLOP/B`, `${seconds(call.seconds)} × ${call.calls}`)),
      label: call.module.split(".").at(-1) });
    const rows = [...calls].sort((one, other) => other.all - one.all);
    const total = (value) => calls.reduce((sum, call) => sum + value(call), 0);
    const peak = short(roofline.peak_flops_per_s, "FLOP/s");
    const bound = total((call) => (call.flops_per_byte < roofline.ridge_flops_per_byte ? call.all : 0)) / total((call) => call.all);
    return [
      h("p", { class: "answer" }, h("strong", { class: "figure" }, percent(total((call) => call.flops * call.calls) / total((call) => call.all) / roofline.peak_flops_per_s)), " ",
        t("roofline.answer", { peak, device: nameDevice(roofline.device), dtype: roofline.dtype, bound: percent(bound) })),
      drawScatter({ width, height: Math.max(300, Math.min(480, width * 0.6)), x, y, points: rows.map(point), lines: [{ points: roof, className: "roof", label: peak }],
        label: t("roofline.picture", { device: nameDevice(roofline.device), peak, ridge: roofline.ridge_flops_per_byte.toFixed(0) }) }),
      legend([...new Set(calls.map((call) => call.direction))].map((name) => ({ name: t(`direction.${name}`), colour: COLOURS[name] }))),
      h("p", { class: "help" }, t("roofline.help", { ridge: roofline.ridge_flops_per_byte.toFixed(0) })),
      table(t("roofline.calls"), [t("column.module"), t("column.direction"), t("column.time"), t("column.ofpeak"), "FLOP/s", "FLOP/B", "×", t("column.shape")],
        rows.map((call) => [path(call.module), t(`direction.${call.direction}`), seconds(call.all), `${((100 * call.rate) / roofline.peak_flops_per_s).toFixed(0)} %`,
          short(call.rate), call.flops_per_byte.toFixed(1), call.calls, call.shape]), { texts: [1, 7], className: "paths" }),
      notes(answer.notes),
    ];
  });
}
