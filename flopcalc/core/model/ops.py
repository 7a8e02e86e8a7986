"""The operations of a model, one class per kind, and the stages that they form; every size is an int."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, TypeAlias

from flopcalc.base.frozen import Value, frozen
from flopcalc.base.vocabulary import Component, Group
from flopcalc.core.spec.spec import Gate, Split
from flopcalc.core.workload.sums import Only, Sum


@frozen(kw_only=True)  # never made by itself
class Op(Value):
    """One operation: its module's name, and the sum of the workload that says how often it runs."""

    kind: ClassVar[str]

    name: str
    part: Component
    rows: Sum
    times: int = 1  # runs per unit of the sum (experts per token, rows per image)
    source: str = ""  # the stream whose output it reads, if not its own chain
    joined: tuple[str, ...] = ()  # streams that are added to, or multiplied with, what it reads
    to: str = ""  # the stream that its output is added to
    detached: bool = False  # no gradient passes
    frozen: bool = False  # HF itself never trains its weights
    again: bool = False  # its module has run before: its parameters are counted there
    unused: bool = False  # nothing reads what it computes, so it gets no gradient
    nested: bool = False  # in a checkpointed block inside a checkpointed layer
    twice: bool = False  # the same where the block runs again for the layer, and once more for itself
    beside: str = ""  # the stream without which it does not run
    state: int = 0  # numbers that it leaves in the cache for every sequence, however long
    float32: str = ""  # the code computes it in float32: "cast" its inputs, or "always", with autocast turned off
    inferred: tuple[str, ...] = ()  # keys that its spec leaves out: taken from its place, or from sizes beside it

    # What only some kinds have is neutral in the others, so that a fold over all ops need not ask for the kind.
    @property
    def n_in(self) -> int:
        """Width that its weight reads; 0 without one."""
        return 0

    @property
    def n_out(self) -> int:
        """Width that its weight writes; 0 without one."""
        return 0

    @property
    def size(self) -> int:
        """Elements of a norm's weight, an embedding's row, a bare parameter."""
        return 0

    @property
    def copies(self) -> int:
        """Copies of its weight (experts)."""
        return 1

    @property
    def active(self) -> int:
        """Copies that one token reaches."""
        return 1

    @property
    def bias(self) -> bool:
        return False

    @property
    def tied(self) -> str | None:
        """Full name of the parameter it shares."""
        return None

    @property
    def input_embedding(self) -> bool:
        """Whether HF's checkpointing makes its output require a gradient."""
        return False


@frozen(kw_only=True)  # never made by itself
class Weighted(Op):
    """An operation with parameters of its own, or tied to another's."""

    tied: str | None = None

    @property
    def weight_size(self) -> int:
        """Elements of its weight, all copies, tied or not."""
        raise NotImplementedError

    @property
    def bias_size(self) -> int:
        return 0

    @property
    def param(self) -> str:
        """The parameter's name inside its module."""
        return "weight"

    @property
    def bias_name(self) -> str:
        return "bias"

    @property
    def targets(self) -> tuple[str, ...]:
        """A bare parameter's: the target names that PEFT maps to it, all of them needed."""
        return ()

    @property
    def is_bare(self) -> bool:
        """No linear module: LoRA reaches it by its targets alone, by none if there are none."""
        return False

    @property
    def at(self) -> str:
        """The module that multiplies by its weight, if not its own."""
        return ""

    @property
    def adapts(self) -> bool:
        """Whether LoRA's all-linear reaches it."""
        return False

    @property
    def copy_names(self) -> list[str]:
        """What stands for * in the name of a module per copy."""
        return [str(copy) for copy in range(self.copies)]

    def name_first(self, path: str) -> str:
        """The path of the first copy, which speaks for all; a path without * as it is."""
        return path.replace("*", "0")


@frozen(kw_only=True)
class Linear(Weighted):
    """(rows, in) by (in, out)."""

    kind: ClassVar[str] = "linear"

    n_in: int
    n_out: int
    bias: bool = False
    param: str = "weight"
    targets: tuple[str, ...] = ()
    is_bare: bool = False
    copies: int = 1
    active: int = 1
    input_embedding: bool = False
    own_flops: int = 0  # per row, of a weight that is looked up by position before it is multiplied
    at: str = ""
    numbered: tuple[int | str, ...] = (0, 1)  # the copies that are modules (*): first number and step, or their names
    adapts: bool = True
    split: Split | None = None  # None: not settled, which counts as column
    is_shared: bool = False  # of an expert that all tokens pass, beside routed ones
    reads_stream: bool = True  # the residual stream, with no other product between
    groups: tuple[int, int] = (1, 1)  # of a router: groups of experts, and how many of them a token may reach

    @property
    def weight_size(self) -> int:
        return self.n_in * self.n_out * self.copies

    @property
    def bias_size(self) -> int:
        return self.n_out * self.copies if self.bias else 0

    @property
    def bias_name(self) -> str:
        """A bare parameter has its bias next to it (down_proj_bias)."""
        return f"{self.param}_bias" if self.is_bare and self.param != "weight" else "bias"

    @property
    def copy_names(self) -> list[str]:
        first, step = self.numbered[0], self.numbered[-1]
        if isinstance(first, int) and isinstance(step, int):
            return [str(first + step * copy) for copy in range(self.copies)]
        return [str(name) for name in self.numbered]

    def name_first(self, path: str) -> str:
        return path.replace("*", str(self.numbered[0]))


class Conv(Linear):
    """A convolution as a product: `n_in` is channels x kernel."""

    __slots__ = ()

    kind: ClassVar[str] = "conv"


@frozen(kw_only=True)
class Embed(Weighted):
    """A table look-up."""

    kind: ClassVar[str] = "embed"

    count: int  # rows of the table
    dim: int
    input_embedding: bool = False

    @property
    def n_in(self) -> int:
        return self.count

    @property
    def size(self) -> int:
        return self.dim

    @property
    def weight_size(self) -> int:
        return self.count * self.dim


@frozen(kw_only=True)
class Norm(Weighted):
    """A norm with its weight."""

    kind: ClassVar[str] = "norm"

    dim: int
    bias: bool = False
    copies: int = 1
    active: int = 1
    over: int = 0  # of a norm inside a block, as of heads: elements of a row that it runs over; 0: its weight's

    @property
    def size(self) -> int:
        return self.dim

    @property
    def weight_size(self) -> int:
        return self.dim * self.copies

    @property
    def bias_size(self) -> int:
        return self.dim * self.copies if self.bias else 0


@frozen(kw_only=True)
class Param(Weighted):
    """A bare parameter that multiplies nothing."""

    kind: ClassVar[str] = "param"

    size: int

    @property
    def weight_size(self) -> int:
        return self.size


@frozen(kw_only=True)
class Attend(Op):
    """Queries by keys, and their probabilities by values; its rows are query-key pairs.

    `kv_heads` heads of keys and values serve `heads` of queries. A position leaves `cache` elements in the layer's
    cache, as HF's code keeps them, of which it holds `cache_rows` after a call; `latent` is the compressed form that
    serving engines keep where attention is latent.
    """

    kind: ClassVar[str] = "attend"

    heads: int
    kv_heads: int
    qk: int
    v: int
    cache: int = 0
    cache_rows: Sum | None = None
    latent: int = 0
    queries: Sum | None = None  # None: as many as there are rows in the product that reads it
    rotates_part: bool = False  # a part of each head is rotated, then concatenated with the rest
    float_scores: bool = False  # the code multiplies queries and keys in float32, without autocast


@frozen(kw_only=True)
class Multiply(Op):
    """A product of activations other than attention: a spec says its FLOPs and those of its gradients, per row."""

    kind: ClassVar[str] = "product"

    flops: int
    backward: int
    pair: bool = False  # of the two branches before it: a gradient for each that needs one


@frozen(kw_only=True)
class Pointwise(Op):
    """Element by element: no product, but autograd keeps a tensor for it."""

    kind: ClassVar[str] = "pointwise"

    gate: Gate | None = None  # None: not settled, which counts as plain


@frozen(kw_only=True)
class Dropout(Op):
    """Dropout; autograd keeps its mask where it drops anything."""

    kind: ClassVar[str] = "dropout"

    saves: bool


@frozen(kw_only=True)
class TracedModule(Op):
    """A module of a traced model, of which its FLOPs are known and nothing else."""

    kind: ClassVar[str] = "traced"


Chain: TypeAlias = "tuple[Op | tuple[Chain, ...], ...]"


@frozen()
class Stage(Value):
    """A stack of a spec under one config: a chain of ops, or one chain per layer."""

    path: str
    layers: tuple[Chain, ...]
    repeated: bool
    stream: str
    group: Group  # vision, projector or language: the word that --freeze knows it by
    checkpoint: bool
    dead: tuple[bool, ...]  # per layer: computed, but its output is never used
    reads: tuple[str, tuple[int, ...]] | None  # (stage path, layer whose output layer j of this one reads)
    joins: tuple[str, ...]  # streams that enter this one here
    adds: str | None  # path of a repeated stage: its j-th output is added after this one's layer j
    first: int = 0  # number of the first layer, where another stage holds those before it
    reversible: bool = False  # its backward runs every layer again, whatever the recipe says
    input_gradient: bool = False  # HF makes its input require a gradient, whatever trains
    width: int = 0  # elements of a row of its residual stream
    is_width_inferred: bool = False  # its spec says none: taken from its ops, which a note tells

    @property
    def kinds(self) -> tuple[Chain, ...]:
        """Its layers, each chain that several share once: most are one object, and chains are long to hash."""
        return tuple({id(chain): chain for chain in self.layers}.values())

    def map_layers(self, change: Callable[[Chain], Chain]) -> Stage:
        """The same stage with every layer changed; layers that share a chain go on doing so."""
        made = {id(chain): change(chain) for chain in self.kinds}
        return self.replace(layers=tuple(made[id(chain)] for chain in self.layers))

    def map_ops(self, change: Callable[[Op], Op]) -> Stage:
        """The same stage with every op changed."""
        return self.map_layers(lambda chain: map_ops(chain, change))


def iterate(chain: Chain) -> Iterable[Op]:
    """Every op of a chain in order of execution."""
    for item in chain:
        if isinstance(item, Op):
            yield item
        else:
            for branch in item:
                yield from iterate(branch)


def list_parameters(stages: Iterable[Stage], has_tied: bool = False) -> dict[str, int]:
    """Every parameter of the stages by its full name, with its number of elements; a tied one if it is asked for."""
    sizes: dict[str, int] = {}
    for stage in stages:
        for layer, chain in enumerate(stage.layers, stage.first):
            path = f"{stage.path}.{layer}" if stage.repeated else stage.path
            for op in iterate(chain):
                if isinstance(op, Weighted) and not op.again:
                    sizes |= _list_own(op, join(path, op.name), has_tied)
    return sizes


def _list_own(op: Weighted, module: str, has_tied: bool) -> dict[str, int]:
    sizes = {} if op.tied and not has_tied else {name_weight(op, module): op.weight_size}
    if op.bias:
        sizes[f"{module}.{op.bias_name}"] = op.bias_size
    if "*" not in op.name:
        return sizes
    # A module per copy.
    return {name.replace("*", copy): size // op.copies for name, size in sizes.items() for copy in op.copy_names}


def name_weight(op: Weighted, module: str) -> str:
    """The full name of an op's weight."""
    return module if isinstance(op, Param) else f"{module}.{op.param}"


def list_routed(stages: Iterable[Stage]) -> dict[tuple[str, int], int]:
    """(path of a stage, number of a layer) -> its experts, for each layer with a router, in order."""
    found: dict[tuple[str, int], int] = {}
    for stage in stages:
        experts = {id(chain): _count_experts(list(iterate(chain))) for chain in stage.kinds}
        for i, chain in enumerate(stage.layers):
            if experts[id(chain)] > 1:
                found[stage.path, stage.first + i] = experts[id(chain)]
    return found


def _count_experts(ops: list[Op]) -> int:
    if not any(op.part == "router" for op in ops):
        return 1
    return max((op.copies for op in ops if isinstance(op, Linear) and op.active < op.copies), default=1)


def join(path: str, name: str) -> str:
    """The path of a module inside another; a name that starts with / is a whole path."""
    if name.startswith("/"):
        return name[1:]
    return f"{path}.{name}" if name and path else name or path


def map_ops(chain: Chain, change: Callable[[Op], Op]) -> Chain:
    """The same chain with every op changed."""
    return tuple(
        change(item) if isinstance(item, Op) else tuple(map_ops(branch, change) for branch in item) for item in chain
    )


def restrict(chain: Chain, which: str) -> Chain:
    """The same ops, run on the workload's images alone, or on its videos alone."""
    return map_ops(chain, lambda op: op.replace(rows=Only(which, op.rows)))


def put_under(chain: Chain, path: str) -> Chain:
    """A block's ops with their names below another module's path."""

    def move(op: Op) -> Op:
        name = op.name if op.name.startswith("/") else f"{path}.{op.name}" if op.name else path
        if isinstance(op, Weighted) and op.at:
            return op.replace(name=name, at=path if op.at == "." else f"{path}.{op.at}")
        return op.replace(name=name)

    return map_ops(chain, move)


def remove_hooks(stage: Stage) -> Stage:
    """The stage as it is where HF's checkpointing does not make its input require a gradient."""

    def remove(op: Op) -> Op:
        return op.replace(input_embedding=False) if isinstance(op, Weighted) and op.input_embedding else op

    return stage.map_ops(remove)


def rename_path(path: str, old: str, new: str) -> str:
    """A path inside one module as it is inside another; an empty name is the top."""
    if old and path != old and not path.startswith(f"{old}."):
        return path
    rest = path[len(old) :].removeprefix(".") if old else path
    return ".".join(part for part in (new, rest) if part)


def rename_stage(stage: Stage, old: str, new: str) -> Stage:
    """The stage with its paths under another module; an empty name is the top."""

    def move_op(op: Op) -> Op:
        changes: dict[str, object] = {}
        if op.name.startswith("/"):
            changes["name"] = f"/{rename_path(op.name[1:], old, new)}"
        if isinstance(op, Weighted) and op.tied:
            changes["tied"] = rename_path(op.tied, old, new)
        return op.replace(**changes) if changes else op

    if old == new:
        return stage
    return stage.map_ops(move_op).replace(
        path=rename_path(stage.path, old, new),
        reads=None if stage.reads is None else (rename_path(stage.reads[0], old, new), stage.reads[1]),
        adds=None if stage.adds is None else rename_path(stage.adds, old, new),
    )
