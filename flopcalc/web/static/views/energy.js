// Watts of a GPU, watt-hours and CO2 of a step or a run, each with its interval.
import { fact } from "../dom.js";
import { t } from "../i18n.js";
import { metric } from "../numbers.js";

export function listEnergy(energy, span) {
  if (!energy) return [];
  const show = (name, values, unit) =>
    values && fact(name, `${metric(values.mid, unit)}${t("time.interval", { low: metric(values.low, unit), high: metric(values.high, unit) })}`);
  return [
    show(t("energy.power"), energy.power_w, "W"), show(t(`energy.${span}`), energy.wh, "Wh"),
    show(t("energy.tokens"), energy.wh_per_million_tokens, "Wh"), show(t("energy.co2"), energy.co2_g, "g"),
  ];
}
