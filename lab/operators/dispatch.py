"""A HF model and a step go in; every operator that is dispatched comes out, with its module and its tensors' sizes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations import sdpa_attention

from flopcalc.measure.counters.flop_counter import watch_modules
from flopcalc.measure.operator_kinds import classify
from lab.operators.autocast import below, narrow

__all__ = ["Event", "Kept", "Trace", "trace_operators"]

Sizes = tuple[tuple[str, int], ...]  # per tensor: its dtype's letter and how many elements lie in memory


class Event(NamedTuple):
    """One dispatched operator."""

    module: str
    direction: str  # forward, backward
    name: str
    kind: str
    reads: Sizes = ()
    writes: Sizes = ()


class Kept(NamedTuple):
    """A piece of memory that autograd keeps until the backward pass."""

    made_by: tuple[str, int]  # module, and which of its forward operators made it; -1: it came from outside
    letter: str
    elements: int
    savers: tuple[str, ...]


class Trace(NamedTuple):
    events: list[Event]
    kept: list[Kept]


# x: the model's own floating dtype; f: float32; l: int64; i: int32; o: bool or a byte
_LETTERS = {torch.float32: "f", torch.int64: "l", torch.int32: "i", torch.bool: "o", torch.uint8: "o"}


def _letter(dtype: torch.dtype) -> str:
    return _LETTERS.get(dtype, "x" if dtype.is_floating_point else "l")


def _measure(tensor: torch.Tensor) -> tuple[str, int]:
    """Elements that lie in memory: a dimension with stride 0 is one element."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            count *= int(size)
    return _letter(tensor.dtype), count


def _list_sizes(value: object) -> Sizes:
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tuple(_measure(leaf) for leaf in leaves if leaf.dim() and leaf.numel() > 1)


class _Tracing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Forward operators belong to the innermost running module, backward ones to the module that made their node."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.is_quiet = False
        self.made: dict[int, tuple[str, int]] = {}  # storage -> module, number of its operator
        self.kept: dict[int, tuple[tuple[str, int], str, int, dict[str, None]]] = {}
        self.parameters: set[int] = set()
        self.owners: dict[int, str] = {}  # parameter -> its module
        self._alive: list[Any] = []
        self._numbers: dict[str, int] = {}
        self._stack: list[str] = [""]
        self._sequence: list[int] = []
        self._paths: list[str] = []
        self._note()

    def enter(self, path: str, _module: torch.nn.Module) -> None:
        self._stack.append(path)
        self._note()
        self.events.append(Event(path, "forward", "module", "module"))

    def leave(self) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        self._sequence.append(torch._C._autograd._get_sequence_nr())
        self._paths.append(self._stack[-1])

    def find(self, sequence: int) -> str:
        """The module that ran when autograd numbered a node so."""
        return self._paths[bisect_right(self._sequence, sequence) - 1]

    def where(self) -> tuple[str, str]:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return self._stack[-1], "forward"
        if _is_accumulating():
            return self.owners.get(id(node.variable), "?"), "backward"
        return self.find(node._sequence_nr()), "backward"

    def add(self, name: str, kind: str, reads: Sizes = (), writes: Sizes = ()) -> None:
        module, direction = self.where()
        self.events.append(Event(module, direction, name, kind, reads, writes))

    def note_made(self, module: str, out: object) -> None:
        """Which operator made a piece of memory: the same one in every run of the model."""
        number = self._numbers[module] = self._numbers.get(module, 0) + 1
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.made:
                    self.made[storage._cdata] = (module, number)
                    self._alive.append(storage)

    def let_go(self) -> None:
        """Of all tensors: their nodes in autograd's graph know this object, a circle that Python's collector misses."""
        self._alive.clear()

    def keep(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self.parameters or tensor.numel() < 2:
            return
        self._alive.append(tensor)
        if place not in self.kept:
            elements = storage.nbytes() // tensor.element_size()
            self.kept[place] = (self.made.get(place, ("", -1)), _letter(tensor.dtype), elements, {})
        self.kept[place][3][self._stack[-1]] = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name == "aten::_grouped_mm":  # its check of strides is for sizes of real models
            out = _multiply_groups(args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"])
        elif func._schema.name == "aten::histc" and not args[0].dtype.is_floating_point:  # a GPU counts integers too
            out = func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        elif func._schema.name in _PRODUCTS and args[0].dtype is torch.bfloat16 and args[0].is_cpu:
            # A CPU without bf16 is a hundred times slower in it; the result lies in memory as it would.
            out = func(*(each.float() if isinstance(each, torch.Tensor) else each for each in args), **kwargs)
            out = out.to(torch.bfloat16)
        else:
            out = func(*args, **kwargs)
        if self.is_quiet or func.namespace == "profiler":
            return out
        module, direction = self.where()
        if func._schema.name == "aten::detach" and not _is_accumulating():
            return out  # autograd puts a result by: an operator only where a dispatch mode looks on
        if module == "?":  # the gradient of an input, which no model asks for
            return out
        if direction == "forward":
            self.note_made(module, out)
        for name, kind, reads, writes in _describe(func, args, kwargs, out):
            self.events.append(Event(module, direction, name, _refine(kind, args, out), reads, writes))
        return out


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def _is_accumulating() -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and type(node).__name__ == "AccumulateGrad"


def _multiply_groups(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """An empty result of grouped products: rows with a matrix per group, or the gradient of those matrices."""
    if b.dim() == 3:
        return a.new_zeros(a.shape[0], b.shape[2])
    return a.new_zeros(ends.numel(), a.shape[0], b.shape[1])


def _refine(kind: str, args: tuple[object, ...], out: object) -> str:
    """Elementwise kinds by the kernel they get: tensors that lie alike in memory, or an index per element."""
    if kind not in ("pointwise", "copy", "cast", "cat") or not isinstance(out, torch.Tensor):
        return kind
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.numel() > 1 and leaf.dim()]
    wide = "_wide" if out.element_size() >= 4 else ""
    if kind == "cat":
        if len(tensors) == 1:  # an empty cache takes its first keys
            return "cat_one"
        return kind if all(tensor.is_contiguous() for tensor in tensors) else f"cat_strided{wide}"
    is_alike = _is_alike(out, tensors)
    if kind == "pointwise" and len({tensor.dtype for tensor in tensors if tensor.is_floating_point()}) > 1:
        return "pointwise_mixed" if is_alike else "pointwise_strided_mixed"  # a cast per element
    if is_alike:
        return kind
    if kind != "cast" and any(_lies_across(tensor, out) for tensor in tensors):
        return f"{kind}_strided_across"
    return f"{kind}_strided" + (wide if kind != "cast" else "")


def _lies_across(tensor: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether neighbours in one are far apart in the other, as rows and columns of a transposed matrix."""
    is_whole = _measure(tensor)[1] == tensor.numel()  # no entry stands for several
    return is_whole and tensor.shape == out.shape and _find_inner(tensor) != _find_inner(out)


def _find_inner(tensor: torch.Tensor) -> int:
    """The dimension whose entries lie next to each other."""
    strides = [
        (stride, -i)
        for i, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size > 1 and stride
    ]
    return -min(strides)[1] if strides else 0


def _is_alike(out: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Whether all tensors lie alike in memory, without holes."""
    laid = _lay(out)
    return _is_dense(laid) and all(_lay(tensor) == laid for tensor in tensors)


def _lay(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(stride, size) of every dimension that has more than one entry."""
    return [(stride, int(size)) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _is_dense(laid: list[tuple[int, int]]) -> bool:
    filled = 1
    for stride, size in sorted(laid):
        if stride != filled:
            return False
        filled *= size
    return True


# On a GPU the size of their result is read back before it can be made; of the second only where booleans index.
_READING = ("masked_scatter_backward", "masked_select", "unique_consecutive", "_unique2", "unique_dim")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")


def _describe(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, object], out: Any
) -> list[tuple[str, str, Sizes, Sizes]]:
    """What an operator does beside a product's or an attention's, reads of the host included."""
    name = func._schema.name.rpartition("::")[2]
    if name == "lift_fresh":  # a tensor of Python's numbers: it is copied to the device, and the host waits
        return [(name, "read" if out.numel() else "view", (), ())]
    found = _describe_moved(func, name, args, kwargs, out)
    is_reading = name in _READING or (name == "repeat_interleave" and isinstance(args[-1], torch.Tensor))
    if name in _INDEXED and not (len(args) > 2 and args[2].numel() == 1):  # one number is filled in where they are true
        is_reading = any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1]))
    return [*found, (name, "read", (), ())] if is_reading else found


# Their kernels take rows one after another: on a GPU a tensor that lies otherwise is copied first.
_ORDERED = ("norm", "norm_backward", "softmax", "softmax_backward")


def _list_copies(args: tuple[object, ...]) -> list[tuple[str, str, Sizes, Sizes]]:
    found: list[tuple[str, str, Sizes, Sizes]] = []
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.Tensor) and leaf.numel() > 1 and not leaf.is_contiguous():
            kind = "copy_strided_across" if _find_inner(leaf) != leaf.dim() - 1 else "copy_strided"
            size = (_letter(leaf.dtype), leaf.numel())
            found.append(("copy_", kind, _list_sizes(leaf), (size,)))
    return found


def _describe_moved(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> list[tuple[str, str, Sizes, Sizes]]:
    """What an operator moves, as the kernels behind it do; some are several kernels."""
    kind = "view" if func.is_view else classify(name)
    if kind in ("view", "make", "product", "attention"):
        return [(name, "product_grouped" if "grouped" in name else kind, (), ())]
    written = _list_sizes(out)
    if kind == "fill":
        return [(name, kind, (), written)]
    given = _list_sizes((args, kwargs))
    if kind in _ORDERED:
        return [*_list_copies(args), (name, kind, given, written)]
    if name in ("slice_backward", "select_backward", "constant_pad_nd"):
        return [("fill_", "fill", (), written), ("slice", "view", (), ()), ("copy_", "copy", given, given)]
    if kind == "cast":
        same = isinstance(args[0], torch.Tensor) and args[0].dtype == out.dtype
        return [(name, "copy" if same else "cast", given, written)]
    if name == "copy_":
        return [(name, "cast" if args[0].dtype != args[1].dtype else "copy", _list_sizes(args[1]), written)]
    if kind == "gather" and name in ("embedding", "index", "index_select", "gather", "_unsafe_index"):
        return [(name, kind, written + _list_sizes(args[1:]), written)]
    if name == "embedding_dense_backward":
        rows = _list_sizes(args[0])
        return [("fill_", "fill", (), written), (name, kind, given, rows)]
    if name == "nll_loss_forward":  # one logit of each row
        places = _list_sizes(args[1])
        return [(name, kind, (*places, *((_letter(args[0].dtype), count) for _, count in places)), ())]
    if name == "nll_loss_backward":
        places = _list_sizes(args[2])
        one = tuple((_letter(out.dtype), count) for _, count in places)
        return [("fill_", "fill", (), written), (name, kind, places, one)]
    if name in ("index_put_", "_index_put_impl_"):
        return [(name, kind, _list_sizes(args[1:]), _list_sizes(args[2]))]
    if name in ("index_put", "scatter", "scatter_add") and torch._C._current_autograd_node() is not None:
        # Autograd writes into zeros in place where no dispatch mode looks on.
        source = _list_sizes(args[2] if name == "index_put" else args[3])
        return [(name, kind, _list_sizes(args[1:]), source)]
    if name in ("index_add_", "scatter_", "scatter_add_"):
        source = _list_sizes(args[3]) if len(args) > 3 else ()
        return [(name, kind, _list_sizes(args[1:]), source)]
    return [(name, kind, given, written)]


class _Attend(torch.autograd.Function):
    """A fused attention kernel as autograd sees it: one operator forward, one backward, memory laid out as there."""

    @staticmethod
    def forward(ctx: Any, tracing: _Tracing, kind: str, query: Any, key: Any, value: Any, bias: Any) -> Any:
        tracing.add("attend", kind)
        tracing.is_quiet = True
        batch, heads, length = query.shape[:-1]
        out = query.new_zeros(batch, length, heads, value.shape[-1]).transpose(1, 2)
        sums = torch.zeros(batch, heads, length, dtype=torch.float32, device=query.device)
        tracing.is_quiet = False
        for made in (out, sums):
            tracing.note_made(tracing.where()[0], made)
        ctx.tracing = tracing
        ctx.save_for_backward(query, key, value, out, sums, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *_gradient: Any) -> Any:
        tracing = ctx.tracing
        tracing.add("attend_backward", "attention")
        tracing.is_quiet = True
        given = ctx.saved_tensors[:3]
        bias = [torch.zeros_like(ctx.saved_tensors[-1]) if ctx.needs_input_grad[-1] else None]
        out = [
            each.new_zeros(each.shape[0], each.shape[2], each.shape[1], each.shape[3]).transpose(1, 2)
            if wanted
            else None
            for each, wanted in zip(given, ctx.needs_input_grad[2:5], strict=True)
        ]
        tracing.is_quiet = False
        return None, None, *out, *bias


class _Normalize(torch.autograd.Function):
    """torch's RMS norm as one operator forward and one backward, as a GPU runs it; a CPU runs its parts."""

    @staticmethod
    def forward(ctx: Any, tracing: _Tracing, shape: Any, weight: Any, given: Any) -> Any:
        tracing.is_quiet = True
        out = torch.empty_like(given, memory_format=torch.contiguous_format)
        scale = torch.zeros(given.shape[: given.dim() - len(shape)], dtype=torch.float32, device=given.device)
        tracing.is_quiet = False
        read = [each for each in (given, weight) if each is not None]
        for name, kind, reads, writes in _list_copies((given,)):
            tracing.add(name, kind, reads, writes)
        tracing.add("_fused_rms_norm", "norm", _list_sizes(read), _list_sizes((out, scale)))
        for made in (out, scale):
            tracing.note_made(tracing.where()[0], made)
        ctx.tracing = tracing
        ctx.save_for_backward(given, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tracing, (given, weight, scale) = ctx.tracing, ctx.saved_tensors
        wants_weight, wants_given = weight is not None and ctx.needs_input_grad[2], ctx.needs_input_grad[3]
        tracing.is_quiet = True
        out = torch.empty_like(given, memory_format=torch.contiguous_format) if wants_given else None
        own = torch.zeros_like(weight) if wants_weight else None
        tracing.is_quiet = False
        for name, kind, reads, writes in _list_copies(gradients):
            tracing.add(name, kind, reads, writes)
        read = [each for each in (gradients[0], given, scale, weight) if each is not None]
        made = [each for each in (out, own) if each is not None]
        tracing.add("_fused_rms_norm_backward", "norm_backward", _list_sizes(read), _list_sizes(made))
        return None, None, own, out


def _attend_plainly(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float = 0.0, scale: float | None = None, **_named: object
) -> Any:
    """SDPA's plain products, as PyTorch runs them on a GPU in a half-precision model: in float32."""
    root = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
    scores = (query.float() * root) @ (key.float() * root).transpose(-2, -1)
    weights = torch._safe_softmax(scores.add_(mask), -1)
    if dropout_p:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    return (weights @ value.float()).to(query.dtype)


@contextmanager
def _fused(tracing: _Tracing) -> Iterator[None]:
    """Inside, attention and dropout are one operator each, as a GPU's fused kernels are, and lists are seen made."""
    functional: Any = torch.nn.functional
    before, dropped = functional.scaled_dot_product_attention, functional.dropout
    normalized = functional.rms_norm

    def attend(query: Any, key: object, value: object, attn_mask: object = None, *args: object, **kwargs: Any) -> Any:
        if query.dim() != 4:
            return before(query, key, value, attn_mask, *args, **kwargs)
        kind, bias = "attention", None
        if isinstance(attn_mask, torch.Tensor):
            if any(attn_mask is each for each in biases):  # no fused kernel reads it as it lies in memory
                tracing.add("attend", "attention_plain")
                given = narrow((query, key, value, attn_mask))
                with below():
                    return _attend_plainly(*given, **kwargs)
            kind = "attention_masked"
            if attn_mask.requires_grad:
                kind, bias = "attention_biased", attn_mask.expand(*query.shape[:-1], attn_mask.shape[-1])
        return _Attend.apply(tracing, kind, *narrow((query, key, value)), bias)  # type: ignore[no-untyped-call]

    def drop(given: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or inplace or not 0 < p < 1:
            return dropped(given, p, training, inplace)
        return torch.native_dropout(given, p, True)[0]

    def tolist(tensor: torch.Tensor) -> Any:
        tracing.add("tolist", "read")  # no operator where the tensor is on the host, as it is here
        return list_values(tensor)

    def normalize(
        given: object, normalized_shape: object, weight: object = None, *_eps: object, **_named: object
    ) -> Any:
        return _Normalize.apply(tracing, normalized_shape, weight, given)  # type: ignore[no-untyped-call]

    def make_bias(position_bias: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """T5's bias: heads come last in memory. 5.17, which predictions are of, leaves it so; others copy it."""
        made = add_bias(position_bias, *args, **kwargs)
        biases[:] = [made] if position_bias.stride(-1) > 1 else []
        return made

    biases: list[Any] = []
    add_bias, sdpa_attention.create_position_bias_mask = sdpa_attention.create_position_bias_mask, make_bias
    list_values: Any = torch.Tensor.tolist
    functional.scaled_dot_product_attention, functional.dropout = attend, drop
    functional.rms_norm = normalize
    torch.Tensor.tolist = tolist  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = before, dropped
        functional.rms_norm, sdpa_attention.create_position_bias_mask = normalized, add_bias
        torch.Tensor.tolist = list_values  # type: ignore[method-assign]


def trace_operators(model: torch.nn.Module, forward: Callable[[], Any]) -> Trace:
    """Run forward(); where it returns a loss, its backward pass too, and forward() once more for what is kept."""
    tracing = _make(model)
    with (
        watch_modules(model, tracing.enter, tracing.leave),
        _fused(tracing),
        torch.autograd.set_multithreading_enabled(False),
        tracing,
    ):
        loss = forward()
        if loss is None:
            return Trace(tracing.events, [])
        for path in _list_nodes(loss, tracing):
            tracing.events.append(Event(path, "backward", "node", "node"))
        loss.backward()
    keeping = _make(model)
    # Apart: with hooks, autograd dispatches operators of its own where it hands a tensor back. No backward pass
    # follows, so it keeps nothing itself: a node that keeps its own output would never end.
    hooks = torch.autograd.graph.saved_tensors_hooks(keeping.keep, lambda nothing: nothing)
    with watch_modules(model, keeping.enter, keeping.leave), _fused(keeping), keeping, hooks:
        loss = forward()
    kept = [
        Kept(made_by, letter, elements, tuple(savers)) for made_by, letter, elements, savers in keeping.kept.values()
    ]
    for each in (tracing, keeping):
        each.let_go()
    return Trace(tracing.events, kept)


def _make(model: torch.nn.Module) -> _Tracing:
    tracing = _Tracing()
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            tracing.owners.setdefault(id(parameter), path)
    tracing.parameters = {
        each.untyped_storage()._cdata for group in (model.parameters(), model.buffers()) for each in group
    }
    return tracing


def _list_nodes(loss: torch.Tensor, tracing: _Tracing) -> list[str]:
    """The module of every autograd node that the backward pass will run."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    found = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.append(tracing.owners.get(id(node.variable), "?"))
        else:
            found.append(tracing.find(node._sequence_nr()))
        waiting += [following for following, _ in node.next_functions]
    return [path for path in found if path != "?"]
