"""Published serving rows as questions: what each asks, and what was measured."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from typing import Any

# Names in the rows -> presets.
MODELS = {
    "DeepSeek-R1": "deepseek-r1", "Kimi-K2.5": "kimi-k2.5", "Llama-3.1-8B": "llama-3.1-8b",
    "MiniMax-M2.5": "minimax-m2", "Qwen3-235B-A22B": "qwen3-235b-a22b", "Qwen3-32B": "qwen3-32b",
    "Qwen3.5-397B-A17B": "qwen3.5-397b-a17b", "gpt-oss-120b": "gpt-oss-120b",
}  # fmt: skip


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Rows of serving-latency.csv.gz without speculation, with typed values."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["spec"] != "none":
                continue
            # vLLM takes the cache's format from NVIDIA's checkpoints; in bf16 these caches were too small.
            if row["engine"] == "vllm" and row["weights_format"] == "nvfp4":
                row["kv_format"] = ""
            yield {
                "model": MODELS[row["model"]], "weights": row["weights_format"], "kv_cache": row["kv_format"] or None,
                "device": row["device"], "engine": f"{row['engine']}@{row['engine_version']}".rstrip("@"),
                "tp": int(row["tp"]), "dp": int(row["dp"]), "ep": int(row["ep"]),
                "input_len": int(row["input_tokens"]), "output_len": int(row["output_tokens"]),
                "concurrency": int(row["concurrency"]),
                "max_batched_tokens": int(row["max_batched_tokens"]) if row["max_batched_tokens"] else None,
                "max_seqs": int(row["max_seqs"]) if row["max_seqs"] else None,
                "memory_fraction": float(row["memory_fraction"]) if row["memory_fraction"] else None,
                "interval": int(row["recv_interval"]) if row["recv_interval"] else None,
                "benchmark": row["benchmark"],
                # Not published: their times say that prompts and decodes shared steps, as with --enable-mixed-chunk.
                "mixes": row["engine_version"] == "0.5.6.post2" and row["benchmark"] == "aiperf",
                "warmup": row["warmup"] == "yes",
                "ttft_s": float(row["ttft_ms"]) / 1e3, "tpot_s": float(row["tpot_ms"]) / 1e3, "id": row["source"],
                "group": f"{row['model']} · {row['device']} · {row['engine']}",
            }  # fmt: skip
