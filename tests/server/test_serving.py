"""What a deployment holds, how its scheduler makes steps, and what `flopcalc serving` answers."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import flopcalc
from flopcalc.base.errors import FlopcalcError, WorkloadError
from flopcalc.cli import main
from flopcalc.cli.serving import serving as command
from flopcalc.core.estimate.inputs import Inputs
from flopcalc.hardware.devices import find_device
from flopcalc.report.serving import format_answer
from flopcalc.server.audit import check_rows
from flopcalc.server.engines import find_engine, read_flags
from flopcalc.server.fitted import find_weights
from flopcalc.server.kv import count_weights, find_room
from flopcalc.server.launch import read_launch, write_command
from flopcalc.server.schedule import Policy, Request, simulate
from flopcalc.server.served import ServedModel, read_media, read_model
from flopcalc.server.step import CLASSES, Deployment, count_distinct
from flopcalc.server.traffic import Lengths, Speculation, Traffic

_ASKED: dict[str, Any] = {"device": "h100", "tp": 1, "input_len": 1024, "output_len": 128, "concurrency": 8}


def _read(name: str, weights: str = "bf16", kv_cache: str = "bf16") -> ServedModel:
    return read_model(flopcalc.bind(name, weights=weights, kv_cache=kv_cache))


def test_layers_that_are_stored_in_different_formats() -> None:
    """A mix of GGUF stores half of the values and of the MLPs' outputs in Q6_K; a server holds what a file has."""
    model = _read("llama-3.1-8b", weights="q4_k_m")
    held = sum(each.layers * each.n * each.k * each.bytes for each in model.weights)
    found = flopcalc.estimate_flops("llama-3.1-8b", seq_len=8, weights="q4_k_m").weights
    blocks = sum(each.total_bytes for each in found if each.format != "fp32")
    assert held + model.embedding_bytes == blocks
    assert sum(each.layers for each in model.weights if each.name == "q6_k") == 2 * 16


# Bytes that one attention rank keeps of a token: layers x numbers x bytes; kv heads are copied where tp is larger.
@pytest.mark.parametrize(
    ("name", "kv_cache", "tp", "expected"),
    [
        ("llama-3.1-8b", "bf16", 1, 32 * 2 * 8 * 128 * 2),
        ("llama-3.1-8b", "bf16", 8, 32 * 2 * 1 * 128 * 2),
        ("llama-3.1-8b", "fp8", 16, 32 * 2 * 1 * 128),
        ("deepseek-r1", "fp8", 8, 61 * 576),  # latents lie on every rank
        ("gpt-oss-120b", "bf16", 1, 36 * 2 * 8 * 64 * 2),  # pages of windows count too
        ("qwen3.5-397b-a17b", "bf16", 1, 15 * 2 * 2 * 256 * 2),  # linear attention keeps states instead
    ],
)
def test_bytes_of_a_token(name: str, kv_cache: str, tp: int, expected: int) -> None:
    device = find_device("h200")
    room = find_room(_read(name, "fp8", kv_cache), Deployment(tp=tp), device, find_engine("vllm", device), 2048)
    assert room.bytes_per_token == expected


# What engines logged: vllm-project/vllm issues 45178 and 21348. The first does not say its memory fraction and cache
# format: those are assumed. SGLang's overhead and vLLM's
# sampler were set from the second, so those rows only guard against changes.
@pytest.mark.parametrize(
    ("name", "weights", "kv_cache", "engine", "device", "layout", "fraction", "logged"),
    [
        ("minimax-m2", "nvfp4", "fp8", "vllm@0.19", "b200", Deployment(dp=2, ep=2), 0.9, 769_888),
        ("qwen3-235b-a22b", "fp8-block", "bf16", "vllm@0.9.2", "h100", Deployment(tp=4), 0.9, 178_880),
        ("qwen3-235b-a22b", "fp8-block", "bf16", "sglang@0.4.9", "h100", Deployment(tp=4), 0.93, 367_404),
    ],
)
def test_cache_as_engines_log_it(
    name: str, weights: str, kv_cache: str, engine: str, device: str, layout: Deployment, fraction: float, logged: int
) -> None:  # fmt: skip
    found = find_device(device)
    chosen = find_engine(engine, found, layout.tp)._replace(memory_fraction=fraction)
    room = find_room(_read(name, weights, kv_cache), layout, found, chosen, 2048)
    assert room.tokens == pytest.approx(logged, rel=0.03)


@pytest.mark.parametrize(
    ("layout", "share"), [(Deployment(tp=8), 1.0), (Deployment(tp=8, ep=8), 1.0), (Deployment(tp=1, dp=8, ep=8), 1.2)]
)
def test_weights_of_a_rank(layout: Deployment, share: float) -> None:
    """Every rank of tensor parallel attention holds an eighth; with data parallel attention, all of the attention."""
    model = _read("deepseek-r1", "fp8-block")
    eighth = count_weights(model, Deployment()) / 8
    assert count_weights(model, layout) / eighth == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    ("engine", "device", "tokens", "seqs", "fraction"),
    [
        ("vllm@0.15.1", "h100", 8192, 1024, 0.9),
        ("vllm", "b200", 16384, 1024, 0.92),
        ("vllm@0.11.1", "a100-sxm-80gb", 2048, 256, 0.9),
        ("sglang@0.5.9", "b200", 16384, 2048, 0.858),
        ("trtllm@1.2.0rc6", "h200", 8192, 2048, 0.9),
        ("TensorRT-LLM@1.1.0rc5", "h200", 8192, 2048, 0.9),
    ],
)
def test_engine_defaults(engine: str, device: str, tokens: int, seqs: int, fraction: float) -> None:
    found = find_engine(engine, find_device(device))
    assert (found.max_batched_tokens, found.max_seqs, found.memory_fraction) == (tokens, seqs, fraction)


def test_flags_of_an_engine() -> None:
    engine = find_engine("vllm", find_device("h100"))
    found, notes = read_flags(engine, "--max-num-seqs 64 --gpu-memory-utilization=0.95 --enforce-eager -tp 2")
    assert found == {"max_seqs": "64", "memory_fraction": "0.95", "tp": "2", "rest": "--enforce-eager"}
    assert notes == ["engine_args: not read, only passed on: --enforce-eager"]


@pytest.mark.parametrize(("tokens", "expected"), [(1, 8.0), (2, 15.75), (1e9, 256.0)])
def test_distinct_experts(tokens: float, expected: float) -> None:
    assert count_distinct(256, 8, tokens) == pytest.approx(expected)


class _Clock:
    """A step takes one second, and a millisecond more for each token of a prompt."""

    zero = 0.0

    def find_shift(self, tokens: int) -> float:  # noqa: ARG002
        return 0.0

    def run(self, prompt: list[tuple[int, int]], decodes: int, keys: float) -> float:  # noqa: ARG002
        return 1.0 + sum(size for size, _ in prompt) / 1000

    def decode(self, decodes: int, keys: float, steps: int) -> float:  # noqa: ARG002
        return 1.0 * steps


# (time to first token, end to end) of each request, in seconds.
@pytest.mark.parametrize(
    ("policy", "requests", "slots", "expected"),
    [
        # Two that come at once: the second is read during the first one's step, then runs beside its decode.
        (Policy(4096, 8, 1e9), [Request(1000, 5)] * 2, 2, [(2.0, 7.0), (4.0, 8.0)]),
        # A prompt waits for three steps while another decodes.
        (Policy(4096, 8, 1e9, wait=3), [Request(1000, 5)] * 2, 2, [(2.0, 7.0), (7.0, 11.0)]),
        # Speculation gives two tokens a step.
        (Policy(4096, 8, 1e9, per_step=2.0), [Request(1000, 5)], 1, [(2.0, 4.0)]),
        # A step holds one prompt: the second runs beside the first one's decode.
        (Policy(1001, 8, 1e9, chunks=False), [Request(1000, 3)] * 2, 2, [(2.0, 5.0), (4.0, 6.0)]),
        # Decodes wait while prompts run.
        (Policy(1000, 8, 1e9, mixes=False), [Request(1000, 3)] * 2, 2, [(2.0, 6.0), (4.0, 6.0)]),
        # A prompt in three chunks.
        (Policy(400, 8, 1e9), [Request(1000, 2)], 1, [(4.0, 5.0)]),
        # One place: the second waits until the first has ended.
        (Policy(4096, 1, 1e9), [Request(1000, 3)] * 2, 2, [(2.0, 4.0), (6.0, 8.0)]),
        # The cache holds one request.
        (Policy(4096, 8, 1500, reserves=True), [Request(1000, 3)] * 2, 2, [(2.0, 4.0), (6.0, 8.0)]),
        # Of the prompt 900 tokens are cached.
        (Policy(4096, 8, 1e9), [Request(1000, 1, None, 900)], 1, [(1.1, 1.1)]),
        # The third comes when the first has ended, while the next step runs: it is in the step after that.
        (
            Policy(4096, 8, 1e9),
            [Request(1000, 3), Request(1000, 9), Request(1000, 2)],
            2,
            [(2.0, 5.0), (4.0, 13.0), (3.0, 4.0)],
        ),
        # Of three that come at once two are read by the end of the first step.
        (Policy(4096, 8, 1e9), [Request(1000, 1)] * 3, 3, [(2.0, 2.0), (4.0, 4.0), (6.0, 6.0)]),
        # Arrivals: the second comes while the first decodes.
        (Policy(4096, 8, 1e9), [Request(1000, 5, 0.0), Request(1000, 2, 2.5)], 0, [(2.0, 7.0), (2.5, 3.5)]),
    ],
)
def test_schedule(
    policy: Policy, requests: list[Request], slots: int, expected: list[tuple[float, float]]
) -> None:  # fmt: skip
    run = simulate(_Clock(), policy, requests, slots)  # type: ignore[arg-type]  # what simulate asks of StepCosts
    assert [pytest.approx(pair) for pair in expected] == [tuple(served) for served in run.requests]


def test_time_to_first_token_within_graphs() -> None:
    """A step of prompts that is a graph is launched at once: a larger graph makes the first token come sooner."""
    asked = {**_ASKED, "input_len": 1000}
    found = [flopcalc.serving("llama-3.1-8b", **asked, engine_args=f"--max-cudagraph-capture-size {size}")
             for size in (512, 2048)]  # fmt: skip
    assert found[1].times["ttft_s"].mid < 0.85 * found[0].times["ttft_s"].mid


def test_layout_of_attention_ranks() -> None:
    """SGLang counts the ranks of data parallel attention in --tp; vLLM spreads experts by a flag without a value."""
    asked: dict[str, Any] = {
        "device": "h200",
        "weights": "fp8-block",
        "input_len": 1024,
        "output_len": 64,
        "concurrency": 8,
    }
    sglang = flopcalc.serving(
        "deepseek-r1",
        **asked,
        engine="sglang",
        engine_args="--tp 8 --dp 8 --enable-dp-attention --chunked-prefill-size 32k",
    )
    vllm = flopcalc.serving("deepseek-r1", **asked, engine_args="-tp 8 --enable-expert-parallel")
    assert sglang.engine.max_batched_tokens == 4096  # of one rank
    assert "--chunked-prefill-size 32768" in sglang.command
    trtllm = flopcalc.serving("deepseek-r1", **asked, engine="trtllm", engine_args="--tp_size 8 --enable_attention_dp")
    assert [each.layout for each in (sglang, vllm, trtllm)] == [
        Deployment(tp=1, dp=8), Deployment(tp=8, ep=8), Deployment(tp=1, dp=8),
    ]  # fmt: skip


def test_tokens_per_second_of_a_rate() -> None:
    """A server that keeps up gives what is asked for; past that no more than is asked for."""
    asked: dict[str, Any] = {"device": "h100", "tp": 1, "input_len": 1024, "output_len": 128}
    light, heavy = (flopcalc.serving("llama-3.1-8b", **asked, rate=rate).times["tokens_per_s"] for rate in (2, 200))
    assert light.low == light.mid == light.high
    assert light.mid == pytest.approx(2 * 128, rel=0.1)
    assert heavy.low < heavy.mid < (heavy.high or 0) < 200 * 128


def test_energy_of_a_million_tokens() -> None:
    found = flopcalc.serving("llama-3.1-8b", **_ASKED)
    assert found.wh is not None
    seconds = 1e6 / found.times["tokens_per_s"].mid
    assert found.wh["per_million_output_tokens"] == pytest.approx(found.times["power_w"].mid * seconds / 3600)
    assert found.wh["per_million_input_tokens"] == pytest.approx(found.wh["per_million_output_tokens"] / 8)


def test_first_token_alone() -> None:
    """Without a second token, end to end is the first token, and has its interval."""
    found = flopcalc.serving("llama-3.1-8b", **{**_ASKED, "output_len": 1}).times
    assert found["e2e_s"] == pytest.approx(found["ttft_s"])


def test_line_of_waiting_requests() -> None:
    """Beyond what is simulated requests only wait: tokens per second stay, and the time in line grows with the load."""
    asked = {**_ASKED, "output_len": 32}
    few, many = (flopcalc.serving("llama-3.1-8b", **{**asked, "concurrency": load}).times for load in (4096, 40960))
    assert many["tokens_per_s"].mid == pytest.approx(few["tokens_per_s"].mid, rel=0.01)
    assert many["e2e_s"].mid == pytest.approx(10 * few["e2e_s"].mid, rel=0.01)


def test_answer() -> None:
    found = flopcalc.serving("llama-3.1-8b", **_ASKED).to_dict()
    assert found["fits"]
    assert found["gpus"] == 1
    assert found["evidence"] == "engine and GPU"
    for name in ("ttft_s", "tpot_s", "e2e_s", "tokens_per_s", "tokens_per_s_per_gpu", "power_w"):
        assert 0 < found[name]["low"] < found[name]["mid"] < found[name]["high"]
    mid = {name: found[name]["mid"] for name in ("ttft_s", "tpot_s", "e2e_s", "tokens_per_s")}
    assert mid["e2e_s"] == pytest.approx(mid["ttft_s"] + 127 * mid["tpot_s"])
    assert mid["tokens_per_s"] == pytest.approx(8 * 128 / mid["e2e_s"])
    assert mid["tpot_s"] > 16.06e9 / 3.35e12  # all weights are read once a step
    for values in found["percentiles"].values():
        assert list(values) == ["p50", "p90", "p95", "p99"]
        assert sorted(values.values()) == list(values.values())
    assert sum(found["time_shares"].values()) == pytest.approx(1)


def _mid(name: str, **changes: Any) -> float:
    value = flopcalc.serving("llama-3.1-8b", **{**_ASKED, **changes}).times[name].mid
    return float(value)


@pytest.mark.parametrize(
    ("name", "fewer", "more"),
    [
        ("tpot_s", {}, {"concurrency": 64}),
        ("tpot_s", {"tp": 4}, {}),
        ("tpot_s", {"weights": "fp8"}, {}),
        ("ttft_s", {}, {"input_len": 8192}),
        ("ttft_s", {"prefix_hit": "60%"}, {}),
        ("ttft_s", {"concurrency": None, "rate": 1}, {"concurrency": None, "rate": 20}),
        ("tokens_per_s", {}, {"concurrency": 64}),
    ],
)
def test_more_takes_longer(name: str, fewer: dict[str, Any], more: dict[str, Any]) -> None:
    assert _mid(name, **fewer) < _mid(name, **more)


def test_a_users_spec_without_heads_of_keys_gets_a_note(tmp_path: Path) -> None:
    """The KV cache depends on them."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    spec = tmp_path / "herring.toml"
    spec.write_text(text.partition("```toml herring.toml\n")[2].partition("```")[0].replace("kv_heads = 1, ", ""))
    config = {"model_type": "herring", "width": 512, "depth": 8, "heads": 8, "vocab_size": 32000}
    assert flopcalc.serving(config, spec=spec, **_ASKED).notes[1:3] == (
        "herring.toml says no kv_heads for attn: 1 were inferred from the widths of its projections; add kv_heads to "
        "the spec",
        "herring.toml says no split for attn.q, attn.kv, attn.out, mlp.up and 1 more; no gate for mlp.act: taken from "
        "the order of its ops; add what is wrong (docs/specs.md, Roles)",
    )


def test_too_much_load_has_no_upper_end() -> None:
    found = flopcalc.serving("llama-3.1-8b", **{**_ASKED, "concurrency": None, "rate": 500}).to_dict()
    assert found["ttft_s"]["high"] is None
    assert found["tpot_s"]["high"] is not None
    assert any("without bound" in note for note in found["notes"])


def test_one_token_has_no_time_between_tokens() -> None:
    found = flopcalc.serving("llama-3.1-8b", **{**_ASKED, "output_len": 1}).to_dict()
    assert found["tpot_s"] is None
    assert found["ttft_s"]["mid"] == found["e2e_s"]["mid"]


def test_what_does_not_fit() -> None:
    found = flopcalc.serving("llama-3.1-405b", **{**_ASKED, "tp": 8}).to_dict()
    assert not found["fits"]
    assert found["ttft_s"] is None
    assert found["smallest_layout"] == {"tp": 8, "dp": 1, "pp": 2, "ep": 1}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tp": 3}, "tp=3 does not divide the 32 heads of llama-3.1-8b"),
        ({"ep": 2}, "ep=2: llama-3.1-8b has no experts"),
        ({"engine": "vlm"}, "vllm"),
        ({"rate": 2}, "concurrency and rate each say the load: give one"),
        ({"output_len": None}, "serving needs output_len=N"),
        ({"memory_fraction": 1.5}, "memory_fraction is a share between 0 and 1"),
        ({"input_len": 200_000}, "more than the 131,072 positions"),
        ({"seq_len": 5}, "serving takes no seq_len"),
        ({"device": None}, "on which device"),
        ({"gpus": 4}, "gpus=4 is not tp · dp · pp = 1: give tp=4 or dp=4 alone"),
        ({"input_len": "8k..1k"}, "the first length is the smaller one"),
        ({"ttft": "2s@p94"}, "after @ comes p50, p90, p95 or p99"),
        ({"itl": "soon"}, "is not a time such as 2s or 30ms"),
        ({"speculative": "k=3"}, "write k=3,accept=0.7"),
        ({"speculative": "mtp,accept=0.7"}, "or mtp,accept=0.7 for a model with layers of multi-token prediction"),
        ({"prefix_hit": "2k"}, "is more than the 1,024 tokens of a prompt"),
        ({"disaggregate": "2x4"}, "write 2p4d"),
        ({"think": "5s"}, "give users=N"),
        ({"images": "640x480"}, "is a text model: it takes no images"),
        ({"max_pixels": "1M"}, "max_pixels needs images"),
        ({"engine_args": "--max-model-len 1024"}, "a request has 1,152 tokens: the engine refuses it"),
    ],
)
def test_bad_questions(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(FlopcalcError) as error:
        flopcalc.serving("llama-3.1-8b", **{**_ASKED, **changes})
    assert text in str(error.value)


def test_ranks_that_key_heads_do_not_divide() -> None:
    """28 heads are cut by 7, 4 key heads neither cut nor copied."""
    with pytest.raises(WorkloadError, match="tp=7 does not divide the 4 key heads of qwen2"):
        flopcalc.serving("qwen2.5-7b", **{**_ASKED, "tp": 7})


def test_a_gpu_without_bf16_computes_in_fp16() -> None:
    assert flopcalc.serving("llama-3.2-1b", **{**_ASKED, "device": "v100"}).times["tpot_s"].mid > 2.47e9 / 900e9


def test_weights_that_an_engine_quantizes_as_it_loads_them() -> None:
    """--quantization fp8 of a line is --weights fp8; a checkpoint that is quantized already stays as it is."""
    asked = [flopcalc.serving("qwen3-32b", **_ASKED, **more) for more in
             ({"engine_args": "--quantization fp8"}, {"weights": "FP8"}, {})]  # fmt: skip
    assert [found.room.weights for found in asked[:2]] == [asked[0].room.weights] * 2
    assert asked[0].room.weights < 0.6 * asked[2].room.weights
    assert all("--quantization fp8" in found.command for found in asked[:2])
    found = flopcalc.serving("Qwen/Qwen3-32B-AWQ", **_ASKED, engine_args="--quantization awq")
    assert "Qwen/Qwen3-32B-AWQ is counted as preset qwen3-32b (same layer sizes), AWQ in 4 bits" in str(found.notes)
    assert any(note.startswith("weights in awq, as published") for note in found.notes)


def test_images_are_part_of_a_prompt() -> None:
    with pytest.raises(WorkloadError, match="take 1,369 of the 1,024 tokens of a prompt, whose length includes them"):
        flopcalc.serving("qwen2.5-vl-7b", **_ASKED, images=[(1024, 1024)])


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("flux.1-dev", "no engine serves it"), ("t5-v1.1-xl", "is an encoder-decoder"),
        ("modernbert-base", "caches nothing"), ("convnext-tiny-224", "no engine serves it"),
    ],
)  # fmt: skip
def test_models_that_no_engine_serves(model: str, text: str) -> None:
    with pytest.raises(FlopcalcError, match=text):
        flopcalc.serving(model, device="h100", input_len=64, output_len=64)


@pytest.mark.parametrize(
    ("model", "engine", "device", "evidence"),
    [
        ("gpt-oss-120b", "vllm", "b200-sxm", "pairing"),
        ("llama-3.1-8b", "vllm", "b200-sxm", "engine and GPU"),
        ("llama-3.1-8b", "vllm", "gb300", "engine"),
        ("llama-3.1-8b", "vllm", "l40s", "data sheet"),
    ],
)
def test_evidence(model: str, engine: str, device: str, evidence: str) -> None:
    weights = find_weights(model, engine, "", device)
    assert weights.evidence == evidence
    assert len(weights.values) == len(CLASSES)


# Where requests wait, more of them at once cannot help.
@pytest.mark.parametrize(
    ("model", "changes", "advice"),
    [
        ("llama-3.1-8b", {"input_len": 60_000, "concurrency": 64},
         "requests wait: more GPUs, an fp8 cache or shorter requests let more run at once"),
        ("llama-3.1-8b", {"max_seqs": 4}, "requests wait: more GPUs or a larger max_seqs let more run at once"),
        ("llama-3.1-8b", {"device": "l4", "kv_cache": "fp8", "rate": 50, "concurrency": None},
         "requests wait: more GPUs or shorter requests let more run at once"),
        ("llama-3.1-8b", {"tp": 4, "concurrency": 1},
         "host and launches, 45% of a step: more requests at once, or fewer GPUs per replica, spread it over more "
         "tokens"),
    ],
)  # fmt: skip
def test_advice(model: str, changes: dict[str, Any], advice: str) -> None:
    assert flopcalc.serving(model, **{**_ASKED, **changes}).advice == advice


@pytest.mark.parametrize(("drafts", "accepted", "tokens"), [(3, 0.5, 1.875), (3, 1.0, 4.0), (1, 0.7, 1.7)])
def test_tokens_of_a_speculative_step(drafts: int, accepted: float, tokens: float) -> None:
    assert Speculation(drafts, accepted).tokens == pytest.approx(tokens)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm serve openai/gpt-oss-120b -tp 2 --max-num-seqs=64",
         {"engine": "vllm", "model": "openai/gpt-oss-120b", "engine_args": "-tp 2 --max-num-seqs=64"}),
        ("python -m sglang.launch_server --model-path m --tp 8",
         {"engine": "sglang", "model": "m", "engine_args": "--tp 8"}),
        ("A=1 trtllm-serve m --tp_size 4", {"engine": "trtllm", "model": "m", "engine_args": "--tp_size 4"}),
    ],
)  # fmt: skip
def test_launch_lines(line: str, expected: dict[str, str]) -> None:
    assert read_launch(line) == expected


@pytest.mark.parametrize(
    ("engine", "layout", "more", "expected"),
    [
        ("vllm@0.15", Deployment(tp=2, ep=2), {}, "vllm serve m --tensor-parallel-size 2 --max-num-batched-tokens 8192 "
         "--max-num-seqs 1024 --gpu-memory-utilization 0.9 --kv-cache-dtype fp8 --enable-expert-parallel"),
        ("sglang", Deployment(dp=4), {"quantization": "fp8"}, "python -m sglang.launch_server --model-path m --tp 4 "
         "--dp 4 --chunked-prefill-size 32768 --max-running-requests 8192 --mem-fraction-static 0.9 "
         "--kv-cache-dtype fp8_e4m3 --quantization fp8 --enable-dp-attention"),
        ("sglang", Deployment(tp=2, dp=4), {"has_experts": False, "rest": "--page-size 64"},  # copies of 2 GPUs
         "python -m sglang.launch_server --model-path m --tp 2 --dp 4 --chunked-prefill-size 8192 "
         "--max-running-requests 2048 --mem-fraction-static 0.9 --kv-cache-dtype fp8_e4m3 --page-size 64"),
        ("trtllm", Deployment(dp=8, ep=8), {"drafts": 2}, "trtllm-serve m --tp_size 8 --ep_size 8 "
         "--max_num_tokens 8192 --max_batch_size 2048 --kv_cache_free_gpu_memory_fraction 0.9 --kv_cache_dtype fp8 "
         "--enable_attention_dp "
         "--extra_llm_api_options <(echo '{speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 2}}')"),
    ],
)  # fmt: skip
def test_command_of_an_engine(engine: str, layout: Deployment, more: dict[str, Any], expected: str) -> None:
    found = find_engine(engine, find_device("h100"), layout.tp)._replace(memory_fraction=0.9)
    assert write_command("m", found, layout, True, **more) == expected


# Flags and words as the engines' own documentation has them: docs.vllm.ai (cli/serve, v0.19 and later),
# docs.sglang.io (server arguments; server_args.py), nvidia.github.io/TensorRT-LLM (commands/trtllm-serve, 1.3).
_DOCUMENTED = {
    "vllm": "--tensor-parallel-size --pipeline-parallel-size --data-parallel-size --enable-expert-parallel "
    "--max-model-len --max-num-batched-tokens --max-num-seqs --gpu-memory-utilization --kv-cache-dtype=fp8 "
    "--quantization=fp8,bitsandbytes --speculative-config",
    "sglang": "--model-path --tp --pp-size --dp --ep-size --enable-dp-attention --context-length "
    "--chunked-prefill-size --max-running-requests --mem-fraction-static --kv-cache-dtype=fp8_e4m3 "
    "--quantization=fp8 --speculative-algorithm=EAGLE --speculative-num-steps --speculative-eagle-topk "
    "--speculative-num-draft-tokens",
    "trtllm": "--tp_size --pp_size --ep_size --max_seq_len --max_num_tokens --max_batch_size --kv_cache_dtype=fp8 "
    "--kv_cache_free_gpu_memory_fraction --enable_attention_dp --extra_llm_api_options",
}


@pytest.mark.parametrize("engine", sorted(_DOCUMENTED))
@pytest.mark.parametrize("weights", ["fp8", "nf4"])
def test_start_lines_have_documented_flags_alone(engine: str, weights: str) -> None:
    known = {flag: words.split(",") if words else None for flag, _, words in
             (each.partition("=") for each in _DOCUMENTED[engine].split())}  # fmt: skip
    found = find_engine(engine, find_device("h100"))
    line = write_command("m", found, Deployment(2, 2, 2, 4), True, found.online.get(weights), 4096, drafts=1)
    words = shlex.split(line.replace("<(", "").replace(")", ""))
    flags = {word: words[at + 1 : at + 2] for at, word in enumerate(words) if word.startswith("--")}
    assert set(flags) <= set(known)
    assert all(value[0] in (known[flag] or value) for flag, value in flags.items() if value)
    assert len(flags) >= len(known) - (weights not in found.online)


# What a start line cannot say, and which kernels are slow, a note does.
@pytest.mark.parametrize(
    ("model", "changes", "note"),
    [
        ("llama-3.1-8b", {"speculative": "k=3,accept=0.8"}, "the start line names no draft model: add yours"),
        ("llama-3.1-8b", {"engine": "trtllm", "dp": 2}, "the start line is of one copy: start 2 of them"),
        ("llama-3.1-8b", {"disaggregate": "1p1d"}, "the start line is of one worker: add its role"),
        ("qwen3-30b-a3b", {"tp": 4, "ep": 2}, "vLLM spreads experts over all 4 ranks of tp · dp, or over none"),
        ("qwen3-30b-a3b", {"weights": "fp8", "device": "h100"}, "measured to be slow on this kind of GPU"),
    ],
)
def test_notes_on_start_lines(model: str, changes: dict[str, Any], note: str) -> None:
    assert any(note in each for each in flopcalc.serving(model, **{**_ASKED, **changes}).notes)


def test_users_who_think() -> None:
    """Those in flight are the users times the share of time that they wait."""
    found = flopcalc.serving("llama-3.1-8b", **{**_ASKED, "concurrency": None, "users": 100, "think": "10s"})
    waits = found.times["e2e_s"].mid
    assert found.traffic.concurrency == pytest.approx(100 * waits / (waits + 10), abs=1.5)


@pytest.mark.parametrize("objective", [{"ttft": "2s"}, {"itl": "30ms"}, {"ttft": "2s", "itl": "30ms"}])
def test_gpus_that_users_need(objective: dict[str, str]) -> None:
    """Dealt out over that many GPUs the users keep the objectives, over one fewer they do not."""
    asked = {**_ASKED, "input_len": 2048, "output_len": 512, "concurrency": None, "think": "20s", **objective}

    def judge(users: int) -> dict[str, Any]:
        found: dict[str, Any] = flopcalc.serving("llama-3.1-8b", **asked, users=users).to_dict()["objectives"]
        return found

    needed = judge(500)["gpus_needed"]
    assert needed > 1
    for gpus, is_met in ((needed, True), (needed - 1, False)):
        part = judge(-(-500 // gpus))
        assert all(part[name]["met"] for name in ("ttft_s", "itl_s") if name in part) == is_met
        assert (part["gpus_needed"] == 1) == is_met


# Format asked for -> format served, what the engine's line says of it, and the note.
@pytest.mark.parametrize(
    ("model", "engine", "weights", "served", "said", "note"),
    [
        ("deepseek-v3", "vllm", None, "fp8-block", "deepseek-ai/DeepSeek-V3 ", "weights in fp8-block, as published"),
        ("gpt-oss-120b", "trtllm", None, "mxfp4", "openai/gpt-oss-120b ", "weights in mxfp4, as published"),
        ("kimi-k2.5", "sglang", None, "int4", "moonshotai/Kimi-K2.5 ", "weights in int4, as published"),
        ("deepseek-v3", "vllm", "bf16", "bf16", "deepseek-ai/DeepSeek-V3 ", "start it with a checkpoint in bf16"),
        ("qwen3-32b", "vllm", None, "bf16", "Qwen/Qwen3-32B ", ""),
        ("qwen3-32b", "vllm", "fp8", "fp8", "--quantization fp8", ""),
        ("qwen3-32b", "vllm", "nf4", "nf4", "--quantization bitsandbytes", ""),
        ("qwen3-32b", "trtllm", "fp8", "fp8", "Qwen/Qwen3-32B ", "start it with a checkpoint in fp8"),
        ("qwen3-32b", "sglang", "nvfp4", "nvfp4", "Qwen/Qwen3-32B ", "start it with a checkpoint in nvfp4"),
        ("openai/gpt-oss-120b", "vllm", None, "mxfp4", "serve openai/gpt-oss-120b ", "as published"),
        ("Qwen/Qwen3-30B-A3B-FP8", "vllm", None, "fp8-block", "serve Qwen/Qwen3-30B-A3B-FP8 ", "weights in fp8-block"),
        ("nvidia/DeepSeek-R1-FP4", "trtllm", None, "nvfp4", "trtllm-serve nvidia/DeepSeek-R1-FP4 ", "weights in nvfp4"),
        ("Qwen/Qwen3-32B-AWQ", "sglang", None, "awq", "--model-path Qwen/Qwen3-32B-AWQ ", "weights in awq"),
    ],
)  # fmt: skip
def test_checkpoint_that_is_served(
    model: str, engine: str, weights: str | None, served: str, said: str, note: str
) -> None:
    asked = {**_ASKED, "device": "b200", "tp": 16, "concurrency": 2}
    found = flopcalc.serving(model, **asked, engine=engine, weights=weights)
    assert said in found.command
    assert any(note in each for each in found.notes) or not note
    assert any(each.startswith(("start it", "weights in")) for each in found.notes) == bool(note)
    held = flopcalc.serving(model, **asked, engine=engine, weights=served).room.weights
    assert found.room.weights == held


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),  # the model's own limit fits
        ({"engine_args": "--max-model-len 4096"}, "--max-model-len 4096"),
        ({"device": "l4"}, "--max-model-len 2048"),  # the cache holds less than the model's own limit
        ({"engine": "sglang", "engine_args": "--context-length=3000"}, "--context-length 3000"),
    ],
)
def test_longest_request_of_the_command(changes: dict[str, Any], said: str) -> None:
    asked = {**_ASKED, "input_len": 1500, **changes}
    found = flopcalc.serving("llama-3.1-8b", **asked)
    command = found.command
    assert said in command
    assert "engine_args" not in changes or found.longest == int(said.split()[-1])
    assert bool(said) == ("--max-model-len" in command or "--context-length" in command)


def test_objectives() -> None:
    found = flopcalc.serving("llama-3.1-8b", **{**_ASKED, "ttft": "500ms", "itl": "20ms@p50"}).to_dict()
    judged = found["objectives"]
    assert judged["most_load"] == min(judged["ttft_s"]["most_load"], judged["itl_s"]["most_load"]) > 8
    assert judged["itl_s"] == {**judged["itl_s"], "limit_s": 0.02, "at": "p50", "met": True}
    assert judged["gpus_needed"] == 1
    assert judged["goodput_tokens_per_s"] <= found["tokens_per_s"]["mid"] * (1 + 1e-9)


# p95 of all gaps keeps 60 ms, and few answers' own means do: one L4 does not do for these users.
@pytest.mark.parametrize(("itl", "is_met", "shown"), [("60ms", False, "37 users"), ("62ms", True, "1 GPU takes 4")])
def test_an_objective_is_met_by_the_measure_of_goodput(itl: str, is_met: bool, shown: str) -> None:
    found = flopcalc.serving("qwen3-8b", device="l4", kv_cache="fp8", weights="fp8", input_len=2048, output_len=500,
                             users=40, think="30s", itl=itl)  # fmt: skip
    judged = found.to_dict()["objectives"]
    assert (judged["itl_s"]["met"], judged["gpus_needed"]) == (is_met, 1 if is_met else 2)
    assert (judged["goodput_tokens_per_s"] >= 0.95 * found.times["tokens_per_s"].mid) is is_met
    assert judged["most_users"] == judged["itl_s"]["most_users"]
    text = " ".join(format_answer(found).split())
    assert shown in text
    assert "requests in flight" not in text.partition("objective")[2].partition("start it")[0]


@pytest.mark.parametrize("load", [{}, {"concurrency": None, "rate": 2}])
def test_an_objective_that_no_load_keeps(load: dict[str, Any]) -> None:
    judged = flopcalc.serving("llama-3.1-8b", **{**_ASKED, **load, "ttft": "1ms"}).to_dict()["objectives"]
    assert (judged["most_load"], judged["gpus_needed"], judged["goodput_tokens_per_s"]) == (0, None, 0)


@pytest.mark.parametrize(
    ("name", "fewer", "more"),
    [
        ("tpot_s", {"speculative": "k=3,accept=0.8"}, {}),
        ("tpot_s", {"disaggregate": "1p1d", "concurrency": 64}, {"concurrency": 64}),
        ("ttft_s", {"input_len": "256..1024"}, {}),
        ("ttft_s", {"prefix_hit": 512}, {}),
    ],
)
def test_what_shortens(name: str, fewer: dict[str, Any], more: dict[str, Any]) -> None:
    assert _mid(name, **fewer) < _mid(name, **more)


# Tokens of each prompt that the cache holds: a share is of each prompt, and the last token is always computed.
@pytest.mark.parametrize(
    ("hit", "size", "cached"), [(512, 2048, 512), (512, 100, 99), (0.6, 1000, 600), (1.0, 1000, 999), (0, 7, 0)]
)
def test_cached_tokens_of_a_prompt(hit: float, size: int, cached: int) -> None:
    lengths = Lengths(size, size)
    assert Traffic(lengths, lengths, 1, None, (), None, hit).count_cached(size) == cached


# A host that streams every token by itself may be the limit: 512 requests x 1,024 tokens at 9,000 a second.
# It is in the interval only where it was measured so.
@pytest.mark.parametrize(
    ("changes", "is_host", "is_wide"),
    [({}, True, False), ({"benchmark": "aiperf"}, True, True), ({"benchmark": "inferencex"}, False, False),
     ({"tp": 1}, False, False)],
)  # fmt: skip
def test_a_host_that_streams_slowly(changes: dict[str, Any], is_host: bool, is_wide: bool) -> None:
    load = {"input_len": 64, "output_len": 1024, "concurrency": 512 if changes != {"tp": 1} else 64}
    found = flopcalc.serving("llama-3.1-8b", **{**_ASKED, "tp": 8, "engine": "trtllm", **load, **changes})
    ttft, tpot = found.times["ttft_s"], found.times["tpot_s"]
    assert any("streams 9,000 tokens/s" in note for note in found.notes) is is_host
    assert ((ttft.high or 0) > 10 * ttft.mid) is is_wide
    if is_wide:
        assert ttft.high == pytest.approx(1024 * (512 / 9000 - tpot.mid))
        assert found.times["e2e_s"].high == pytest.approx((ttft.high or 0) + 1023 * (tpot.high or 0))


# Share of each prompt that the cache holds -> of the towers' work, what remains.
@pytest.mark.parametrize(("hit", "rest"), [(0, 1.0), (1024, 1.0), (0.75, 1024 / 1369)])
def test_work_of_towers(hit: float, rest: float) -> None:
    """A prompt of 4,096 tokens of which an image fills 1,369; what the cache holds of them needs no tower."""
    estimator, notes = flopcalc.bind("qwen2.5-vl-7b"), list[str]()
    computed = 4096 - (hit if hit > 1 else 4096 * hit)
    media = read_media(estimator, Inputs(image=((1024, 1024),)), 4096, computed, notes)
    counted = flopcalc.estimate_flops("qwen2.5-vl-7b", seq_len=4096, images=[(1024, 1024)], phase="forward")
    parts = counted.by_component()
    assert (media.products + media.attention) * computed == pytest.approx(
        rest * (parts["vision"].forward + parts["projector"].forward)
    )
    assert notes[-1] == "1,369 tokens of each prompt are images, videos or sound: input_len includes them"


def test_images() -> None:
    asked = {**_ASKED, "input_len": 2048}
    text, small, large = (
        flopcalc.serving("qwen2.5-vl-7b", **asked, images=images).to_dict()
        for images in (None, [(224, 224)], [(1024, 1024)])
    )
    assert text["ttft_s"]["mid"] < small["ttft_s"]["mid"] < large["ttft_s"]["mid"]
    assert text["kv_cache"] == large["kv_cache"]  # of prompts of one length
    assert 0 < small["time_shares"]["towers"] < large["time_shares"]["towers"]
    assert small["mfu"] < large["mfu"]
    assert (text["evidence"], large["evidence"]) == ("engine and GPU", "data sheet")
    assert large["ttft_s"]["high"] / large["ttft_s"]["mid"] > text["ttft_s"]["high"] / text["ttft_s"]["mid"]


def test_own_layers_draft() -> None:
    """DeepSeek-R1 has one layer of multi-token prediction."""
    asked = {"device": "b200", "tp": 8, "input_len": 1024, "output_len": 128}
    found = [
        flopcalc.serving("deepseek-r1", **asked, speculative=text).traffic.speculation
        for text in ("mtp,accept=0.8", "k=1,accept=0.8")
    ]
    assert found == [Speculation(1, 0.8, True), Speculation(1, 0.8)]


def test_separate_workers_count_as_gpus() -> None:
    found = flopcalc.serving("llama-3.1-8b", **{**_ASKED, "disaggregate": "2p4d"}).to_dict()
    assert found["gpus"] == 6
    assert found["tokens_per_s_per_gpu"]["mid"] == pytest.approx(found["tokens_per_s"]["mid"] / 6)


def test_audit(tmp_path: Path) -> None:
    """16 GB of weights cannot be read in a millisecond."""
    file = tmp_path / "rows.csv"
    head = "model,device,tp,input_tokens,output_tokens,concurrency,ttft_ms,tpot_ms"
    file.write_text(
        f"{head}\nllama-3.1-8b,h100,1,1024,128,1,50,1\nllama-3.1-8b,h100,1,1024,128,1,50,7\n", encoding="utf-8"
    )
    slow, fine = check_rows(str(file))
    assert slow["faults"] == ["TPOT 1.00 ms, but reading 14.1 GB takes 4.21 ms"]
    assert fine["faults"] == []
    shown = CliRunner().invoke(command, ["--check", str(file)])
    assert shown.output.splitlines()[0] == f"{file}: 2 rows, 1 marked"
    file.write_text(f"{head}\nno-such,h100,1,1024,128,1,50,1\n", encoding="utf-8")
    shown = CliRunner().invoke(command, ["--check", str(file)])
    assert shown.output.splitlines()[0] == f"{file}: 1 row, 0 marked, 1 not checked"
    file.write_text("model,device,gpus\nllama-3.1-8b,h100,1\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match="lacks tp, concurrency, input, output, tpot_ms; a row needs"):
        check_rows(str(file))


@pytest.mark.parametrize("model", ["whisper-large-v3", "flan-t5-xxl"])
def test_encoder_decoders_are_refused(model: str) -> None:
    with pytest.raises(WorkloadError, match=f"{model} is an encoder-decoder: serving takes decoders alone"):
        flopcalc.serving(model, device="h100", input_len=100, output_len=10, concurrency=1)


def test_an_objective_of_minutes_says_its_unit() -> None:
    with pytest.raises(WorkloadError, match="write its unit, 500ms or 500s"):
        flopcalc.serving("llama-3.1-8b", device="h100", input_len=100, output_len=10, concurrency=1, ttft="500")


def test_command_line(tmp_path: Path) -> None:
    file = tmp_path / "requests.csv"
    file.write_text("arrival_s,input,output\n0,512,16\n0.5,256,8\n", encoding="utf-8")
    shown = CliRunner().invoke(
        command, ["llama-3.1-8b", "--device", "h100", "--tp", "1", "--requests", str(file), "--json"]
    )
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["ttft_s"]["mid"] > 0
    curve = CliRunner().invoke(
        command, ["llama-3.1-8b", "--device", "h100", "--input-len", "1k", "--output-len", "64", "--concurrency", "1,4"]
    )
    page = CliRunner().invoke(
        command,
        ["--launch", "vllm serve llama-3.1-8b -tp 2", "--device", "h100", "--input-len", "64", "--output-len", "8",
         "--concurrency", "1,2", "--format", "html"],
    )  # fmt: skip
    assert "vLLM on 2 × NVIDIA H100" in page.output
    assert [line.split()[0] for line in curve.output.splitlines() if re.match(r" +\d+ ", line)] == ["1", "4"]


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["serving", "llama-3.1-8b", "--device", "h100", "--tp", "3", "--input-len", "8", "--output-len", "8"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "flopcalc: --tp 3 does not divide the 32 heads of llama-3.1-8b\n"


@pytest.mark.parametrize(
    ("loads", "shown"), [("4", [""]), ("1,4", ["--concurrency 1 (1 of 2)", "--concurrency 4 (2 of 2)", ""])]
)
def test_a_curve_shows_its_progress(loads: str, shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("flopcalc.cli.serving.show_progress", told.append)
    line = "llama-3.2-1b --device h100 --input-len 128 --output-len 16 --concurrency"
    assert CliRunner().invoke(command, [*line.split(), loads]).exit_code == 0
    assert told == shown


@pytest.mark.parametrize(("name", "is_said"), [("llama-3.1-8b", False), ("qwen2.5-vl-7b", True)])
def test_what_is_printed(name: str, is_said: bool) -> None:
    """A rate that is kept has no interval; money has two digits of cents; models with towers say what is left out."""
    found = flopcalc.serving(name, device="h100", tp=1, input_len=512, output_len=64, rate=2, itl="50ms")
    lines = format_answer(found).splitlines()
    rate = next(line for line in lines if line.startswith("tokens/s:"))
    assert rate == f"tokens/s: {found.times['tokens_per_s'].mid:,.0f}"
    assert any(re.match(r"cost: \$\d+\.\d\d per million", line) for line in lines)
    assert any("by each request's own mean" in line for line in lines)
    assert any("prompts are text alone" in note for note in found.notes) == is_said
