"""How unevenly a router with HF's random weights deals rows out to its experts: what grouped products pad follows.

Tokens of one sequence resemble one another: attention at random weights is nearly an average over the tokens before,
and an embedding is small beside it. Like tokens get the same experts, so some experts get many rows and others none.

`correlate` follows how alike two tokens of a sequence are, layer by layer, in the limit of wide layers: variance of the
residual stream at several positions, and covariance between two of them. A router's scores are then normal, with the
same correlations. `Deal` counts from them how many rows an expert gets. Sequences of a batch are independent.

Checked on the CPU with HF's random models of twelve types, and against the rows in benchmarks/results that routers
dealt on an H200 (tests/core/estimate/test_routing.py). A trained router is more even.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

from flopcalc.core.model.ops import Attend, Embed, Linear, Op, Stage, iterate
from flopcalc.core.workload.sums import Pairs

_NORMAL = NormalDist()
_EDGES = [(i / 8) ** 2 for i in range(9)]  # of the stretches that a sequence is cut into: short ones where it begins
_SHARES = [end - start for start, end in pairwise(_EDGES)]
_STRETCHES = range(len(_SHARES))
_MAX_LAYERS = 12  # tokens hardly grow more alike behind so many layers of experts
_FACTORS = (
    "initializer_range", "embedding_multiplier", "attention_multiplier", "residual_multiplier", "routed_scaling_factor",
)  # fmt: skip
_LEAST = 1e-6  # of such a factor; 1 over it is the most. Routers beyond are not modelled: zeros tie every expert
_SMOOTH = 8  # steps that a standard deviation spans from which a sum over steps is an integral
_WORDS = 4096  # that tokens are drawn from, evenly, as in what was measured
_ANGLES = 128  # steps of a table
_ROTATED = 0.4  # how alike rotary embeddings leave two keys (or queries) that are equal
_UNLIKE = 0.05  # what queries that differ weigh differently in keys that are alike: fitted on HF's models, on the CPU
_ROOT = math.sqrt(2)
_MANY = 800  # rows expected of an expert, from which it surely gets one
_EARLY = 2  # the stretch that speaks for the beginning of a sequence
_PARTS, _POINTS = 6, 48  # of a batch, and of the share of rows that a part may give to an expert


def _divide(step: float, most: int) -> list[tuple[float, float]]:
    """Values of a normal variable, and their weights."""
    weights = [math.exp(-((i * step) ** 2) / 2) for i in range(-most, most + 1)]
    return [(i * step, weight / sum(weights)) for i, weight in zip(range(-most, most + 1), weights, strict=True)]


_GRID, _COARSE, _FEW = _divide(1 / 4, 18), _divide(1.0, 3), _divide(1.0, 3)
_RANGE, _FINE = 5, 4  # of a table over scores: how far it goes, and its points for each 1

Matrix = tuple[tuple[float, ...], ...]


class Router(NamedTuple):
    """How a type of model weighs the experts that it chose."""

    scores: str  # softmax, sigmoid, or one: each has the weight 1
    is_normal: bool = True  # weights add up to 1, where no norm_topk_prob says otherwise
    has_key: bool = False  # norm_topk_prob is read
    scale: float = 1.0  # without a routed_scaling_factor


_PLAIN = Router("softmax")
_BY_KEY = Router("softmax", is_normal=False, has_key=True)
# Types whose weights and routers are known, and were checked: all are drawn with one standard deviation.
ROUTERS: dict[str, Router] = {
    "deepseek_v2": Router("softmax", is_normal=False),
    "deepseek_v3": Router("sigmoid", has_key=True, scale=2.5),
    "dots1": Router("sigmoid", is_normal=False, has_key=True),
    "glm4_moe": Router("sigmoid", has_key=True),
    "glm4_moe_lite": Router("sigmoid", has_key=True, scale=1.8),
    "gpt_oss": _PLAIN,
    "granitemoe": _PLAIN,
    "granitemoeshared": _PLAIN,
    "hunyuan_v1_moe": _PLAIN,
    "minimax_m2": Router("sigmoid"),
    "mixtral": _PLAIN,
    "olmoe": _BY_KEY,
    "phimoe": Router("one"),
    "qwen2_moe": _BY_KEY,
    "qwen3_moe": _BY_KEY,
}


class Mixer(NamedTuple):
    """An MLP or a layer's experts: variances of what its first product and its second one make of a normed input."""

    first: float
    second: float
    experts: int = 1
    active: int = 1
    is_shifted: bool = False  # 1 is added to what the gate is multiplied with


class Layer(NamedTuple):
    """What one layer adds to the residual stream."""

    added: float  # variance of attention that looks at one token
    scores: float  # variance of attention's scores
    window: int  # 0: none
    mixers: tuple[Mixer, ...]


class RandomModel(NamedTuple):
    """A model with HF's random weights, as far as its routers depend on it."""

    path: str  # of its layers
    embedded: float  # variance of its embeddings
    alike: float  # how often two tokens are the same word
    layers: tuple[Layer, ...]


# --- read -------------------------------------------------------------------------------------------------------------
def describe(config: Mapping[str, object], stages: Iterable[Stage]) -> RandomModel | None:
    """The model of a config and its operations; None where the type's routers are not known."""
    router = ROUTERS.get(str(config.get("model_type")))
    if any(not _is_usual(config.get(key)) for key in _FACTORS):
        return None
    layers = [stage for stage in stages if stage.repeated]
    embeds = [op for stage in stages if not stage.repeated for chain in stage.layers for op in iterate(chain)]
    words = [op.count for op in embeds if isinstance(op, Embed)]
    if router is None or len(layers) != 1 or layers[0].first or not words:
        return None
    drawn = _read(config, "initializer_range", 0.02) ** 2
    found = {id(chain): _describe_layer(list(iterate(chain)), config, router, drawn) for chain in layers[0].kinds}
    made = [found[id(chain)] for chain in layers[0].layers]
    embedded = drawn * _read(config, "embedding_multiplier", 1.0) ** 2
    known = tuple(layer for layer in made if layer is not None)
    return RandomModel(layers[0].path, embedded, 1 / min(words[0], _WORDS), known) if len(known) == len(made) else None


def _is_usual(value: object) -> bool:
    return not isinstance(value, (int, float)) or _LEAST <= abs(value) <= 1 / _LEAST


def _read(config: Mapping[str, object], key: str, default: float) -> float:
    value = config.get(key)
    return float(value) if isinstance(value, (int, float)) else default


def _describe_layer(ops: list[Op], config: Mapping[str, object], router: Router, drawn: float) -> Layer | None:
    calls = [at for at, op in enumerate(ops) if isinstance(op, Attend)]
    if len(calls) != 1:
        return None
    call = ops[calls[0]]
    before = [op for op in ops[: calls[0]] if isinstance(op, Linear)]
    behind = [op for op in ops[calls[0] :] if isinstance(op, Linear)]
    if not before or not behind or not isinstance(call, Attend) or not isinstance(call.rows, Pairs):
        return None
    kind = str(config["model_type"])
    scale = 1.0 if kind.startswith("granitemoe") else call.qk**-0.5
    scores = call.qk * _read(config, "attention_multiplier", scale) ** 2
    if not any(op.name.endswith(("q_norm", "query_layernorm")) for op in ops):
        queries = next((op for op in before if op.name.endswith("q_b_proj")), before[0])
        scores *= drawn * queries.n_in * drawn * before[-1].n_in
    mixers = _list_mixers(ops[ops.index(behind[0]) + 1 :], config, router, drawn)
    if not mixers or any(mixer.active == mixer.experts > 1 for mixer in mixers):  # nothing is chosen
        return None
    share = _read(config, "residual_multiplier", 1.0) ** 2
    return Layer(
        share * drawn * before[-1].n_in * drawn * behind[0].n_in, scores, call.rows.window,
        tuple(mixer._replace(second=share * mixer.second) for mixer in mixers),
    )  # fmt: skip


def _list_mixers(ops: list[Op], config: Mapping[str, object], router: Router, drawn: float) -> list[Mixer]:
    found: list[Mixer] = []
    first: Op | None = None
    is_active, spread = False, 0.0
    for op in ops:
        if not isinstance(op, Linear):
            is_active = is_active or (first is not None and op.name.endswith("act_fn"))
        elif op.part == "router" and op.n_out == 1 and found:  # a gate of what the shared expert says
            found[-1] = found[-1]._replace(second=found[-1].second * (0.25 + drawn * op.n_in / 16))
        elif op.part == "router":
            spread = drawn * op.n_in
        elif first is not None and is_active:
            second = drawn * op.n_in
            if op.copies > 1:
                second *= weigh(router, config, op.copies, op.active, spread)
            is_shifted = config["model_type"] == "gpt_oss"
            found.append(Mixer(drawn * first.n_in, second, op.copies, op.active, is_shifted))
            first, is_active = None, False
        elif first is None:
            first = op
    return found


def weigh(router: Router, config: Mapping[str, object], experts: int, active: int, spread: float) -> float:
    """The sum of the squares of the chosen experts' weights, where scores have such a variance."""
    if router.scores == "one":
        return float(active)
    scores = [math.sqrt(spread) * _NORMAL.inv_cdf(1 - (i + 0.5) / experts) for i in range(experts)]
    weights = [_squash(x) if router.scores == "sigmoid" else math.exp(x - scores[0]) for x in scores]
    is_normal = bool(config.get("norm_topk_prob", router.is_normal)) if router.has_key else router.is_normal
    total = sum(weights[:active]) if is_normal else sum(weights) if router.scores == "softmax" else 1.0
    scale = _read(config, "routed_scaling_factor", router.scale)
    return sum((weight * scale / total) ** 2 for weight in weights[:active])


# --- how alike tokens are ---------------------------------------------------------------------------------------------
def _squash(x: float) -> float:
    """The sigmoid function, which never overflows here."""
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _above(x: float) -> float:
    """How often a normal variable is larger."""
    return math.erfc(x / _ROOT) / 2


@lru_cache(maxsize=64)
def _table(share: float) -> list[float]:
    """How often two tokens both choose an expert that each chooses with this share, by their correlation's angle."""
    level = _NORMAL.inv_cdf(1 - share)
    step = math.pi / 2 / _ANGLES

    def slope(angle: float) -> float:
        return math.exp(-(level**2) / (1 + math.sin(angle))) / (2 * math.pi)

    found = [share**2]
    for i in range(_ANGLES):
        rise = slope(i * step) + 4 * slope((i + 0.5) * step) + slope((i + 1) * step)
        found.append(found[-1] + step * rise / 6)
    return found


def find_both(share: float, correlation: float) -> float:
    """How often two tokens of such a correlation both choose an expert."""
    table = _table(share)
    at = math.asin(min(1.0, max(0.0, correlation))) / (math.pi / 2) * _ANGLES
    i = min(_ANGLES - 1, int(at))
    return table[i] + (at - i) * (table[i + 1] - table[i])


def find_correlation(share: float, both: float) -> float:
    """The correlation of two tokens that so often both choose an expert."""
    table = _table(share)
    i = next((i for i in range(_ANGLES) if table[i + 1] > both), _ANGLES - 1)
    at = i + (both - table[i]) / (table[i + 1] - table[i])
    return math.sin(math.pi / 2 * min(1.0, max(0.0, at / _ANGLES)))


@lru_cache(maxsize=64)
def _expand(variance: float) -> tuple[float, float, float, float]:
    """How SiLU's output over normal inputs correlates: coefficients of the powers 0 to 3 of the inputs' correlation."""
    spread = math.sqrt(variance)
    outputs = [(z, weight, spread * z * _squash(spread * z)) for z, weight in _GRID]
    mean = sum(weight * y for _, weight, y in outputs)
    slope = sum(weight * y * z for z, weight, y in outputs)
    bend = sum(weight * y * (z * z - 1) for z, weight, y in outputs)
    rest = sum(weight * y * y for _, weight, y in outputs) - mean**2 - slope**2 - bend**2 / 2
    return mean**2, slope**2, bend**2 / 2, max(0.0, rest)


def _concentrate(variance: float, keys: float) -> float:
    """The sum of squared attention weights over so many keys, where scores have such a variance."""
    spread = math.sqrt(min(variance, 100.0))
    top = _NORMAL.inv_cdf(1 - 1 / (8 * max(1.0, keys)))  # the largest score that there is
    found = math.exp(spread**2) * _above(2 * spread - top) / (max(1.0, keys) * _above(spread - top) ** 2)
    return found / (1 + found)


@lru_cache(maxsize=64)
def correlate(model: RandomModel, length: int) -> tuple[tuple[Matrix, Matrix], ...]:
    """At each layer's routers: the correlation of two tokens, of one sequence and of two, by their stretches."""
    variance = [model.embedded] * len(_SHARES)
    covariance = [[model.embedded * model.alike] * len(_SHARES) for _ in _STRETCHES]
    across = [list(row) for row in covariance]
    seen = 0
    found: list[tuple[Matrix, Matrix]] = []
    for layer in model.layers:
        if seen == _MAX_LAYERS:
            break
        _attend(layer, length, variance, covariance, across)
        alike, apart = _norm(variance, covariance), _norm(variance, across)
        found.append((alike, apart))
        seen += any(mixer.experts > 1 for mixer in layer.mixers)
        for mixer in layer.mixers:
            _mix(mixer, alike, covariance)
            _mix(mixer, apart, across)
            added = mixer.second * (mixer.is_shifted + mixer.first) * sum(_expand(mixer.first))
            variance = [each + added for each in variance]
    return tuple(found)


def _norm(variance: list[float], covariance: list[list[float]]) -> Matrix:
    return tuple(tuple(covariance[i][j] / math.sqrt(variance[i] * variance[j]) for j in _STRETCHES) for i in _STRETCHES)


def _count_keys(length: int) -> list[tuple[float, float]]:
    """For each stretch: over how many keys one of its queries averages, and two of them share."""
    found = []
    for start, end in pairwise(_EDGES):
        low, high = max(0.5, start * length), end * length
        if high < low + 1:
            found.append((max(1.0, (low + high) / 2),) * 2)
            continue
        wide, ratio = high - low, math.log(high / low)
        found.append((wide / ratio, wide**2 / 2 / (wide - low * ratio)))
    return found


def _attend(
    layer: Layer, length: int, variance: list[float], covariance: list[list[float]], across: list[list[float]]
) -> None:
    """Attention: an average over the tokens before, of which two queries share some."""
    alike, keys = _norm(variance, covariance), _count_keys(length)
    window = layer.window if 0 < layer.window < length else 0
    middle = [(start + end) / 2 for start, end in pairwise(_EDGES)]
    apart = _norm(variance, across)
    past, other = (alike, apart) if window else (_average(alike, middle), _average(apart, middle))
    for i in _STRETCHES:
        for j in range(i + 1):
            own = 1 - past[j][j]
            shared, near = keys[i][1] if i == j else keys[i][0], 1.0
            if window:
                shared = min(shared, window)
                far = (middle[i] - middle[j]) * length
                near = min(1.0, window / (_SHARES[i] * length)) if i == j else max(0.0, 1 - far / window)
            same = own * near * _concentrate(layer.scores * max(0.0, alike[i][j]) * _ROTATED * own, shared)
            covariance[i][j] += layer.added * (past[i][j] + same)
            covariance[j][i] = covariance[i][j]
            across[i][j] += layer.added * other[i][j]
            across[j][i] = across[i][j]
        looked = min(keys[i][0], window) if window else keys[i][0]
        own = (1 - past[i][i]) * _concentrate(layer.scores * (1 - _ROTATED * past[i][i]), looked)
        unlike = _UNLIKE * min(2.0, layer.scores) * past[i][i] * (1 - alike[i][i])
        variance[i] += layer.added * (past[i][i] + own + unlike)


def _average(alike: Matrix, middle: list[float]) -> Matrix:
    """Correlations over all that lies before two stretches, half of each itself among it."""
    parts = [[_SHARES[x] / (2 if x == i else 1) for x in range(i + 1)] for i in _STRETCHES]
    rows = [[sum(part * alike[x][y] for y, part in enumerate(parts[j])) for j in _STRETCHES] for x in _STRETCHES]
    return tuple(
        tuple(sum(part * rows[x][j] for x, part in enumerate(parts[i])) / (middle[i] * middle[j]) for j in _STRETCHES)
        for i in _STRETCHES
    )


def _mix(mixer: Mixer, alike: Matrix, covariance: list[list[float]]) -> None:
    """An MLP, or experts: what two tokens have in common passes through those that both choose."""
    flat, slope, bend, rest = _expand(mixer.first)
    share = mixer.active / mixer.experts
    for i in _STRETCHES:
        for j in range(i + 1):
            x = alike[i][j]
            both = find_both(share, x) / share if mixer.experts > 1 else 1.0
            gate = flat + x * (slope + x * (bend + x * rest))
            covariance[i][j] += mixer.second * both * (mixer.is_shifted + mixer.first * x) * gate
            covariance[j][i] = covariance[i][j]


# --- how many rows an expert gets -------------------------------------------------------------------------------------
class Deal:
    """The rows that experts of one layer get from a batch of sequences."""

    def __init__(self, experts: int, active: int, alike: Matrix, apart: Matrix, batch: int, length: int) -> None:
        self.share, self.batch, self.length = active / experts, batch, length
        self.alike = alike
        own, other = (
            sum(_SHARES[i] * _SHARES[j] * find_both(self.share, pair[i][j]) for i in _STRETCHES for j in _STRETCHES)
            for pair in (alike, apart)
        )
        both = own / batch + other * (1 - 1 / batch)
        # All experts together get a fixed number of rows, which leaves a little less to differ.
        self.variance = max(0.0, both - self.share**2) * (1 - 1 / experts)  # of the share of all rows

    @property
    def spread(self) -> float:
        """Standard deviation of the rows of an expert, over their mean."""
        rows = self.batch * self.length * self.share
        return math.sqrt(self.variance / self.share**2 + 1 / rows)

    @property
    def parts(self) -> int:
        """Of a large batch, so many parts stand for its sequences."""
        return max(1, min(_PARTS, round(self.batch)))

    @cached_property
    def _draws(self) -> list[tuple[float, float, float]]:
        """What an expert may get of a sequence: how often, which share of its rows, and how often then none.

        Two variables say what an expert's scores have in common over a sequence: one at its end, one more before.
        """
        level = _NORMAL.inv_cdf(1 - self.share)
        stretches: list[tuple[float, float, list[tuple[float, float]]]] = []
        for (late, early, common), own, part in zip(_factor(self.alike), self.alike, _SHARES, strict=True):
            noise, rows = math.sqrt(max(1e-4, 1 - own[len(stretches)])), part * self.length
            table = []
            shifts = [(common * z / noise, w) for z, w in _FEW]
            for i in range(2 * _RANGE * _FINE + 1):
                bound = (level - (i / _FINE - _RANGE)) / noise
                mean = none = 0.0
                for shift, w in shifts:
                    x = math.erfc((bound - shift) / _ROOT) / 2
                    mean += w * x
                    if rows * x < _MANY:
                        none += w * math.exp(rows * math.log1p(-min(x, 0.999999)))
                table.append((part * mean, math.log(max(none, 1e-200))))
            stretches.append((late * _FINE, early * _FINE, table))
        found = []
        middle, most = _RANGE * _FINE, 2 * _RANGE * _FINE - 1e-6
        for v, often in _COARSE:
            lines = [(late, early * v + middle, table) for late, early, table in stretches]
            for u, weight in _GRID:
                share = none = 0.0
                for late, start, table in lines:
                    at = late * u + start
                    at = 0.0 if at < 0 else most if at > most else at
                    i = int(at)
                    (x, a), (y, b) = table[i], table[i + 1]
                    share += x + (at - i) * (y - x)
                    none += a + (at - i) * (b - a)
                found.append((often * weight, share, math.exp(none)))
        return found

    @cached_property
    def shares(self) -> list[float]:
        """How often an expert gets i of the _POINTS of the rows of a part, summed over all parts."""
        draws = self._draws
        mean = sum(weight * share for weight, share, _ in draws)
        seen = sum(weight * (share - mean) ** 2 for weight, share, _ in draws)
        pull = math.sqrt(self.variance * self.parts / seen) if seen > 0 else 0.0
        pulled = [(weight, max(0.0, self.share + (share - mean) * pull)) for weight, share, _ in draws]
        level = self.share / sum(weight * share for weight, share in pulled)
        one = [0.0] * (_POINTS + 1)
        for weight, share in pulled:
            at = _POINTS * min(1.0, level * share)
            i = min(_POINTS - 1, int(at))
            one[i] += weight * (1 - at + i)
            one[i + 1] += weight * (at - i)
        found = one
        for _ in range(self.parts - 1):
            found = _convolve(found, one)
        return found

    @cached_property
    def missed(self) -> float:
        """How often an expert gets no row at all."""
        return math.pow(sum(weight * missed for weight, _, missed in self._draws), self.batch)

    def count_steps(self, size: int, tokens: int) -> float:
        """Steps of `size` rows that an expert takes on average of so many tokens."""
        return _count_steps(self.shares, self.missed, tokens / self.parts / _POINTS, size)


def _count_steps(shares: Sequence[float], missed: float, step: float, size: int) -> float:
    """The same where a point of the shares is so many rows."""
    most = len(shares) - 1
    found = 1 - missed
    for i, weight in enumerate(shares):
        if not i or weight < 1e-12:
            continue
        mean = i * step
        spread = math.sqrt(mean * (1 - i / most) + step**2 / 12)
        if spread > _SMOOTH * size:
            least = (size / 2 + 0.5 - mean) / spread
            found += weight * (_NORMAL.pdf(least) - least * _above(least)) * spread / size
            continue
        first, last = max(1, int((mean - 5 * spread) / size)), int((mean + 5 * spread) / size) + 1
        more = sum(_above((size * j + 0.5 - mean) / spread) for j in range(first, last + 1))
        found += weight * (first - 1 + more)
    return found


def _factor(alike: Matrix) -> list[tuple[float, float, float]]:
    """For each stretch: what its scores take from two common variables, and what its own tokens have in common."""
    last = math.sqrt(max(1e-9, alike[-1][-1]))
    late = [max(0.0, row[-1]) / last for row in alike]
    rest = math.sqrt(max(1e-9, alike[_EARLY][_EARLY] - late[_EARLY] ** 2))
    early = [(row[_EARLY] - late[i] * late[_EARLY]) / rest for i, row in enumerate(alike)]
    common = [math.sqrt(max(0.0, alike[i][i] - late[i] ** 2 - early[i] ** 2)) for i in _STRETCHES]
    return list(zip(late, early, common, strict=True))


def _convolve(some: list[float], others: list[float]) -> list[float]:
    found = [0.0] * (len(some) + len(others) - 1)
    for i, x in enumerate(some):
        if x > 1e-12:
            for j, y in enumerate(others):
                found[i + j] += x * y
    return found


@lru_cache(maxsize=64)
def _list_deals(model: RandomModel, batch: int, length: int) -> tuple[Deal | None, ...]:
    alike = correlate(model, length)
    found: list[Deal | None] = []
    for i, layer in enumerate(model.layers):
        routed = [mixer for mixer in layer.mixers if mixer.experts > 1]
        if i >= len(alike):
            found.append(next(deal for deal in reversed(found) if deal) if routed else None)
        else:
            found.append(Deal(routed[0].experts, routed[0].active, *alike[i], batch, length) if routed else None)
    return tuple(found)


def list_deals(model: RandomModel, lengths: Sequence[int]) -> tuple[Deal | None, ...]:
    """Each layer's deal of a batch of sequences; None for layers without experts.

    Sequences count as equally long ones that leave a batch as uneven. Lengths a few percent apart share their deals.
    """
    batch = max(1, round(sum(lengths) ** 2 / sum(length * length for length in lengths)))
    return _list_deals(model, batch, round(2 ** (round(8 * math.log2(sum(lengths) / batch)) / 8)))


@lru_cache(maxsize=64)
def _pool(deals: tuple[Deal, ...]) -> tuple[list[float], float]:
    """What layers deal out on average: steps of batches that differ a little then cost one count, not one a layer."""
    own = Counter(deals)
    shares = [(deal.shares, many / own.total()) for deal, many in own.items()]
    pooled = [sum(each[i] * part for each, part in shares) for i in range(len(deals[0].shares))]
    return pooled, sum(deal.missed * many for deal, many in own.items()) / own.total()


@lru_cache(maxsize=1024)
def count_steps(model: RandomModel, layers: tuple[int, ...], lengths: tuple[int, ...], tokens: int, size: int) -> float:
    """Steps of `size` rows that an expert takes on average of so many tokens, over layers that have experts."""
    deals = list_deals(model, lengths)
    own = tuple(deal for deal in (deals[layer] for layer in layers) if deal is not None)
    return _count_steps(*_pool(own), tokens / own[0].parts / _POINTS, size)
