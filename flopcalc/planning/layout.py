"""How a step may be spread over devices: layouts, the rules they keep, and which of them are worth a try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from flopcalc.base.errors import RecipeError, WorkloadError, format_value
from flopcalc.base.vocabulary import LAYOUT_RECOMPUTE, RECOMPUTE, LayoutRecompute, Recompute, check_word
from flopcalc.planning.local import split_evenly

DEGREES = ("dp", "tp", "pp", "virtual", "cp", "ep", "zero", "micro_batch", "recompute")


class Layout(NamedTuple):
    """How a step is spread over tp · pp · cp · dp devices; experts are spread over ep of the tp · cp · dp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    virtual: int = 1  # chunks of layers per device of a pipeline (interleaved schedule)
    cp: int = 1
    ep: int = 1
    zero: int = 0  # 1: optimizer states spread over dp, 2: gradients too, 3: weights too (FSDP)
    micro_batch: int = 1  # sequences
    # light: norms, activation functions and up-projections of compressed keys again; selective: the attention core;
    # offload: light, and every second layer's activations in the host's memory; half: every second layer again; full
    # and full-reentrant: every layer
    recompute: LayoutRecompute = "none"
    is_sequence_parallel: bool = True  # with tp: norms and residuals are spread too

    def find_cut(self) -> Layout:
        """The degrees that what one device computes of a micro-batch depends on."""
        return Layout(
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            micro_batch=self.micro_batch,
            recompute=self.recompute,
            is_sequence_parallel=self.is_sequence_parallel,
        )

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_dp(self) -> int:
        """Devices that hold the same experts."""
        return self.dp * self.tp * self.cp // self.ep

    def __str__(self) -> str:
        shown = (("tp", self.tp), ("pp", self.pp), ("v", self.virtual), ("cp", self.cp), ("ep", self.ep))
        words = [f"{name}{value}" for name, value in shown if value > 1]
        words += [f"dp{self.dp}", f"zero{self.zero}", f"mb{self.micro_batch}"]
        return " ".join([*words, *([f"recompute {self.recompute}"] if self.recompute != "none" else [])])


def find_recipe(recompute: LayoutRecompute) -> Recompute:
    """The recipe's recomputation that a layout's kind of it is made of."""
    kinds: dict[str, Recompute] = {"light": "none", "offload": "none", "selective": "none", "half": "full"}
    return kinds[recompute] if recompute in kinds else check_word(recompute, RECOMPUTE, "recompute")


class Outline(NamedTuple):
    """What the rules and the exchanges of a layout ask of a model; of one sample where a length counts."""

    layers: int  # of the language model
    hidden: int  # width of the residual stream
    tokens: int
    heads: int
    experts: int  # 1 without
    active: int  # experts that a token reaches
    exits: float  # sums over tp in a layer, one direction
    keys: float  # numbers of keys and values that a token has in a layer
    key_heads: int
    head_dim: float = 0.0  # of keys
    kinds: tuple[int, ...] = ()  # the kind of each layer, by number; without, all are alike
    routed: tuple[int, ...] = ()  # kinds of layers that have experts
    groups: tuple[int, int] = (1, 1)  # of experts, and how many of them a token may reach
    losses: int = 1  # passes through the head: one more for every layer of multi-token prediction

    def __hash__(self) -> int:  # a few numbers suffice: one is looked up for every layout of a plan
        return hash((self.layers, self.hidden, self.tokens))


def find_problem(layout: Layout, model: Outline, gpus: int, global_batch: int) -> tuple[str, str] | None:
    """The rule that a layout breaks for this model, device count and batch, and how; None if it keeps all."""
    dp, tp, pp, cp, ep = layout.dp, layout.tp, layout.pp, layout.cp, layout.ep
    if layout.devices != gpus:
        return "devices", f"dp {dp} · tp {tp} · pp {pp} · cp {cp} are {layout.devices} devices, not {gpus}"
    if model.heads % tp:
        return "heads", f"tp {tp} does not divide the model's {model.heads} attention heads"
    if pp * layout.virtual > model.layers + 2:  # the table and the head may take a layer's place
        return "layers", f"pp {pp} · {layout.virtual} virtual stages are more than the model's {model.layers} layers"
    if model.tokens % (2 * cp if cp > 1 else 1):
        return "sequence", f"cp {cp} needs sequences of a multiple of {2 * cp} tokens, not {model.tokens}"
    if ep > 1 and model.experts == 1:
        return "experts", f"ep {ep}: the model has no experts"
    if model.experts % ep:
        return "experts", f"ep {ep} does not divide the model's {model.experts} experts"
    if (dp * tp * cp) % ep:
        return "experts", f"ep {ep} does not divide dp · tp · cp = {dp * tp * cp}, over which experts are spread"
    if global_batch % (dp * layout.micro_batch):
        text = f"dp {dp} · micro-batch {layout.micro_batch} does not divide a global batch of {global_batch} sequences"
        return "batch", text
    batches = global_batch // (dp * layout.micro_batch)
    if layout.virtual > 1 and pp == 1:
        return "virtual", f"{layout.virtual} virtual stages need a pipeline: pp of 2 or more, not 1"
    if layout.virtual > 1 and batches % pp:
        return "virtual", f"{layout.virtual} virtual stages need micro-batches in multiples of pp {pp}, not {batches}"
    if layout.zero and dp * cp == 1:
        return "zero", f"zero {layout.zero} needs more than one data-parallel device"
    return None


def list_layouts(
    model: Outline, gpus: int, global_batch: int, per_node: int, fixed: Mapping[str, Sequence[int | str]]
) -> Iterator[Layout]:
    """Every layout of the search, those that do not divide too; `fixed` holds the values that a degree may take."""
    tps = _choose(fixed, "tp", [tp for tp in _list_powers(per_node) if gpus % tp == 0])
    cps = _choose(fixed, "cp", [cp for cp in _list_powers(16) if cp == 1 or model.tokens // cp >= 4096])
    eps = _choose(fixed, "ep", [ep for ep in _list_powers(model.experts) if model.experts % ep == 0])
    zeros = _choose(fixed, "zero", [0, 1, 2, 3])
    repeats = [
        check_word(word, LAYOUT_RECOMPUTE, "recompute") for word in fixed.get("recompute", ("none", "half", "full"))
    ]
    for tp in tps:
        for cp in cps:
            left = gpus // (tp * cp)
            if left * tp * cp != gpus or not left:
                continue
            pps = _choose(fixed, "pp", [pp for pp in _list_divisors(left) if pp <= model.layers])
            for pp in pps:
                dp = left // pp
                if dp * pp != left or dp not in fixed.get("dp", (dp,)):
                    continue
                virtuals = _choose(fixed, "virtual", _list_virtual(model.layers, pp))
                batches = _choose(
                    fixed, "micro_batch", [b for b in _list_powers(32) if b == 1 or b * dp <= global_batch]
                )
                for ep in eps:
                    for virtual in virtuals:
                        for zero in zeros:
                            for batch in batches:
                                for repeat in repeats:
                                    yield Layout(dp, tp, pp, virtual, cp, ep, zero, batch, repeat)


def _choose(fixed: Mapping[str, Sequence[int | str]], name: str, usual: list[int]) -> list[int]:
    return [int(value) for value in fixed[name]] if name in fixed else usual


def _list_powers(most: int) -> list[int]:
    return [1 << power for power in range(max(1, most).bit_length())]


def _list_divisors(number: int) -> list[int]:
    return (
        [each for each in range(1, number + 1) if number % each == 0]
        if number <= 4096
        else [each for each in range(1, 513) if number % each == 0]
    )


def _list_virtual(layers: int, pp: int) -> list[int]:
    """Numbers of chunks worth a try: those that split a device's layers evenly."""
    own = -(-layers // pp)
    return [1] if pp == 1 else [virtual for virtual in range(1, min(own, 12) + 1) if own % virtual == 0]


@lru_cache(maxsize=1024)
def split_layers(kinds: tuple[int, ...], pp: int, virtual: int = 1, losses: int = 1) -> tuple[tuple[int, ...], ...]:
    """Layers of each kind on every device of a pipeline; together they are all layers, and the ends get fewer.

    The last gets one less for every pass through the head, as Megatron-Bridge lays DeepSeek-V3 out.
    """
    chunks, most = split_evenly(len(kinds), pp * virtual), max(kinds) + 1
    for _ in range(1, min(losses, chunks[0] if len(chunks) > 1 else 1)):
        fewer = next((number for number, many in enumerate(chunks[:-1]) if many < max(chunks)), None)
        if fewer is not None and chunks[-1]:
            chunks[fewer], chunks[-1] = chunks[fewer] + 1, chunks[-1] - 1
    starts = [sum(chunks[:number]) for number in range(len(chunks))]
    found = []
    for rank in range(pp):
        own = [kind for number in range(rank, len(chunks), pp) for kind in kinds[starts[number] :][: chunks[number]]]
        found.append(tuple(own.count(kind) for kind in range(most)))
    return tuple(found)


def check_fixed(name: str, values: Sequence[int | str]) -> tuple[int | str, ...]:
    """The values that a degree may take, checked one by one."""
    if not values:
        raise RecipeError(f"{name}: no value given")
    for value in values:
        if name == "recompute":
            check_word(value, LAYOUT_RECOMPUTE, "recompute", RecipeError)
        elif isinstance(value, bool) or not isinstance(value, int) or not (0 if name == "zero" else 1) <= value < 10**7:
            raise WorkloadError(
                f"{name} must be a whole number of at least {0 if name == 'zero' else 1}, not {format_value(value)}"
            )
        elif name == "zero" and value > 3:
            raise WorkloadError(f"zero must be 0, 1, 2 or 3, not {value}")
    return tuple(dict.fromkeys(values))
