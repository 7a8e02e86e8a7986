// What fills the memory at the peak, and what would fit.
import { colourOf, drawBars, legend } from "../charts.js";
import { h, table } from "../dom.js";
import { list, says, t, word } from "../i18n.js";
import { bytes, exact, flops, share, tick } from "../numbers.js";

export const channel = "memory";
export const questions = (setup) => (setup.device ? ["memory", "longest"] : ["memory"]);

const KINDS = ["weights", "gradients", "optimizer", "activations", "logits", "workspace", "kv_cache", "inputs"];

export function render(answers, { width, notes }) {
  const most = Math.max(...answers.map(({ memory: { memory } }) => Math.max(Number(memory.peak), Number(memory.capacity ?? 0)))) * 1.04;
  return answers.map(({ memory: answer, longest }) => {
    const { memory, by_recompute: kept, devices } = answer;
    const parts = KINDS.filter((kind) => memory.at_peak[kind] > 0).map((kind) => ({
      name: word(`memory.${kind}`, kind), value: Number(memory.at_peak[kind]), colour: KINDS.indexOf(kind),
      text: says(word(`memory.${kind}`, kind), bytes(memory.at_peak[kind])),
    }));
    const marks = memory.capacity ? [{ value: Number(memory.capacity), text: t("memory.capacity", { size: bytes(memory.capacity) }) }] : [];
    const fitting = devices.filter((device) => device.fits);
    const count = t("memory.devices", { fitting: fitting.length, all: devices.length });
    return [
      h("p", { class: "answer" }, h("strong", { class: "figure" }, bytes(memory.peak)), " ",
        memory.fits === null ? t("memory.unknown") : memory.fits ? t("memory.fits", { size: bytes(memory.capacity) }) : t("memory.misfits", { size: bytes(memory.capacity) })),
      longest?.tokens ? h("p", {}, t("memory.longest", { tokens: exact(longest.tokens) })) : null,
      h("p", {}, fitting.length ? says(count, listSmallest(fitting)) : count),
      drawBars({ width, most, unit: 2 ** 30, format: (value) => tick(bytes(value)), label: t("memory.picture", { size: bytes(memory.peak) }), rows: [{ name: t("memory.peak", { moment: word(`moment.${memory.moment}`, memory.moment) }), parts, marks }] }),
      legend(parts.map((part) => ({ name: part.name, colour: colourOf(part.colour), value: bytes(part.value) }))),
      table(t("memory.parts"), [t("column.part"), t("column.bytes"), t("plan.memory"), t("column.share")],
        [...parts.map((part) => [part.name, exact(part.value), bytes(part.value), share(part.value, memory.peak)]),
          [t("column.total"), exact(memory.peak), bytes(memory.peak), ""]], { className: "summed" }),
      Object.keys(kept).length ? table(t("memory.recompute"), [t("field.recompute"), t("column.executed"), word("memory.activations", "activations"), t("memory.peakShort"), t("memory.largest")],
        Object.entries(kept).map(([name, row]) => [word(`word.recompute.${name}`, name), `${flops(row.flops)} (${share(row.flops, kept.none.flops)})`, bytes(row.activations), bytes(row.peak), row.largest_batch === null ? "–" : row.largest_batch || t("word.none")]))
        : h("p", {}, says(t("memory.largest"), memory.largest_batch ?? "–")),
      h("details", {}, h("summary", {}, count), table(count, [t("field.device"), t("column.fits"), t("column.capacity")],
          devices.map((device) => [device.name, device.fits ? t("word.yes") : t("word.no"), bytes(device.capacity)]))),
      notes(answer.notes),
    ];
  });
}

// The smallest memories that are enough, with a device each.
function listSmallest(fitting) {
  const sorted = [...fitting].sort((one, other) => one.capacity - other.capacity);
  return list(...sorted.slice(0, 4).map((device) => `${device.name} (${bytes(device.capacity)})`), sorted.length > 4 ? "…" : "");
}
