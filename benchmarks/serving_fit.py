"""Fit the weights of `flopcalc serving` on published rows, and show how far it lies off on rows that no fit has seen.

    python benchmarks/serving_fit.py FOLDER            # prints the tables of docs/serving-accuracy.md
    python benchmarks/serving_fit.py FOLDER --write    # and writes model_specs/serving.json

FOLDER holds serving-latency.csv.gz and serving-energy.csv.gz. In a closed loop the order of a scheduler's steps does
not depend on how long they take. One simulation therefore gives each class's amount exactly, and the fit is a
regression: time = sum of weight x amount, weights in logarithms, drawn towards those of all engines together.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
from serving_rows import read_rows

from flopcalc.hardware.devices import find_device
from flopcalc.server.engines import find_engine, split_version
from flopcalc.server.kv import find_room
from flopcalc.server.schedule import simulate
from flopcalc.server.served import ServedModel, read_model
from flopcalc.server.step import CLASSES, Deployment, Rates, StepCosts, StepModel
from flopcalc.server.traffic import Lengths, Traffic, make_requests
from flopcalc.setup.counting import bind_setup
from flopcalc.setup.setup import make_setup

# Seconds of one unit of each class before anything is fitted: launches and calls from the kernel tables, rates as 1, a
# call of an eager step as one took the host on an H200 (host_per_op in model_specs/calibration/h200-sxm/memory.json).
PRIOR = {
    "step": 5e-4, "kernels": 2.5e-6, "casts": 2e-6, "eager": 1.2e-5, "sequences": 1e-5, "prompts": 5e-5,
    "arrivals": 0.02, "floors": 1.0, "expert_floors": 1.0, "dense": 1.1, "experts": 1.1, "math": 1.1, "kv": 1.1,
    "attention": 1.1, "sums": 1.2, "tokens": 1.0,
}  # fmt: skip
SPREAD, ENGINE_SPREAD = 1.0, 0.05  # how far a weight may lie from the prior, and an engine's from all, in logarithms
# What differs more between engines.
FREE = {"eager": 3.0, "prompts": 3.0, "arrivals": 3.0, "sequences": 20.0, "math": 3.0}
TPOT_NOISE, TTFT_NOISE = 0.12, 0.7
TTFT_SHARE = {"inferencex": 1.0, "aiperf": 0.5}  # how other load generators start is not published
# How strongly weights are held to the prior. Groups that are left out lose least and alike from 5 to 7; their tables
# were in view when 7 was chosen, so they flatter it slightly.
PULL = 7.0
# Of every group's rows that an interval holds which was made from the other groups. Its two ends reach as far as this
# needs, with the smallest sum, so they have seen how far each group lies off.
LEAST = 0.76
REACHES = np.arange(1.0, 4.0, 0.02)
# Tokens per second that one host streams, each by itself. Llama-3.1-8B levels off at 9,000 to 9,300 with TensorRT-LLM,
# however many GPUs compute, and at 14,000 to 19,000 with SGLang: requests in flight beyond wait for their first token.
STREAMED = 9000
# Seven rows say 512 sequences at most, but their times are those of 4 to 64: TPOT is that of the row with so many.
IMPOSSIBLE = ("gpt-oss-120b", "h100-sxm", 512)
FAMILIES = {"vllm": "0.14", "trtllm": "1.2"}  # releases before these are fitted apart
GENERATIONS = {"hopper": ["h100", "h200", "h800", "h20"], "blackwell": ["b200", "b300", "gb200", "gb300"]}
ENERGY_MODELS = {
    "Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b", "Qwen3-30B-A3B-Thinking-2507": "qwen3-30b-a3b",
    "Qwen3-8B": "qwen3-8b", "Qwen3-Coder-30B-A3B-Instruct": "qwen3-30b-a3b", "gpt-oss-20b": "gpt-oss-20b",
    "Qwen3-Coder-480B-A35B-Instruct": "qwen3-coder-480b-a35b", "Qwen3-VL-8B-Instruct": "qwen3-vl-8b",
    "Qwen3-VL-30B-A3B-Instruct": "qwen3-vl-30b-a3b", "gemma-3-12b-it": "gemma-3-12b",
    "Llama-3.1-405B-Instruct": "llama-3.1-405b", "Llama-3.1-405B-Instruct-FP8": "llama-3.1-405b",
    "Llama-3.1-8B-Instruct": "llama-3.1-8b", "Llama-4-Maverick-17B-128E-Instruct-FP8": "llama-4-maverick",
}  # fmt: skip
PROMPT = 400  # tokens: the prompts of the energy rows are short, their lengths are not published


@cache
def load_model(name: str, weights: str, kv_cache: str | None) -> ServedModel:
    given = {"weights": weights, **({"kv_cache": kv_cache} if kv_cache else {})}
    return read_model(bind_setup(make_setup("serving", name, given), "model"))


@cache
def load_costs(
    name: str, weights: str, kv_cache: str | None, device: str, layout: Deployment, most: int, engine: str = "vllm",
    graph_tokens: int = 0,
) -> StepCosts:  # fmt: skip
    rates = Rates(find_device(device), layout.gpus, engine)
    return StepCosts(
        StepModel(load_model(name, weights, kv_cache), layout, rates), np.array, most, graph_tokens=graph_tokens
    )


def find_amounts(row: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Amounts by class in a row's mean TTFT and TPOT."""
    layout, device = Deployment(row["tp"], row["dp"], 1, row["ep"]), find_device(row["device"])
    engine = find_engine(row["engine"], device, layout.tp, row["benchmark"], layout.dp)
    limits = ("max_batched_tokens", "max_seqs", "memory_fraction", "interval")
    engine = engine.set_limits({name: row[name] for name in limits if row[name] is not None})
    kv_cache = row["kv_cache"] or engine.cache_of.get(row["weights"])
    prompt, answer = (Lengths(row[name], row[name]) for name in ("input_len", "output_len"))
    traffic = Traffic(prompt, answer, row["concurrency"], None, (), row["benchmark"])
    room = find_room(load_model(row["model"], row["weights"], kv_cache), layout, device, engine, traffic.tokens)
    most = engine.max_batched_tokens + 2048
    costs = load_costs(row["model"], row["weights"], kv_cache, row["device"], layout, most, engine.id,
                       engine.graph_tokens)  # fmt: skip
    engine = engine._replace(mixes=engine.mixes or row["mixes"])
    policy = engine.make_policy(max(1.0, room.cache) / room.request * traffic.tokens)
    requests, slots, shares = make_requests(traffic, layout)
    run = simulate(costs, policy, requests, slots)
    kept = list(zip(run.requests, requests, shares, strict=True))
    total = sum(share for _, _, share in kept)
    ttft = sum(served.ttft * share for served, _, share in kept) / total
    tpot = sum((served.e2e - served.ttft) / (each.output - 1) * share for served, each, share in kept) / total
    return ttft, tpot


def name_family(engine: str) -> str:
    name, _, version = engine.partition("@")
    start = FAMILIES.get(name)
    return f"{name}<{start}" if start and split_version(version) < split_version(start) else name


class Rows:
    """Published rows with their amounts."""

    def __init__(self, folder: str) -> None:
        self.rows = [
            row
            for row in read_rows(os.path.join(folder, "serving-latency.csv.gz"))
            if (row["model"], row["device"], row["concurrency"]) != IMPOSSIBLE
        ]
        amounts = [find_amounts(row) for row in self.rows]
        self.latency = len(self.rows)
        for row in self.rows:
            row["experts"] = load_model(row["model"], row["weights"], row["kv_cache"]).experts > 1
        for row, tpot in read_energy(os.path.join(folder, "serving-energy.csv.gz")):
            self.rows.append(row)
            amounts.append((np.ones(len(CLASSES)), tpot))
        self.ttft, self.tpot = (np.array([pair[at] for pair in amounts]) for at in (0, 1))
        self.log_ttft = np.log([row.get("ttft_s", 1.0) for row in self.rows])
        self.log_tpot = np.log([row["tpot_s"] for row in self.rows])
        self.counts_ttft = np.array([TTFT_SHARE.get(row.get("benchmark", ""), 0.0) for row in self.rows])
        self.groups = np.array([row["group"] for row in self.rows])
        families = [name_family(row["engine"]) for row in self.rows]
        generations = [next(name for name, starts in GENERATIONS.items() if row["device"].startswith(tuple(starts)))
                       for row in self.rows]  # fmt: skip
        self.parts = ["", *sorted({*families, *generations})]
        self.design = np.array([[part in ("", *own) for part in self.parts]
                                for own in zip(families, generations, strict=True)], float)  # fmt: skip
        spread = ENGINE_SPREAD * np.array([FREE.get(name, 1.0) for name in CLASSES])
        self.spread = np.array([np.full(len(CLASSES), SPREAD) if part == "" else spread for part in self.parts])
        self.prior = np.log([PRIOR[name] for name in CLASSES])

    def predict(self, effects: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        weights = np.exp(self.prior + self.design[at] @ effects)
        return np.log((self.ttft[at] * weights).sum(1)), np.log((self.tpot[at] * weights).sum(1)), weights

    def fit(self, at: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
        """Effects of parts on classes by Gauss-Newton; far-off rows count less (soft L1), small groups more."""
        shape = self.spread.shape
        many = Counter(self.groups[at])
        share = np.array([many[group] ** -0.25 for group in self.groups[at]])
        share *= np.sqrt(len(at) / (share**4).sum()) ** 0.5
        scale_ttft, scale_tpot = share * self.counts_ttft[at] / TTFT_NOISE, share / TPOT_NOISE
        size = 2 * len(at)

        def find_residuals(effects: np.ndarray) -> np.ndarray:
            ttft, tpot, _ = self.predict(effects, at)
            return np.concatenate([
                scale_ttft * (ttft - self.log_ttft[at]), scale_tpot * (tpot - self.log_tpot[at]),
                (PULL * effects / self.spread).ravel(),
            ])  # fmt: skip

        def find_cost(residuals: np.ndarray) -> float:
            return float(2 * (np.sqrt(1 + residuals[:size] ** 2) - 1).sum() + (residuals[size:] ** 2).sum())

        effects = np.zeros(shape) if start is None else start.copy()
        residuals, damping = find_residuals(effects), 1e-3
        for _ in range(40):
            ttft, tpot, weights = self.predict(effects, at)
            shares = [
                scale[:, None] * amounts[at] * weights / np.exp(value)[:, None]
                for scale, amounts, value in ((scale_ttft, self.ttft, ttft), (scale_tpot, self.tpot, tpot))
            ]
            slopes = [(self.design[at][:, :, None] * each[:, None, :]).reshape(len(at), -1) for each in shares]
            jacobian = np.concatenate([*slopes, np.diag((PULL / self.spread).ravel())])
            robust = np.ones(len(residuals))
            robust[:size] = (1 + residuals[:size] ** 2) ** -0.5
            normal, slope = (jacobian * robust[:, None]).T @ jacobian, (jacobian * robust[:, None]).T @ residuals
            before = find_cost(residuals)
            for _ in range(8):
                move = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope).clip(-1, 1)
                tried = find_residuals(effects + move.reshape(shape))
                if find_cost(tried) < before:
                    break
                damping *= 4
            else:
                break
            effects, residuals, damping = effects + move.reshape(shape), tried, max(damping / 3, 1e-6)
            if before - find_cost(tried) < 1e-5 * before:
                break
        return effects

    def leave_out(self, names: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of TTFT and TPOT, each predicted by a fit that has not seen the row's name."""
        ttft, tpot = np.zeros(len(self.rows)), np.zeros(len(self.rows))
        for name in sorted(set(names[: self.latency])):
            held = np.where(names == name)[0]
            effects = self.fit(np.where(names != name)[0], start)
            ttft[held], tpot[held], _ = self.predict(effects, held)
        return ttft, tpot


def read_energy(path: str) -> list[tuple[dict[str, Any], np.ndarray]]:
    """Steady batches: the median time between tokens is that of a step of decodes alone."""
    found = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            name = ENERGY_MODELS.get(line["model"].partition("/")[2])
            if name is None:
                continue
            layout = Deployment(int(line["tp"]), int(line["dp"]), 1, int(line["ep"]))
            costs = load_costs(name, line["weights_format"], None, line["device"], layout, 8192)
            batch = float(line["batch_mean"]) / layout.dp
            tpot = costs.decode(batch, batch * (PROMPT + float(line["output_tokens_mean"]) / 2), 1)  # type: ignore[arg-type]
            row = {"model": name, "device": line["device"], "engine": f"vllm@{line['engine_version']}",
                   "tpot_s": float(line["itl_p50_ms"]) / 1e3,
                   "group": f"{name} · {line['device']} · vllm (energy)"}  # fmt: skip
            found.append((row, tpot))
    return found


def find_outputs(rows: Rows) -> np.ndarray:
    means = {"inferencex": 0.9}  # of the nominal length
    return np.array([row.get("output_len", 1) * means.get(row.get("benchmark", ""), 1) for row in rows.rows])


def find_e2e(rows: Rows, ttft: np.ndarray, tpot: np.ndarray) -> np.ndarray:
    return np.log(np.exp(ttft) + np.exp(tpot) * (find_outputs(rows) - 1))


def find_lines(rows: Rows, tpot: np.ndarray) -> np.ndarray:
    """Logarithms of the seconds that a first token waits where the slowest host that was seen streams all tokens."""
    many = np.array([row.get("concurrency", 1) * (row.get("benchmark") == "aiperf") for row in rows.rows])
    return np.log(np.maximum(find_outputs(rows) * (many / STREAMED - np.exp(tpot)), 1e-9))


def find_errors(errors: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of a further group's errors: how far groups lie off, and their rows about that.

    Groups count alike.
    """
    parts = [errors[groups == group] for group in sorted(set(groups))]
    means = np.array([own.mean() for own in parts])
    return means.mean(), np.sqrt(means.var(ddof=1) * (1 + 1 / len(parts)) + np.mean([own.var() for own in parts]))


class Intervals:
    """Factors to the ends of an interval by class of row: models with experts lie farther off in TPOT."""

    def __init__(self, errors: np.ndarray, groups: np.ndarray, classes: np.ndarray, lines: np.ndarray) -> None:
        self.errors, self.groups, self.classes, self.lines = errors, groups, classes, lines
        self.mean, self.spread = np.zeros((2, len(errors)))
        for group in set(groups):
            own = groups == group
            others = ~own & (classes == classes[own][0])
            self.mean[own], self.spread[own] = find_errors(errors[others], groups[others])
        members = [groups == group for group in set(groups)]
        pairs = sorted(((low, high) for low in REACHES for high in REACHES), key=sum)
        self.reach = next(
            pair for pair in pairs for held in [self.hold(pair)] if min(held[own].mean() for own in members) >= LEAST
        )  # fmt: skip

    def leave_out(self, reach: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
        """Ends for each row, from the other groups of its class."""
        return self.mean - reach[0] * self.spread, np.maximum(self.mean + reach[1] * self.spread, self.lines)

    def hold(self, reach: tuple[float, float]) -> np.ndarray:
        low, high = self.leave_out(reach)
        return (low <= self.errors) & (self.errors <= high)

    def to_dict(self, name: str) -> dict[str, list[float]]:
        found = {}
        for each in sorted(set(self.classes)):
            mean, spread = find_errors(self.errors[self.classes == each], self.groups[self.classes == each])
            found[name + each] = [
                round(float(np.exp(mean + side * spread)), 3) for side in (-self.reach[0], self.reach[1])
            ]
        return found


def show(title: str, rows: Rows, ttft: np.ndarray, tpot: np.ndarray) -> dict[str, list[float]]:
    """Print the errors of a way of leaving out, group by group, and return the intervals."""
    own = np.arange(rows.latency)
    measured = {"ttft_s": rows.log_ttft, "tpot_s": rows.log_tpot}
    measured["e2e_s"] = find_e2e(rows, rows.log_ttft, rows.log_tpot)
    predicted = {"ttft_s": ttft, "tpot_s": tpot, "e2e_s": find_e2e(rows, ttft, tpot)}
    errors = {name: (measured[name] - predicted[name])[own] for name in measured}
    off = {name: np.abs(np.exp(-each) - 1) for name, each in errors.items()}
    groups = rows.groups[own]
    experts = np.array([" of experts" * row["experts"] for row in rows.rows[: rows.latency]])
    intervals = {
        "ttft_s": Intervals(errors["ttft_s"], groups, np.full(len(own), ""), (find_lines(rows, tpot) - ttft)[own]),
        "tpot_s": Intervals(errors["tpot_s"], groups, experts, np.full(len(own), -np.inf)),
    }
    inside = {name: each.hold(each.reach) for name, each in intervals.items()}
    ends = [each.leave_out(each.reach) for each in intervals.values()]
    low, high = (
        np.log(np.exp(ttft[own] + ends[0][at]) + np.exp(tpot[own] + ends[1][at]) * (find_outputs(rows)[own] - 1))
        for at in (0, 1)
    )
    inside["e2e_s"] = (low <= measured["e2e_s"][own]) & (measured["e2e_s"][own] <= high)
    names = ("tpot_s", "ttft_s", "e2e_s")
    print(f"\n## {title}\n\n| group | rows | TPOT | TTFT | end to end | inside: TPOT | TTFT | end to end |")
    print("|---|---|---|---|---|---|---|---|")

    def put(word: str, many: int, cells: list[str]) -> None:
        print(f"| {word} | {many} | {' | '.join(cells)} |")

    medians = {name: [] for name in off}
    for group in sorted(set(groups)):
        at = groups == group
        for name in names:
            medians[name].append(float(np.median(off[name][at])))
        cells = [f"{100 * medians[name][-1]:.1f} %" for name in names]
        put(group, at.sum(), cells + [f"{100 * inside[name][at].mean():.0f} %" for name in names])
    means = {name: np.mean([off[name][groups == group].mean() for group in set(groups)]) for name in off}
    summary = {
        "median of all rows": {name: np.median(each) for name, each in off.items()},
        "mean of the groups' medians": {name: np.mean(each) for name, each in medians.items()},
        "mean of the groups' mean errors": means,
    }
    for word, found in summary.items():
        is_first = word == "median of all rows"
        shares = [f"**{100 * inside[name].mean():.0f} %**" if is_first else "" for name in names]
        put(f"**{word}**", len(own), [f"**{100 * found[name]:.1f} %**" for name in names] + shares)
    return {key: ends for name, each in intervals.items() for key, ends in each.to_dict(name).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--write", action="store_true", help="write model_specs/serving.json")
    given = parser.parse_args()
    rows = Rows(given.folder)
    effects = rows.fit(np.arange(len(rows.rows)))
    ttft, tpot, _ = rows.predict(effects, np.arange(len(rows.rows)))
    intervals = {"pairing": show("In the fit", rows, ttft, tpot)}
    names = {
        "engine and GPU": ("A pairing of model, GPU and engine that the fit has not seen", rows.groups),
        "model": ("A model that the fit has not seen", np.array([row["model"] for row in rows.rows])),
        "engine": ("A GPU that the fit has not seen", np.array([row["device"] for row in rows.rows])),
    }
    for evidence, (title, keys) in names.items():
        intervals[evidence] = show(title, rows, *rows.leave_out(keys, effects))
    # Nothing measured: twice the width, in logarithms, of a GPU never seen.
    intervals["data sheet"] = {
        name: [round(low**2, 3), round(high**2, 3)] for name, (low, high) in intervals["engine"].items()
    }
    intervals.pop("model")
    if given.write:
        data = {
            "schema": 1,
            "provenance": {
                "source": "ai-dynamo/aiconfigurator: systems/silicon_sample.csv, which copies "
                "SemiAnalysisAI/InferenceX; ML.ENERGY leaderboard data of 2026-02",
                "licence": "Apache-2.0", "made_by": "python benchmarks/serving_fit.py FOLDER --write",
                "rows": len(rows.rows),
            },
            "classes": list(CLASSES), "prior": [PRIOR[name] for name in CLASSES], "families": FAMILIES,
            "generations": GENERATIONS,
            "effects": {part: [round(float(value), 4) for value in effects[at]] for at, part in enumerate(rows.parts)},
            "pairings": sorted({f"{row['model']} · {row['device']} · {row['engine'].partition('@')[0]}"
                                for row in rows.rows[: rows.latency]}),
            "intervals": intervals, "streamed_tokens_per_s": STREAMED,
        }  # fmt: skip
        path = os.path.join(os.path.dirname(__file__), "..", "model_specs", "serving.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, ensure_ascii=False)
            file.write("\n")


if __name__ == "__main__":
    main()
