// A model behind a serving engine: what fits, latency, tokens per second and money; then the same under other loads.
import { drawScatter, legend } from "../charts.js";
import { fact, h, table } from "../dom.js";
import { list, says, t } from "../i18n.js";
import { exact, seconds, short, tick } from "../numbers.js";

export const channel = "serving";
export const needs = () => ["device", "input_len", "output_len"];
export const questions = (setup) => (setup.rate ? ["serving"] : ["serving", "loads"]);

const LATENCIES = ["ttft_s", "tpot_s", "e2e_s"];
const RATES = ["tokens_per_s", "tokens_per_s_per_gpu"];

export function render(answers, { width, notes }) {
  return answers.map(({ serving: { serving }, loads }) => {
    const { kv_cache: cache, percentiles, usd } = serving;
    const figure = serving.tokens_per_s ? `${exact(Math.round(serving.tokens_per_s.mid))} ${t("serving.tokens_per_s")}` : "";
    const high = (value) => (value === null ? t("serving.unbounded") : seconds(value));
    return [
      h("p", { class: "answer" }, h("strong", { class: "figure" }, figure || t("serving.misfits")), " ", serving.fits ? says(list(`${serving.gpus} GPU`, serving.engine), t("serving.fits")) : serving.why ?? ""),
      cache ? h("p", {}, t("serving.room", { tokens: exact(cache.tokens), requests: exact(cache.max_concurrency) })) : null,
      serving.tpot_s || serving.ttft_s ? table(t("serving.latency"), ["", t("serving.mean"), t("serving.low"), t("serving.high"), "p50", "p95", "p99"],
        LATENCIES.filter((name) => serving[name]).map((name) => [t(`serving.${name}`), seconds(serving[name].mid), seconds(serving[name].low), high(serving[name].high),
          ...["p50", "p95", "p99"].map((each) => (percentiles[name] ? seconds(percentiles[name][each]) : "–"))])) : null,
      h("dl", { class: "facts" }, RATES.filter((name) => serving[name]).map((name) => fact(t(`serving.${name}`), `${exact(Math.round(serving[name].mid))} (${exact(Math.round(serving[name].low))} – ${exact(Math.round(serving[name].high))})`)),
        usd ? fact(t("serving.usd"), usd.per_million_output_tokens.toPrecision(3)) : null, serving.evidence ? fact(t("serving.evidence"), serving.evidence) : null),
      loads?.rows?.length ? showLoads(loads.rows, width) : null,
      notes(serving.notes),
    ];
  });
}

function showLoads(rows, width) {
  const points = rows.map((row) => [row.concurrency, row.tokens_per_s.mid]);
  const log = (label, values, format) => ({ range: [Math.min(...values) * 0.8, Math.max(...values) * 1.25], isLog: true, format: (value) => tick(format(value)), label });
  return [
    drawScatter({ width, height: Math.max(280, Math.min(400, width * 0.45)), x: log(t("field.concurrency"), points.map(([each]) => each), short), y: log(t("serving.tokens_per_s"), points.map(([, each]) => each), short),
      label: t("serving.picture"), points: points.map(([x, y]) => ({ x, y, r: 4, className: "c0", text: says(exact(x), exact(Math.round(y))) })), lines: [{ points, className: "curve s0" }] }),
    legend([{ name: t("serving.tokens_per_s"), colour: "c0" }]),
    table(t("serving.loads"), [t("field.concurrency"), t("serving.ttft_s"), t("serving.tpot_s"), t("serving.tokens_per_s")],
      rows.map((row) => [exact(row.concurrency), row.ttft_s ? seconds(row.ttft_s.mid) : "–", row.tpot_s ? seconds(row.tpot_s.mid) : "–", exact(Math.round(row.tokens_per_s.mid))])),
  ];
}
