"""Linear attention by scalar arithmetic: loops over single numbers that count their own multiply-adds.

The loops use none of flopcalc's formulas and none of the operator counter's. What they compute must equal HF's
recurrence, token by token, so the products they form are enough; under `full` they form the padded squares of HF's
chunked code. Gradients are counted by walking the same numbers backwards.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiers import thin

from flopcalc.api import bind
from flopcalc.core.workload.workload import make_workload

CHUNK = 64
LENGTHS = (1, 13, 64, 65, pytest.param(130, marks=pytest.mark.heavy))


class Number:
    """A scalar that remembers the pairs it is a sum of products of, and what else it was made from."""

    def __init__(
        self,
        value: float,
        pairs: Sequence[tuple[Number, Number]] = (),
        others: Sequence[Number] = (),
        needs: bool = False,
    ) -> None:
        self.value: float = value + sum(a.value * b.value for a, b in pairs)
        self.pairs = pairs
        self.others = others
        self.needs: bool = needs or any(x.needs for pair in pairs for x in pair) or any(x.needs for x in others)
        self.is_live = False
        TAPE.append(self)


TAPE: list[Number] = []


def count(outputs: list[list[Number]]) -> tuple[int, int]:
    """Multiply-adds of the products on the tape, and of the gradients that the outputs owe."""
    for row in outputs:
        for number in row:
            number.is_live = True
    forward = backward = 0
    for number in reversed(TAPE):
        forward += len(number.pairs)
        if number.is_live:
            for pair in number.pairs:
                for operand in pair:
                    backward += operand.needs
                    operand.is_live |= operand.needs
            for other in number.others:
                other.is_live |= other.needs
    return forward, backward


def make(n: int, width: int) -> list[list[Number]]:
    return [[Number(random.gauss(0, 0.5), needs=True) for _ in range(width)] for _ in range(n)]


def scale(rows: Sequence[Number], factor: Number) -> list[Number]:
    return [Number(x.value * factor.value, (), (x, factor)) for x in rows]


def dot(a: Sequence[Number], b: Sequence[Number]) -> Number:
    return Number(0.0, tuple(zip(a, b, strict=True)))


def column(matrix: list[list[Number]], c: int) -> list[Number]:
    return [row[c] for row in matrix]


def exp(x: Number, y: Number | None = None) -> Number:
    """e to the x, or to x - y."""
    return Number(math.exp(x.value - (y.value if y else 0.0)), (), (x, y) if y else (x,))


def add(*parts: Number) -> Number:
    return Number(sum(part.value for part in parts), (), parts)


def less(a: Number, b: Number) -> Number:
    return Number(a.value - b.value, (), (a, b))


def silence(x: Number) -> Number:
    return Number(0.0, (), (x,))


def pad(rows: list[list[Number]], whole: bool) -> list[list[Number]]:
    extra = -len(rows) % CHUNK if whole else 0
    return rows + [[Number(0.0, needs=True) for _ in rows[0]] for _ in range(extra)]


def add_up(steps: list[Number]) -> list[Number]:
    sums: list[Number] = []
    for step in steps:
        sums.append(add(sums[-1], step) if sums else step)
    return sums


def run_gated(q: Any, k: Any, v: Any, g: Any, beta: Any, whole: bool) -> list[list[Number]]:
    """The gated delta rule in chunks: the triangular system by substitution, then a scan over the state."""
    q, k, v, g, beta = (pad(rows, whole) for rows in (q, k, v, g, beta))
    dk, dv = len(k[0]), len(v[0])
    state = [[Number(0.0) for _ in range(dv)] for _ in range(dk)]
    out: list[list[Number]] = []
    for start in range(0, len(q), CHUNK):
        stop = min(start + CHUNK, len(q))
        size = stop - start
        queries, keys = q[start:stop], k[start:stop]
        rates = [row[0] for row in beta[start:stop]]
        decay = add_up([row[0] for row in g[start:stop]])
        k_beta = [scale(row, rate) for row, rate in zip(keys, rates, strict=True)]
        v_beta = [scale(row, rate) for row, rate in zip(v[start:stop], rates, strict=True)]
        system, scores = [], []
        for i in range(size):
            # Under `full` the squares; needed are the entries below the diagonal, and those up to it.
            decays = [exp(decay[i], decay[j]) if j <= i else Number(0.0) for j in range(size)]
            system.append([scale([dot(k_beta[i], keys[j])], decays[j])[0] for j in range(size if whole else i)])
            scores.append([scale([dot(queries[i], keys[j])], decays[j])[0] for j in range(size if whole else i + 1)])
        right = [v_beta[i] + scale(k_beta[i], exp(decay[i])) for i in range(size)]
        solved: list[list[Number]] = []
        for i in range(size):
            # torch takes the gradient of the whole square, used or not.
            solved.append(
                [
                    add(less(right[i][c], dot(system[i][:i], column(solved, c))), *map(silence, system[i][i:]))
                    for c in range(dv + dk)
                ]
            )
        fresh = [[less(row[c], dot(row[dv:], column(state, c))) for c in range(dv)] for row in solved]
        for i in range(size):
            query = scale(queries[i], exp(decay[i]))
            seen = fresh if whole else fresh[: i + 1]
            out.append([add(dot(query, column(state, c)), dot(scores[i], column(seen, c))) for c in range(dv)])
        late = [scale(keys[i], exp(decay[-1], decay[i])) for i in range(size)]
        kept = exp(decay[-1])
        state = [
            [add(scale([state[r][c]], kept)[0], dot(column(late, r), column(fresh, c))) for c in range(dv)]
            for r in range(dk)
        ]
    return out


def run_channelwise(q: Any, k: Any, v: Any, g: Any, beta: Any, whole: bool) -> list[list[Number]]:
    """Kimi's: a decay per channel, so HF forms keys by keys and queries by keys elementwise, and the inverse too."""
    q, k, v, g, beta = (pad(rows, whole) for rows in (q, k, v, g, beta))
    dk, dv = len(k[0]), len(v[0])
    state = [[Number(0.0) for _ in range(dv)] for _ in range(dk)]
    out: list[list[Number]] = []
    for start in range(0, len(q), CHUNK):
        stop = min(start + CHUNK, len(q))
        size = stop - start
        queries, keys = q[start:stop], k[start:stop]
        rates = [row[0] for row in beta[start:stop]]
        decay = [list(row) for row in zip(*(add_up(column(g[start:stop], c)) for c in range(dk)), strict=True)]
        k_beta = [scale(row, rate) for row, rate in zip(keys, rates, strict=True)]
        v_beta = [scale(row, rate) for row, rate in zip(v[start:stop], rates, strict=True)]

        def decayed(a: Sequence[Number], i: int, j: int, keys: Any = keys, decay: Any = decay) -> Number:
            value = sum(
                a[c].value * keys[j][c].value * math.exp(decay[i][c].value - decay[j][c].value) for c in range(dk)
            )
            return Number(value, (), (*a, *keys[j], *decay[i], *decay[j]))

        inverse: list[list[Number]] = []
        for i in range(size):
            row = [decayed(k_beta[i], i, j) for j in range(i)]
            entries = []
            for j in range(i):
                value = -row[j].value - sum(row[m].value * inverse[m][j].value for m in range(j + 1, i))
                entries.append(Number(value, (), (*row, *(inverse[m][j] for m in range(j + 1, i)))))
            rest = [Number(0.0, needs=True) for _ in range(size - i - 1)] if whole else []
            inverse.append([*entries, Number(1.0, needs=True), *rest])
        right = [v_beta[i] + [scale([x], exp(decay[i][c]))[0] for c, x in enumerate(k_beta[i])] for i in range(size)]
        solved = [[dot(row, column(right[: len(row)], c)) for c in range(dv + dk)] for row in inverse]
        fresh = [[less(row[c], dot(row[dv:], column(state, c))) for c in range(dv)] for row in solved]
        for i in range(size):
            query = [scale([x], exp(decay[i][c]))[0] for c, x in enumerate(queries[i])]
            scores = [decayed(queries[i], i, j) for j in range(i + 1)]
            scores += [Number(0.0, needs=True) for _ in range(size - i - 1)] if whole else []
            seen = fresh[: len(scores)]
            out.append([add(dot(query, column(state, c)), dot(scores, column(seen, c))) for c in range(dv)])
        late = [[scale([x], exp(decay[-1][c], decay[i][c]))[0] for c, x in enumerate(keys[i])] for i in range(size)]
        state = [
            [add(scale([state[r][c]], exp(decay[-1][r]))[0], dot(column(late, r), column(fresh, c))) for c in range(dv)]
            for r in range(dk)
        ]
    return out


def run_lightning(q: Any, k: Any, v: Any, rate: float, block: int, whole: bool) -> list[list[Number]]:
    """Lightning attention: scores within a block, the sum of keys by values before it."""
    dk = len(k[0])
    state = [[Number(0.0) for _ in range(dk)] for _ in range(dk)]
    out: list[list[Number]] = []

    def faded(x: Number, steps: int) -> Number:
        return Number(x.value * math.exp(-rate * steps), (), (x,))

    for start in range(0, len(q), block):
        size = min(block, len(q) - start)
        keys, values = k[start : start + size], v[start : start + size]
        for i in range(size):
            query = q[start + i]
            seen = size if whole else i + 1
            scores = [dot(query, keys[j]) for j in range(seen)]
            scores = [faded(x, i - j) if j <= i else Number(0.0, (), (x,)) for j, x in enumerate(scores)]
            late = [faded(x, i + 1) for x in query]
            out.append([add(dot(late, column(state, c)), dot(scores, column(values[:seen], c))) for c in range(dk)])
        weighted = [[faded(x, size - 1 - i) for x in keys[i]] for i in range(size)]
        state = [
            [add(faded(state[r][c], size), dot(column(weighted, r), column(values, c))) for c in range(dk)]
            for r in range(dk)
        ]
    return out


# --- Against flopcalc and against HF's recurrences ----------------------------------------------------------------


def estimate(config: dict[str, Any], n: int, path: str, kernel: int, channels: int, convention: str) -> tuple[int, int]:
    """Forward and backward of one module without its short convolution."""
    rows = bind(config, convention=convention).estimate(make_workload(1, n)).by_module(per_layer=True)
    (row,) = [row for row in rows if row.path == path]
    positions = n if convention == "model" else n + kernel - 1
    conv = 2 * kernel * channels * positions if channels else 0
    return row.forward - conv, row.backward - 2 * conv


def tensor(rows: list[list[Number]]) -> Any:
    """(1, n, 1 head, width)."""
    return torch.tensor([[x.value for x in row] for row in rows], dtype=torch.float32)[None, :, None]


_TINY = {
    "hidden_size": 24,
    "intermediate_size": 41,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 101,
    "layer_types": ["linear_attention", "full_attention"],
}


@pytest.mark.parametrize("n", thin(LENGTHS, 2))
@pytest.mark.parametrize("whole", [False, True])
def test_gated_delta_rule(n: int, whole: bool) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    dk, dv = 2, 3
    random.seed(n)
    TAPE.clear()
    q, k, v, beta = make(n, dk), make(n, dk), make(n, dv), make(n, 1)
    g = [[Number(-random.random(), needs=True)] for _ in range(n)]
    out = run_gated(q, k, v, g, beta, whole)
    forward, backward = count(out)
    wanted, _ = torch_recurrent_gated_delta_rule(
        tensor(q), tensor(k), tensor(v), g=tensor(g)[..., 0], beta=tensor(beta)[..., 0]
    )
    torch.testing.assert_close(tensor(out)[:, :n] * dk**-0.5, wanted, rtol=1e-3, atol=1e-4)
    config = {
        **_TINY, "model_type": "qwen3_5_text", "linear_num_key_heads": 1, "linear_num_value_heads": 1,
        "linear_key_head_dim": dk, "linear_value_head_dim": dv, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    path, channels = "model.layers.0.linear_attn", 2 * dk + dv
    counted = estimate(config, n, path, 4, channels, "full" if whole else "model")
    if whole:  # solve_triangular's own gradient is the whole square too, of which substitution needs what is below
        chunks = -(-n // CHUNK)
        backward += chunks * (CHUNK * (CHUNK + 1) // 2) * (dk + dv)
    assert counted == (2 * forward, 2 * backward)


@pytest.mark.parametrize("n", thin(LENGTHS, 2))
@pytest.mark.parametrize("whole", [False, True])
def test_channelwise_delta_rule(n: int, whole: bool) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    dk = 2
    random.seed(n)
    TAPE.clear()
    q, k, v, beta = make(n, dk), make(n, dk), make(n, dk), make(n, 1)
    g = [[Number(-random.random() / 4, needs=True) for _ in range(dk)] for _ in range(n)]
    out = run_channelwise(q, k, v, g, beta, whole)
    forward, backward = count(out)
    wanted, _ = recurrent_kimi_delta_attention(
        tensor(q),
        tensor(k),
        tensor(v),
        g=tensor(g),
        beta=tensor(beta)[..., 0],
        initial_state=None,
        output_final_state=False,
    )
    torch.testing.assert_close(tensor(out)[:, :n] * dk**-0.5, wanted, rtol=1e-3, atol=1e-4)
    config = {
        **_TINY, "model_type": "kimi_linear", "linear_num_heads": 1, "linear_head_dim": dk, "kv_lora_rank": 4,
        "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_token": 2, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    convention = "full" if whole else "model"
    assert estimate(config, n, "model.layers.0.self_attn", 4, 3 * dk, convention) == (2 * forward, 2 * backward)


@pytest.mark.parametrize("n", [1, 4, 5, 6, 11, 20])
@pytest.mark.parametrize("whole", [False, True])
def test_lightning_attention(n: int, whole: bool) -> None:
    block, dk, rate = 5, 4, 0.1
    random.seed(n)
    TAPE.clear()
    q, k, v = make(n, dk), make(n, dk), make(n, dk)
    out = run_lightning(q, k, v, rate, block, whole)
    forward, backward = count(out)
    state = torch.zeros(dk, dk)
    for i in range(n):
        state = math.exp(-rate) * state + tensor(k)[0, i].T @ tensor(v)[0, i]
        torch.testing.assert_close(tensor(out)[0, i], tensor(q)[0, i] @ state, rtol=1e-3, atol=1e-4)
    config = {
        **_TINY, "model_type": "minimax", "block_size": block, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": dk, "num_local_experts": 2, "num_experts_per_tok": 1,
    }  # fmt: skip
    convention = "full" if whole else "model"
    assert estimate(config, n, "model.layers.0.self_attn", 0, 0, convention) == (2 * forward, 2 * backward)
