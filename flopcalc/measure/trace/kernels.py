"""Triton kernels, given FakeTensors: one without products is not launched, one with products cannot be counted."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from flopcalc.base.errors import WorkloadError

_PRODUCT = re.compile(r"\bdot\w*\s*\(")  # tl.dot, tl.dot_scaled
_CLASSES = {"triton.runtime.jit": ("JITFunction",), "triton.runtime.autotuner": ("Autotuner", "Heuristics")}


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, a kernel that is given a FakeTensor leaves its outputs as they are; any other kernel runs."""
    kept: list[tuple[Any, Callable[..., Any]]] = []
    for module, names in _CLASSES.items():  # what is not imported launches nothing
        kept += [(each, each.run) for name in names if (each := getattr(sys.modules.get(module), name, None))]
    try:
        for kind, run in kept:
            kind.run = _skip_fakes(run)
        yield
    finally:
        for kind, run in kept:
            kind.run = run


def _skip_fakes(run: Callable[..., object]) -> Callable[..., Any]:
    def skip(kernel: object, *args: object, **kwargs: object) -> Any:
        if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            return run(kernel, *args, **kwargs)
        if _has_products(kernel, set()):
            raise WorkloadError(f"the products of its Triton kernel {_find_function(kernel).__name__} are not known")
        return None

    return skip


def _has_products(kernel: object, seen: set[int]) -> bool:
    """Whether a kernel, or a kernel that it calls, multiplies matrices."""
    if id(kernel) in seen:
        return False
    seen.add(id(kernel))
    function = _find_function(kernel)
    source = _find_jit(kernel).src
    if _PRODUCT.search(source):
        return True
    called = (function.__globals__.get(name) for name in function.__code__.co_names)
    return any(_has_products(each, seen) for each in called if hasattr(each, "src"))


def _find_jit(kernel: Any) -> Any:
    """The function that Triton compiles, below autotuning and heuristics."""
    while not hasattr(kernel, "src"):
        kernel = kernel.fn
    return kernel


def _find_function(kernel: object) -> Any:
    return _find_jit(kernel).fn
