"""State-space models against witnesses without our formulas: scalar loops that give HF's outputs, and fvcore."""

from __future__ import annotations

from math import exp
from typing import Any

import pytest
import torch
from tiers import mark_heavy

from flopcalc.api import bind
from flopcalc.core.workload.workload import make_workload
from flopcalc.measure.counters import fvcore_counter
from flopcalc.measure.hf.examples import find_example
from flopcalc.measure.hf.models import build_model

Tensor = Any
CHUNK = 4
LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 11]


def row(config: dict[str, Any], path: str, convention: str, length: int) -> int:
    """Our forward FLOPs of one module, for one sequence."""
    estimator = bind(config, convention=convention, attention_kernel="eager")
    estimate = estimator.estimate(make_workload(1, length, phase="forward"))
    return next(entry.forward for entry in estimate.by_module(per_layer=True) if entry.path == path)


class Loops:
    """Products as scalar loops: every multiply-add that a matrix product would hold is counted here."""

    def __init__(self) -> None:
        self.multiply_adds = 0

    def dot(self, left: list[float], right: list[float]) -> float:
        assert len(left) == len(right)
        total = 0.0
        for a, b in zip(left, right, strict=True):
            total += a * b
            self.multiply_adds += 1
        return total

    def add_outer(self, state: list[list[float]], left: list[float], right: list[float]) -> None:
        """state += left · rightᵀ: one multiply-add per element."""
        for i, a in enumerate(left):
            for j, b in enumerate(right):
                state[i][j] += a * b
                self.multiply_adds += 1


# --- Mamba -------------------------------------------------------------------------------------------------------


def test_of_mambas_scan_only_the_readout_is_a_product() -> None:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    torch.manual_seed(0)
    inner, state, length = 6, 5, 7
    x, dt = torch.randn(1, inner, length), torch.rand(1, inner, length)
    a = -torch.rand(inner, state)
    b, c = torch.randn(1, state, length), torch.randn(1, state, length)
    loops = Loops()
    h = [[0.0] * state for _ in range(inner)]
    out = torch.zeros(1, inner, length)
    for t in range(length):
        for i in range(inner):
            for s in range(state):  # elementwise: each of the state's elements by itself
                h[i][s] = h[i][s] * exp(dt[0, i, t] * a[i, s]) + float(dt[0, i, t] * b[0, s, t] * x[0, i, t])
            out[0, i, t] = loops.dot(h[i], c[0, :, t].tolist())
    torch.testing.assert_close(mamba_selective_scan(x, dt, a, b, c), out)

    config = {
        "model_type": "mamba", "hidden_size": 3, "expand": 2, "num_hidden_layers": 1, "vocab_size": 9,
        "state_size": state, "conv_kernel": 4, "time_step_rank": 2,
    }  # fmt: skip
    step = 2 * 2 * inner * length  # dt_proj, which the mixer multiplies by too
    for convention, positions in (("full", length + 3), ("model", length)):
        convolution = 2 * 4 * inner * positions
        assert row(config, "backbone.layers.0.mixer", convention, length) == (
            2 * loops.multiply_adds + step + convolution
        )


@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_the_short_convolution_runs_over_its_padding(length: int) -> None:
    from transformers.models.mamba.modeling_mamba import causal_conv1d_fn

    torch.manual_seed(0)
    channels, kernel = 3, 4
    x, weight = torch.randn(1, channels, length), torch.randn(channels, kernel)
    loops = Loops()
    padded = torch.nn.functional.pad(x, (kernel - 1, kernel - 1))
    out = [
        [loops.dot(padded[0, i, t : t + kernel].tolist(), weight[i].tolist()) for t in range(length + kernel - 1)]
        for i in range(channels)
    ]
    torch.testing.assert_close(causal_conv1d_fn(x, weight), torch.tensor(out)[None, :, :length])
    assert loops.multiply_adds == kernel * channels * (length + kernel - 1)


# --- Mamba-2 -----------------------------------------------------------------------------------------------------


def scan_as_hf(loops: Loops, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """What HF's fallback executes: padded chunks, every pair, scores per head, every pair of chunk states."""
    length, heads, width = x.shape
    state, share = b.shape[-1], heads // b.shape[1]
    chunks = -(-length // CHUNK)
    pad = chunks * CHUNK - length
    x, dt, b, c = (torch.cat([v, v.new_zeros(pad, *v.shape[1:])]) for v in (x, dt, b, c))
    out = torch.zeros(chunks * CHUNK, heads, width)
    for h in range(heads):
        log_decay = (a[h] * dt[:, h]).tolist()
        scaled = (x[:, h] * dt[:, h, None]).tolist()
        keys, queries = b[:, h // share].tolist(), c[:, h // share].tolist()
        states = [[[0.0] * state for _ in range(width)] for _ in range(chunks + 1)]  # the first is the empty one
        for z in range(chunks):
            at = range(z * CHUNK, (z + 1) * CHUNK)
            for t in at:
                mixed = []
                for s in at:
                    score = loops.dot(queries[t], keys[s])
                    mixed.append(score * exp(sum(log_decay[s + 1 : t + 1])) if s <= t else 0.0)
                for p in range(width):
                    out[t, h, p] += loops.dot(mixed, [scaled[s][p] for s in at])
            for t in at:
                left = exp(sum(log_decay[t + 1 : (z + 1) * CHUNK]))
                loops.add_outer(states[z + 1], scaled[t], [key * left for key in keys[t]])
        starts = []
        for z in range(chunks + 1):  # of every pair of chunks, those that come later weigh nothing
            weights = [exp(sum(log_decay[y * CHUNK : z * CHUNK])) if y <= z else 0.0 for y in range(chunks + 1)]
            starts.append(
                [
                    [loops.dot(weights, [states[y][p][n] for y in range(chunks + 1)]) for n in range(state)]
                    for p in range(width)
                ]
            )
        for t in range(chunks * CHUNK):
            left = exp(sum(log_decay[t // CHUNK * CHUNK : t + 1]))
            for p in range(width):
                out[t, h, p] += loops.dot(queries[t], starts[t // CHUNK][p]) * left
    return out[:length]


def scan_as_needed(loops: Loops, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The same output from causal pairs, scores per group, real tokens, and states handed on elementwise."""
    length, heads, width = x.shape
    groups, state = b.shape[1:]
    out = torch.zeros(length, heads, width)
    starts = [[[0.0] * state for _ in range(width)] for _ in range(heads)]
    for start in range(0, length, CHUNK):
        at = range(start, min(start + CHUNK, length))
        scores = [
            {(t, s): loops.dot(c[t, g].tolist(), b[s, g].tolist()) for t in at for s in at if s <= t}
            for g in range(groups)
        ]
        for h in range(heads):
            g = h // (heads // groups)
            log_decay = (a[h] * dt[:, h]).tolist()
            scaled = (x[:, h] * dt[:, h, None]).tolist()
            total = exp(sum(log_decay[at.start : at.stop]))
            following = [[value * total for value in line] for line in starts[h]]
            for t in at:
                mixed = [scores[g][t, s] * exp(sum(log_decay[s + 1 : t + 1])) for s in at if s <= t]
                since = exp(sum(log_decay[at.start : t + 1]))
                for p in range(width):
                    out[t, h, p] = loops.dot(mixed, [scaled[s][p] for s in at if s <= t])
                    out[t, h, p] += loops.dot(c[t, g].tolist(), starts[h][p]) * since
                left = exp(sum(log_decay[t + 1 : at.stop]))
                loops.add_outer(following, scaled[t], [value * left for value in b[t, g].tolist()])
            starts[h] = following
    return out


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("convention", "scan"), [("full", scan_as_hf), ("model", scan_as_needed)])
def test_mamba2s_chunks_are_these_loops(convention: str, scan: Any, length: int) -> None:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    torch.manual_seed(0)
    heads, groups, width, state, kernel = 4, 2, 3, 5, 4
    x, dt = torch.randn(1, length, heads, width), torch.rand(1, length, heads)
    a = -torch.rand(heads)
    b, c = torch.randn(1, length, groups, state), torch.randn(1, length, groups, state)
    loops = Loops()
    out = scan(loops, x[0], dt[0], a, b[0], c[0])
    torch.testing.assert_close(mamba2_chunk_scan(x, dt, a, b, c, CHUNK)[0], out, rtol=1e-4, atol=1e-4)

    config = {
        "model_type": "mamba2", "hidden_size": 6, "expand": 2, "num_hidden_layers": 1, "vocab_size": 9,
        "num_heads": heads, "head_dim": width, "n_groups": groups, "state_size": state, "conv_kernel": kernel,
        "chunk_size": CHUNK,
    }  # fmt: skip
    channels = heads * width + 2 * groups * state
    convolution = 2 * kernel * channels * (length + (kernel - 1 if convention == "full" else 0))
    assert row(config, "backbone.layers.0.mixer", convention, length) == 2 * loops.multiply_adds + convolution


# --- xLSTM -------------------------------------------------------------------------------------------------------


def mlstm_by_loops(loops: Loops, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, every_pair: bool) -> Tensor:
    """One head: whole chunks, then the tokens left over one by one. Without the running maximum, which cancels out."""
    length, width = v.shape
    forget = torch.nn.functional.logsigmoid(f).tolist()
    queries, keys, values = (q * q.shape[-1] ** -0.5).tolist(), k.tolist(), v.tolist()
    inputs = [exp(value) for value in i.tolist()]
    out = torch.zeros(length, width)
    cell = [[0.0] * len(keys[0]) for _ in range(width)]
    norm = [0.0] * len(keys[0])
    whole = length // CHUNK * CHUNK
    blocks = [range(start, start + CHUNK) for start in range(0, whole, CHUNK)]
    blocks += [range(t, t + 1) for t in range(whole, length)]
    for at in blocks:
        is_step = at.start >= whole
        total = exp(sum(forget[at.start : at.stop]))
        new_cell = [[value * total for value in line] for line in cell]
        new_norm = [value * total for value in norm]
        for t in at:
            left = inputs[t] * exp(sum(forget[t + 1 : at.stop]))
            loops.add_outer(new_cell, values[t], [key * left for key in keys[t]])
            new_norm = [value + key * left for value, key in zip(new_norm, keys[t], strict=True)]
        if is_step:  # reads the state that it has just written
            (t,) = at
            numerator = [loops.dot(queries[t], line) for line in new_cell]
            denominator = loops.dot(queries[t], new_norm)
            out[t] = torch.tensor(numerator) / max(abs(denominator), 1.0)
        for t in at if not is_step else ():
            pairs = at if every_pair else range(at.start, t + 1)
            scores = [
                loops.dot(queries[t], keys[s]) * (exp(sum(forget[s + 1 : t + 1])) * inputs[s] if s <= t else 0.0)
                for s in pairs
            ]
            since = exp(sum(forget[at.start : t + 1]))
            numerator = [
                loops.dot(queries[t], cell[p]) * since + loops.dot(scores, [values[s][p] for s in pairs])
                for p in range(width)
            ]
            denominator = loops.dot(queries[t], norm) * since + sum(scores)
            out[t] = torch.tensor(numerator) / max(abs(denominator), 1.0)
        cell, norm = new_cell, new_norm
    return out


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("convention", ["full", "model"])
def test_xlstms_chunks_and_steps_are_these_loops(convention: str, length: int) -> None:
    from transformers import xLSTMConfig
    from transformers.models.xlstm.modeling_xlstm import xLSTMBackend

    torch.manual_seed(0)
    heads, qk, width = 2, 3, 5
    keys = {
        "hidden_size": 8, "qk_dim_factor": qk * heads / 8, "v_dim_factor": width * heads / 8, "num_heads": heads,
        "num_hidden_layers": 1, "vocab_size": 9, "chunk_size": CHUNK,
    }  # fmt: skip
    q, k, v = torch.randn(1, heads, length, qk), torch.randn(1, heads, length, qk), torch.randn(1, heads, length, width)
    i, f = torch.randn(1, heads, length), torch.randn(1, heads, length)
    out, _ = xLSTMBackend(xLSTMConfig(**keys, eps=0.0))(q, k, v, i, f)
    loops = Loops()
    for head in range(heads):
        found = mlstm_by_loops(loops, q[0, head], k[0, head], v[0, head], i[0, head], f[0, head], convention == "full")
        torch.testing.assert_close(out[0, head], found, rtol=1e-4, atol=1e-4)
    path = "backbone.blocks.0.mlstm_layer.mlstm_backend"
    assert row({"model_type": "xlstm", **keys}, path, convention, length) == 2 * loops.multiply_adds


# --- RecurrentGemma ----------------------------------------------------------------------------------------------


def test_recurrent_gemmas_gates_are_a_matrix_per_head() -> None:
    from transformers import RecurrentGemmaConfig
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    torch.manual_seed(0)
    heads, width, length = 3, 4, 5
    keys = {
        "hidden_size": 6, "num_attention_heads": heads, "lru_width": heads * width, "num_hidden_layers": 1,
        "intermediate_size": 8, "vocab_size": 9, "block_types": ["recurrent"],
    }  # fmt: skip
    module = RecurrentGemmaRglru(RecurrentGemmaConfig(**keys, pad_token_id=0))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter.requires_grad_(False))
    x = torch.randn(1, length, heads * width)
    loops = Loops()
    gates = []
    for weight, bias in (
        (module.input_gate_weight, module.input_gate_bias),
        (module.recurrent_gate_weight, module.recurrent_gate_bias),
    ):
        gate = [
            [
                loops.dot(x[0, t, h * width : (h + 1) * width].tolist(), weight[h, :, j].tolist()) + float(bias[h, j])
                for h in range(heads)
                for j in range(width)
            ]
            for t in range(length)
        ]
        gates.append(torch.sigmoid(torch.tensor(gate)))
    decay = torch.exp(-8 * gates[1] * torch.nn.functional.softplus(module.recurrent_param))
    state, out = torch.zeros(heads * width), []
    for t in range(length):  # elementwise
        scale = torch.sqrt(1 - decay[t] ** 2) if t else 1.0
        state = (decay[t] if t else 0.0) * state + x[0, t] * gates[0][t] * scale
        out.append(state)
    torch.testing.assert_close(module(x, torch.arange(length)[None])[0], torch.stack(out), rtol=1e-4, atol=1e-4)
    config = {"model_type": "recurrent_gemma", **keys}
    for convention in ("full", "model"):
        found = row(config, "model.layers.0.temporal_block.rg_lru", convention, length)
        assert found == 2 * loops.multiply_adds


# --- Whole models ------------------------------------------------------------------------------------------------

# fvcore lacks grouped products (experts) and baddbmm (recurrent_gemma's gates), and rounds einsum to four digits.
SEEN_BY_FVCORE = [
    ("mamba", 0), ("mamba", 1), ("falcon_mamba", 0), ("falcon_mamba", 1), ("mamba2", 0), ("bamba", 0),
    ("falcon_h1", 0), ("zamba2", 0), ("rwkv", 0), ("rwkv", 1), ("xlstm", 0), ("xlstm", 1),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "number"), mark_heavy(SEEN_BY_FVCORE, [("mamba2", 0), ("rwkv", 1)]))
def test_the_forward_pass_is_twice_fvcores(model_type: str, number: int) -> None:
    config = find_example(model_type).configs[number]
    model = build_model(config, architecture=bind(config).spec.architecture).eval()
    witnessed = fvcore_counter.count(model, {"input_ids": torch.full((1, 11), 5)}, "forward")
    estimator = bind(config, convention="full", attention_kernel="eager")
    assert estimator.estimate(make_workload(1, 11, phase="forward")).forward == witnessed.total
