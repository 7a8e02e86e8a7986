// A model behind a serving engine: what fits, latency, tokens per second and money; then the same under other loads.
import { drawScatter, legend } from "../charts.js";
import { fact, h, table } from "../dom.js";
import { list, says, t, word } from "../i18n.js";
import { exact, money, seconds, short, tick } from "../numbers.js";
import { LETTERS } from "../state.js";

export const channel = "serving";
export const needs = () => ["device", "input_len", "output_len"];
export const isGradual = true;
export const questions = (setup) => (setup.rate ? ["serving"] : ["serving", "loads"]);

const LATENCIES = ["ttft_s", "tpot_s", "e2e_s"];
const RATES = ["tokens_per_s", "tokens_per_s_per_gpu"];

// What the requests are like, in the form's own words.
const LOAD = ["input_len", "output_len", "concurrency", "rate", "benchmark"];

export function render(answers, { width, notes, reword, state, letters, nameDevice }) {
  return answers.map(({ serving: { serving }, loads }, at) => {
    const setup = state.setups[LETTERS.indexOf(letters[at])];
    const { kv_cache: cache, percentiles, usd } = serving;
    const figure = serving.tokens_per_s ? t("serving.figure", { count: exact(Math.round(serving.tokens_per_s.mid)) }) : "";
    const high = (value) => (value === null ? t("serving.unbounded") : seconds(value));
    return [
      h("p", { class: "answer" }, h("strong", { class: "figure" }, figure || t("serving.misfits")), " ", serving.fits ? t("serving.answer", { model: serving.model, gpus: exact(serving.gpus), device: nameDevice(serving.device), engine: word(`engine.${serving.engine}`, serving.engine) }) : reword(serving.why ?? "")),
      h("p", {}, list(...LOAD.filter((name) => setup[name]).map((name) => `${t(`field.${name}`)} ${setup[name]}`))),
      cache ? h("p", {}, t("serving.room", { tokens: exact(cache.tokens), requests: exact(cache.max_concurrency) })) : null,
      serving.tpot_s || serving.ttft_s ? table(t("serving.latency"), ["", t("serving.mean"), t("serving.low"), t("serving.high"), "p50", "p95", "p99"],
        LATENCIES.filter((name) => serving[name]).map((name) => [t(`serving.${name}`), seconds(serving[name].mid), seconds(serving[name].low), high(serving[name].high),
          ...["p50", "p95", "p99"].map((each) => (percentiles[name] ? seconds(percentiles[name][each]) : "–"))])) : null,
      h("dl", { class: "facts" }, RATES.filter((name) => serving[name]).map((name) => fact(t(`serving.${name}`), `${exact(Math.round(serving[name].mid))}${t("time.interval", { low: exact(Math.round(serving[name].low)), high: exact(Math.round(serving[name].high)) })}`)),
        usd ? fact(t("serving.usd"), money(usd.per_million_output_tokens)) : null, serving.evidence ? fact(t("serving.evidence"), word(`evidence.${serving.evidence}`, serving.evidence)) : null),
      serving.advice ? h("p", { class: "advice" }, h("strong", {}, t("time.advice")), " ", reword(serving.advice)) : null,
      loads?.rows?.length ? showLoads(loads.rows, width) : null,
      notes(serving.notes),
    ];
  });
}

function showLoads(rows, width) {
  const points = rows.map((row) => [row.concurrency, row.tokens_per_s.mid]);
  const log = (label, values, format) => ({ range: [Math.min(...values) * 0.8, Math.max(...values) * 1.25], isLog: true, format: (value) => tick(format(value)), label });
  return [
    drawScatter({ width, height: Math.max(280, Math.min(400, width * 0.45)), x: { ...log(t("field.concurrency"), points.map(([each]) => each), exact), ticks: points.map(([each]) => each) }, y: log(t("serving.tokens_per_s"), points.map(([, each]) => each), short),
      label: t("serving.picture"), points: points.map(([x, y]) => ({ x, y, r: 4, className: "c0 l0", text: says(exact(x), exact(Math.round(y))) })), lines: [{ points, className: "curve s0 l0" }] }),
    legend([{ name: t("serving.tokens_per_s"), colour: "l0" }]),
    table(t("serving.loads"), [t("field.concurrency"), t("serving.ttft_s"), t("serving.tpot_s"), t("serving.tokens_per_s")],
      rows.map((row) => [exact(row.concurrency), row.ttft_s ? seconds(row.ttft_s.mid) : "–", row.tpot_s ? seconds(row.tpot_s.mid) : "–", exact(Math.round(row.tokens_per_s.mid))])),
  ];
}
