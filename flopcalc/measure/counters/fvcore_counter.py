"""A model and a batch go in; fvcore's forward count, a multiply-accumulate as 2 FLOPs, and its ledger come out."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from flopcalc.base.vocabulary import Phase
from flopcalc.measure.counters.witnessed import WitnessCount, ready_step
from flopcalc.measure.operator_kinds import ROTARY

# What fvcore counts that is a matrix product. Its figures for norms and resizing are not model FLOPs, nor are they
# multiply-accumulates, so they are left out.
PRODUCTS = ("linear", "matmul", "bmm", "addmm", "mm", "baddbmm", "conv", "einsum")


class _Positional(torch.nn.Module):
    """A HF model as the tracer wants it: tensors by position in, one tensor out."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self._names = names

    def forward(self, *tensors: torch.Tensor) -> Any:
        inputs = dict(zip(self._names, tensors, strict=True))
        return self.model(**inputs, use_cache=False, return_dict=False)[0]


def count(model: Any, batch: Mapping[str, Any], phase: Phase) -> WitnessCount:
    """fvcore traces a forward pass: for a training step it reports the forward part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it calls a deprecated part of torch
        from fvcore.nn import FlopCountAnalysis

    start = time.perf_counter()
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    wrapped = _Positional(model, tuple(inputs))
    with ready_step(model, batch, "forward"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer advises on every shape it reads
        analysis = FlopCountAnalysis(wrapped, tuple(inputs.values()))
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
        by_operator = {name: 2 * round(value) for name, value in analysis.by_operator().items()}
        by_module = analysis.by_module_and_operator()
        skipped = {str(name): int(calls) for name, calls in analysis.unsupported_ops().items()}
        unused = _find_unused(model, analysis.uncalled_modules())
    products = {name: by_operator[name] for name in PRODUCTS if by_operator.get(name)}
    for path in _find_rotary(wrapped):  # a product only in how a release writes it: excluded by convention
        for name, value in by_module.get(path, {}).items():
            if name in products:
                products[name] -= 2 * round(value)
    reasons = ["forward only"] if phase == "train" else []
    if unused:
        reasons.append(f"its trace drops work whose result nobody reads: {', '.join(unused)}")
    return WitnessCount(
        "fvcore",
        sum(products.values()),
        products,
        dict(sorted(skipped.items())),
        time.perf_counter() - start,
        "; ".join(reasons) or None,
    )


def _find_rotary(model: torch.nn.Module) -> list[str]:
    """Outermost rotary modules: fvcore's figure for a module includes its submodules."""
    found: list[str] = []
    for path, module in model.named_modules():
        is_rotary = any(word in type(module).__name__ for word in ROTARY)
        if is_rotary and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    return found


def _find_unused(model: torch.nn.Module, uncalled: set[str]) -> list[str]:
    """Outermost modules with matrices that are not in the trace (LLaVA's last tower layer, for example)."""
    paths = sorted(path.removeprefix("model.") for path in uncalled)
    found: list[str] = []
    for path in paths:
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        has_matrix = any(parameter.dim() > 1 for parameter in module.parameters())
        if path and has_matrix and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    return found
