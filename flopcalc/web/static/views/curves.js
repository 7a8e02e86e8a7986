// FLOPs, seconds or bytes over the length, the batch, images or GPUs; all set-ups in one picture.
import { colourOf, drawScatter, findRange, legend } from "../charts.js";
import { h, table } from "../dom.js";
import { list, says, t } from "../i18n.js";
import { bytes, exact, flops, seconds, tick } from "../numbers.js";

export const channel = "curve";
export const isJoint = true;
export const isQuick = (state) => read(state).of === "flops";
export const questions = () => ["curve"];
export const needs = (state) => (read(state).of === "time" ? ["device"] : []);
export const details = (state) => read(state);

const OVER = ["seq", "batch", "images", "gpus"];
const OF = ["flops", "time", "memory"];
const FORMATS = { flops, time: seconds, memory: bytes };

// A step on one GPU does not change with their number.
function read(state) {
  const over = OVER.includes(state.over) ? state.over : "seq";
  return { over, of: OF.includes(state.of) && over !== "gpus" ? state.of : "flops" };
}

export function controls({ state, form, onChoose }) {
  const { over, of } = read(state);
  const names = { seq: form.label("seq"), batch: form.label("batch"), images: form.label("image"), gpus: form.label("gpus") };
  const select = (name, value, words) => h("div", { class: "field" }, h("label", { for: `curve-${name}` }, t(`curve.${name}`)),
    h("select", { id: `curve-${name}`, onchange: (event) => onChoose(name, event.target.value) },
      words.map(([key, text]) => h("option", { value: key, selected: key === value }, text))));
  return [h("div", { class: "fields controls" }, select("of", of, OF.filter((key) => key === "flops" || over !== "gpus").map((key) => [key, t(`curve.of.${key}`)])),
    select("over", over, OVER.map((key) => [key, names[key]])))];
}

export function render(answers, { width, state, names, letters }) {
  const { over, of } = read(state);
  const format = FORMATS[of];
  const lines = answers.map(({ curve }) => curve.points.map(({ x, y }) => [x, Number(y)]));
  const all = lines.flat();
  const isLog = over !== "images";
  const values = [...new Set(all.map(([each]) => each))].sort((one, other) => one - other);
  const size = (value) => (value >= 1024 && over !== "gpus" ? `${value / 1024}k` : exact(value)); // as the fields take it
  const x = { range: isLog ? [Math.min(...all.map(([each]) => each)) * 0.9, Math.max(...all.map(([each]) => each)) * 1.1] : findRange(all.map(([each]) => each)), isLog,
    ticks: values, format: size, label: t(`curve.x.${over}`) };
  const y = { range: [Math.min(...all.map(([, each]) => each)) * 0.8, Math.max(...all.map(([, each]) => each)) * 1.25], isLog: true, format: (value) => tick(format(value)), label: t(`curve.of.${of}`) };
  const named = letters.map((letter) => names.find((name) => name.startsWith(letter)) ?? letter);
  const find = (at, value) => answers[at].curve.points.find((each) => each.x === value);
  const cell = (at, value) => {
    const point = find(at, value);
    return point ? h("span", { title: of === "time" ? "" : exact(point.y) }, format(point.y)) : "–";
  };
  const ratio = (at, value) => (find(at, value) && find(0, value) ? (Number(find(at, value).y) / Number(find(0, value).y)).toFixed(3) : "–");
  const columns = (first, other) => answers.flatMap((_, at) => (at ? [first(at), other(at)] : [first(at)])); // each but the first beside it
  return [
    drawScatter({ width, height: Math.max(300, Math.min(460, width * 0.5)), x, y, label: t("curve.picture", { of: t(`curve.of.${of}`), over: t(`curve.x.${over}`) }),
      points: lines.flatMap((line, at) => line.map(([a, b], step) => {
        const mark = lines.length > 1 && step === line.length - 1 - at ? letters[at] : ""; // not all at one place
        return { x: a, y: b, r: mark ? 8 : 4, className: `${colourOf(at)} l${at}`, text: says(list(named[at], exact(a)), format(b)), mark };
      })),
      lines: lines.map((points, at) => ({ points, className: `curve s${at} l${at}` })) }),
    legend(named.map((name, at) => ({ name, colour: `l${at}` }))),
    table(t(`curve.of.${of}`), [t(`curve.x.${over}`), ...columns((at) => named[at], (at) => `${letters[at]} ÷ ${letters[0]}`)],
      values.map((value) => [exact(value), ...columns((at) => cell(at, value), (at) => ratio(at, value))]), { className: answers.length > 3 ? "many" : "" }),
  ];
}
