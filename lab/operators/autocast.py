"""torch.autocast of a GPU, on a CPU: its casts of float32 tensors, by PyTorch's published lists of functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

# https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float16" and "… to float32", as far as
# models of transformers call them.
_NARROW = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "addmm", "addmv", "baddbmm", "addbmm", "einsum",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "scaled_dot_product_attention",
}  # fmt: skip
_WIDE = {
    "pow", "__pow__", "__rpow__", "rsqrt", "exp", "expm1", "log", "log1p", "log2", "reciprocal", "tan", "acos", "asin",
    "softplus", "layer_norm", "group_norm", "nll_loss", "mse_loss", "norm", "logsumexp", "cdist",
}  # fmt: skip
_SUMS = {"sum", "prod", "softmax", "log_softmax", "cumsum", "cumprod"}  # these take the wider format as an argument
_running: list[Autocast] = []


class Autocast(TorchFunctionMode):
    """Inside, products run in bf16, and what loses precision in it in float32; a weight is cast once."""

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Autocast:
        _running.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if not _running:
            return func(*args, **kwargs)
        if name == "cross_entropy" and args[0].dtype is torch.bfloat16:
            # It tells its softmax the format of its scores, which autocast then leaves; what follows is widened.
            given = {key: value for key, value in kwargs.items() if key != "label_smoothing"}
            return functional.nll_loss(_widen(torch.log_softmax(args[0], 1)), *args[1:], **given)
        if name in _NARROW:
            args, kwargs = tree_map_only(torch.Tensor, self.narrow, (args, kwargs))
        elif name in _WIDE:
            args, kwargs = tree_map_only(torch.Tensor, _widen, (args, kwargs))
        elif name in _SUMS and "dtype" not in kwargs and args[0].dtype is torch.bfloat16:
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf):
            return tensor.to(torch.bfloat16)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = tensor.to(torch.bfloat16)
        return self._weights[id(tensor)]


@contextmanager
def below() -> Iterator[None]:
    """Inside, nothing is cast: what one of torch's own operators does, which autocast sees as a whole."""
    kept, _running[:] = _running[:], []
    try:
        yield
    finally:
        _running[:] = kept


def narrow(tensors: Iterable[Any]) -> list[Any]:
    """The same under the autocast that runs, if one does: for what the tracer puts in a torch function's place."""
    return [_running[-1].narrow(each) if _running else each for each in tensors]


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor
