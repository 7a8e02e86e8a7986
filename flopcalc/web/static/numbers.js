// Numbers for people. Counts may be larger than JavaScript's exact numbers: they come as text then.

import { word } from "./i18n.js";

const PREFIXES = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function exact(value) {
  if (value === null || value === undefined) return "–";
  return BigInt(value).toLocaleString("en-US");
}

export function short(value, unit = "") {
  const number = Number(value);
  for (const [size, prefix] of PREFIXES) {
    if (Math.abs(number) >= size) return `${digits(number / size)} ${prefix}${unit}`;
  }
  return `${number} ${unit}`.trim();
}

// As the command line rounds them.
const digits = (value) => value.toFixed(2);

// Parameters: 8030261248 -> 8.03B.
export function count(value) {
  const number = Number(value);
  const [size, suffix] = [[1e12, "T"], [1e9, "B"], [1e6, "M"]].find(([each]) => number >= each) ?? [1, ""];
  return suffix ? `${digits(number / size)}${suffix}` : exact(value);
}

export const flops = (value) => short(value, "FLOPs");

export function add(...values) {
  return values.reduce((sum, value) => sum + BigInt(value ?? 0), 0n);
}

export function share(part, whole) {
  const total = Number(whole);
  return total ? `${((100 * Number(part)) / total).toFixed(1)} %` : "–";
}

// How much more than before: 1.232 -> +23.2 %.
export const more = (value, before) => {
  const change = 100 * (Number(value) / Number(before) - 1);
  return `${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(1)} %`;
};

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

export function bytes(value) {
  const number = Number(value);
  for (const [power, prefix] of [[40, "T"], [30, "G"], [20, "M"], [10, "K"]]) {
    if (Math.abs(number) >= 2 ** power) return `${digits(number / 2 ** power)} ${prefix}iB`;
  }
  return `${number} B`;
}

export function seconds(value) {
  if (value >= 1) return `${digits(value)} s`;
  return value >= 1e-4 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
}

export function amount(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return Math.round(value).toLocaleString("en-US");
  return value >= 1 ? value.toFixed(1) : Number(value.toPrecision(2)).toString();
}

// As the command line writes them: 0.0014 days -> 2 min, 32800 -> $32.8k.
const brief = (value) => (value >= 100 ? Math.round(value).toLocaleString("en-US") : value.toFixed(1).replace(/\.0$/, ""));

export function duration(days) {
  for (const [unit, size, least] of [["years", 365.25, 2], ["days", 1, 1], ["h", 1 / 24, 1], ["min", 1 / 1440, 1]]) {
    if (days >= size * least) return `${brief(days / size)} ${word(`unit.${unit}`, unit)}`;
  }
  return `${brief(86400 * days)} s`;
}

export function money(usd) {
  for (const [prefix, size] of [["B", 1e9], ["M", 1e6], ["k", 1e3]]) if (usd >= size) return `$${brief(usd / size)}${prefix}`;
  return usd >= 0.01 ? `$${usd.toFixed(2)}` : `$${Number(usd.toPrecision(2))}`;
}

// 0.0123 Wh -> 12.3 mWh, 1234 Wh -> 1.2 kWh.
export function metric(value, unit) {
  const [size, prefix] = [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]].find(([each]) => value >= each) ?? [1e-3, "m"];
  return `${amount(value / size)} ${prefix}${unit}`;
}

// Numbers of an axis: no digits that say nothing.
export const tick = (text) => text.replace(/\.(\d*?)0*(?= |$)/, (_, rest) => (rest ? `.${rest}` : ""));
