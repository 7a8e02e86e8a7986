"""Rows per expert of a live model's next training pass, counted on the device and written to a JSON file."""

from __future__ import annotations

import json
import threading
from typing import Any

import torch
from torch.compiler import is_compiling

from flopcalc.base.files import write_whole
from flopcalc.hardware.routing import KEY
from flopcalc.monitor.hooks import Idle
from flopcalc.monitor.messages import Say


def record_routing(model: Any, path: str, say: Say) -> list[Any]:
    """Hooks on the modules that HF's models give their tokens' choices of experts; each removes itself once used."""
    modules = {
        name: each
        for name, each in (model.named_modules() if model is not None else ())
        if name.endswith("experts") and isinstance(getattr(each, "num_experts", None), int)
    }
    if not modules:
        say("record_routing: the model has no module `experts` with num_experts, as HF's models with experts do")
    rows: dict[str, Any] = dict.fromkeys(modules)
    hooks = [_CountRows(rows, name, path, say) for name in modules]
    for hook in hooks:
        hook.handle = modules[hook.name].register_forward_pre_hook(hook)
    return [hook.handle for hook in hooks]


class _CountRows:
    """Counts one layer's rows; the last layer's starts the thread that reads and writes all counts."""

    def __init__(self, rows: dict[str, Any], name: str, path: str, say: Say) -> None:
        self.rows, self.name, self.path, self.say = rows, name, path, say
        self.handle: Any = None

    def __deepcopy__(self, _memo: dict[int, object]) -> Idle:
        return Idle()

    def __reduce__(self) -> tuple[Any, ...]:
        return Idle, ()

    def __call__(self, module: Any, args: tuple[Any, ...]) -> None:
        if is_compiling() or not module.training or self.rows[self.name] is not None:
            return
        self.handle.remove()
        try:
            chosen, experts = args[1].detach().flatten(), module.num_experts
            counts = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device)
            # Not bincount, which waits for the device. Choices beyond the last expert reach none.
            chosen = chosen.long().clamp(max=experts)
            self.rows[self.name] = counts.scatter_add_(0, chosen, torch.ones_like(chosen))[:experts]
        except Exception as error:
            self.say(f"record_routing: {self.name}: {type(error).__name__}: {error}")
        if all(each is not None for each in self.rows.values()):
            done = torch.cuda.current_stream().record_event() if args[1].is_cuda else None
            threading.Thread(target=self._write, args=(done,), daemon=True).start()

    def _write(self, done: torch.cuda.Event | None) -> None:
        try:
            if done is not None:
                done.synchronize()
            found = {KEY: [each.tolist() for each in self.rows.values()], "modules": list(self.rows)}
            write_whole(self.path, json.dumps(found) + "\n")
        except Exception as error:
            self.say(f"record_routing: {self.path} was not written: {error}")
