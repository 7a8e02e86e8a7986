// What fills the memory at the peak, and what would fit.
import { colourOf, drawBars, legend } from "../charts.js";
import { KNOWN_DEVICES } from "../form.js";
import { h, table } from "../dom.js";
import { list, says, t, word } from "../i18n.js";
import { bytes, exact, flops, more, seconds, share, tick } from "../numbers.js";

export const channel = "memory";
export const isGradual = true;
export const questions = (setup) => (setup.device ? ["memory", "longest"] : ["memory"]);

// What checkpointing costs in seconds, where a device and a trained model are given.
export const listMore = ({ memory }, setup) => (setup.device ? Object.keys(memory.by_recompute ?? {}).map((name) => [`time.${name}`, "time", { ...setup, recompute: name }]) : []);

const MOST_DEVICES = 6; // buttons; the table holds all
const KINDS = ["weights", "gradients", "optimizer", "activations", "logits", "workspace", "kv_cache", "inputs"];

export function render(answers, { width, notes, letters, onField, onView }) {
  const most = Math.max(...answers.map(({ memory: { memory } }) => Math.max(Number(memory.peak), Number(memory.capacity ?? 0)))) * 1.04;
  return answers.map(({ memory: answer, longest, ...steps }, at) => {
    const { memory, by_recompute: kept, devices } = answer;
    const parts = KINDS.filter((kind) => memory.at_peak[kind] > 0).map((kind) => ({
      name: word(`memory.${kind}`, kind), value: Number(memory.at_peak[kind]), colour: KINDS.indexOf(kind),
      text: says(word(`memory.${kind}`, kind), bytes(memory.at_peak[kind])),
    }));
    const marks = memory.capacity ? [{ value: Number(memory.capacity), text: t("memory.capacity", { size: bytes(memory.capacity) }) }] : [];
    const fitting = devices.filter((device) => device.fits).sort(rank);
    const count = t("memory.devices", { fitting: fitting.length, all: devices.length });
    const smaller = kept.full ? devices.filter((device) => device.capacity >= Number(kept.full.peak)).sort(rank) : [];
    const choose = (found, fields) => [found.slice(0, MOST_DEVICES).map((device) =>
      h("button", { type: "button", class: "small", title: t("memory.capacity", { size: bytes(device.capacity) }), onclick: () => {
        for (const [name, value] of Object.entries({ ...fields, device: device.id })) onField(letters[at], name, value);
      } }, device.name)), found.length > MOST_DEVICES ? h("span", { class: "minor" }, t("memory.others", { count: found.length - MOST_DEVICES })) : null];
    const step = (name) => steps[`time.${name}`]?.prediction?.step_time_s.mid;
    const hasSteps = step("none") && step("full");
    const saved = kept.none && Number(kept.none.peak) - Number(kept.full.peak);
    return [
      h("p", { class: "answer" }, h("strong", { class: "figure" }, bytes(memory.peak)), " ",
        memory.fits === null ? t("memory.unknown") : memory.fits ? t("memory.fits", { size: bytes(memory.capacity) }) : t("memory.misfits", { size: bytes(memory.capacity) })),
      longest?.tokens ? h("p", {}, t("memory.longest", { tokens: exact(longest.tokens) })) : null,
      kept.none ? h("p", {}, says(t("memory.checkpointing"), list(`${t("column.executed")} ${more(kept.full.flops, kept.none.flops)}`,
        hasSteps ? `${t("column.step")} ${more(step("full"), step("none"))}` : "", `${t("memory.peakShort")} ${saved < 0 ? "+" : "−"}${bytes(Math.abs(saved))}`))) : null,
      h("div", { class: "buttons devices" }, h("span", {}, fitting.length ? says(count, "") : count), choose(fitting, {})),
      smaller.length > fitting.length ? h("div", { class: "buttons devices" }, h("span", {}, says(t("memory.checkpointed", { fitting: smaller.length, all: devices.length }), "")), choose(smaller, { recompute: "full" })) : null,
      fitting.length || smaller.length ? null : h("p", {}, t("memory.none"), " ", h("button", { type: "button", class: "link", onclick: () => onView("plan") }, t("memory.plan"))),
      memory.capacity ? null : h("p", { class: "help" }, t("memory.choose")),
      drawBars({ width, most, unit: 2 ** 30, format: (value) => tick(bytes(value)), label: t("memory.picture", { size: bytes(memory.peak) }), rows: [{ name: t("memory.peak", { moment: word(`moment.${memory.moment}`, memory.moment) }), parts, marks }] }),
      legend(parts.map((part) => ({ name: part.name, colour: colourOf(part.colour), value: bytes(part.value) }))),
      table(t("memory.parts"), [t("column.part"), t("column.bytes"), t("plan.memory"), t("column.share")],
        [...parts.map((part) => [part.name, exact(part.value), bytes(part.value), share(part.value, memory.peak)]),
          [t("column.total"), exact(memory.peak), bytes(memory.peak), ""]], { className: "summed" }),
      Object.keys(kept).length ? table(t("memory.recompute"), [t("field.recompute"), t("column.executed"), ...(hasSteps ? [t("column.step")] : []), word("memory.activations", "activations"), t("memory.peakShort"), t("memory.largest")],
        Object.entries(kept).map(([name, row]) => [word(`word.recompute.${name}`, name), flops(row.flops), ...(hasSteps ? [seconds(step(name))] : []), bytes(row.activations), bytes(row.peak), row.largest_batch === null ? "–" : row.largest_batch || t("word.none")]))
        : h("p", {}, says(t("memory.largest"), memory.largest_batch ?? "–")),
      h("details", {}, h("summary", {}, count), table(count, [t("field.device"), t("column.fits"), t("column.capacity")],
          [...fitting, ...devices.filter((device) => !device.fits)].map((device) => [device.name, device.fits ? t("word.yes") : t("word.no"), bytes(device.capacity)]))),
      notes(answer.notes),
    ];
  });
}

// Devices that many have come first, then those with the smallest memory.
function rank(one, other) {
  const place = ({ id }) => (KNOWN_DEVICES.includes(id) ? KNOWN_DEVICES.indexOf(id) : KNOWN_DEVICES.length);
  return place(one) - place(other) || one.capacity - other.capacity;
}
