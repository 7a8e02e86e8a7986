"""Events of a Hugging Face Trainer go in; they drive a TrainingMonitor, and the Trainer's logs show its rates."""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from flopcalc.monitor.callback import MonitorCallback, guarded, pick_rates


class FlopcalcCallback(MonitorCallback, TrainerCallback):
    """`Trainer(callbacks=[FlopcalcCallback()])`: MFU in the progress bar, in `log_history` and in `flopcalc.jsonl`.

    Its monitor is `callback.monitor`, from the start of a training on, also after its end.
    """

    _has_threads = False  # of DataParallel, in the training that runs

    @guarded
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, _control: object, model: object = None, **_: object
    ) -> None:
        called = _find_called(model, args)
        others = [] if self._watched is not None else _find_others(_find_trainer(), called)
        found = {
            "sinks": _find_sinks(args),
            "tensorboard_dir": os.environ.get("TENSORBOARD_LOGGING_DIR"),  # where the Trainer's own values go
            **_find_shares(args),
        }
        cast = ("bf16" if args.bf16 else "fp16" if args.fp16 else "none") if hasattr(called, "_orig_mod") else None
        self._open([called, *others], args.output_dir or ".", found, cast)
        if getattr(args, "use_vllm", False) and self.monitor is not None:
            self.monitor.expect_pass("rollout")
        self._has_threads = args.n_gpu > 1
        if self._has_threads and self.monitor is not None:
            self.monitor.say(
                f"DataParallel over {args.n_gpu} devices in one process: MFU is a share of one device's peak; start "
                "the training with torchrun, one process for each device"
            )
        self._set_phase(args, state, is_first=True)

    def on_step_begin(self, *_: object, **__: object) -> None:
        # The first forward pass begins the step; the threads of DataParallel would begin one each.
        if self._has_threads and self._is_live and self.monitor is not None:
            self.monitor.begin_step()

    @guarded
    def on_step_end(self, args: TrainingArguments, state: TrainerState, _control: object, **_: object) -> None:
        self._end_step(state.global_step)
        self._set_phase(args, state)

    @guarded
    def on_log(
        self,
        _args: TrainingArguments,
        state: TrainerState,
        _control: object,
        logs: dict[str, object] | None = None,
        **_: object,
    ) -> None:
        if self.monitor is None or not self._is_live:
            return
        if logs is None or "loss" not in logs:  # of an evaluation, or the summary at the end
            return
        self._report(
            state.global_step,
            epoch=logs.get("epoch"),
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            learning_rate=logs.get("learning_rate"),
        )
        if not state.is_world_process_zero:
            return
        rates = pick_rates(self.monitor.metrics())
        logs.update(rates)  # for the progress bar, and callbacks whose turn comes later
        if state.log_history and "loss" in state.log_history[-1]:  # the Trainer put a copy of `logs` there before
            state.log_history[-1].update(rates)

    @guarded
    def on_evaluate(self, *_: object, **__: object) -> None:
        self._lose("eval")

    @guarded
    def on_predict(self, *_: object, **__: object) -> None:
        self._lose("eval")

    @guarded
    def on_save(self, *_: object, **__: object) -> None:
        self._lose("checkpoint")

    @guarded
    def on_train_end(self, _args: TrainingArguments, state: TrainerState, _control: object, **_: object) -> None:
        try:
            if not self._is_reported:  # steps after the last multiple of logging_steps
                self._report(state.global_step, epoch=state.epoch)
        finally:
            self._close()

    def _set_phase(self, args: TrainingArguments, state: TrainerState, is_first: bool = False) -> None:
        """Only at the start and where the warm-up ends: what a user sets in between stays."""
        if self.monitor is None or not self._is_live or not self.monitor.settings.phase_frequencies:
            return
        warmup_steps = args.get_warmup_steps(state.max_steps)
        if is_first and state.global_step < warmup_steps:
            self.monitor.set_phase("warmup")
        elif is_first or state.global_step == warmup_steps:
            self.monitor.set_phase("main")


def _find_trainer() -> Any:
    """The Trainer that calls: only it knows models besides the one that trains; None if it cannot be found."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "callback_handler") and hasattr(caller, "model"):
            return caller
        frame = frame.f_back
    return None


def _find_others(trainer: object, model: Any) -> list[Any]:
    """A reference, a teacher, reward models: what else a Trainer holds that has weights."""
    from torch.nn import Module

    if trainer is None:
        return []
    held = [value for value in vars(trainer).values() if isinstance(value, (Module, list, tuple))]
    found = [each for value in held for each in (value if isinstance(value, (list, tuple)) else (value,))]
    inside = {id(each) for each in model.modules()}
    others: dict[int, object] = {}
    for each in found:
        if not isinstance(each, Module) or id(each) in inside or next(each.parameters(), None) is None:
            continue
        if all(inner is not model for inner in each.modules()):  # a wrapper around it is not another one
            others[id(each)] = each
    return list(others.values())


def _find_sinks(args: TrainingArguments) -> tuple[str, ...] | None:
    """The sinks that the Trainer reports to, if the monitor has them; None leaves it to the monitor."""
    wanted = args.report_to or ()
    found = [name for name in ("tensorboard", "mlflow") if name in wanted]
    # The Trainer opens its run before this callback's turn; without a run, W&B was switched off.
    if "wandb" in wanted and getattr(sys.modules.get("wandb"), "run", None) is not None:
        found.append("wandb")
    return ("jsonl", *found) if found else None


def _find_shares(args: TrainingArguments) -> dict[str, int]:
    """How many ranks work on one sequence; under context parallelism a mesh of the weights does not show it."""
    layout = getattr(args, "parallelism_config", None)
    if layout is None:
        return {}
    return {
        "tensor_parallel": layout.tp_size or 1,
        "context_parallel": (layout.cp_size or 1) * (getattr(layout, "sp_size", None) or 1),
    }


def _find_called(model: object, args: TrainingArguments) -> Any:
    """The module whose inputs can be seen: the Trainer compiles a wrapper, and shows callbacks what is inside it."""
    if not args.torch_compile and os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() == "no":
        return model
    import gc

    from torch._dynamo.eval_frame import OptimizedModule

    wrappers = [each for each in gc.get_objects() if type(each) is OptimizedModule]
    return next((each for each in wrappers if any(inner is model for inner in each.modules())), model)
