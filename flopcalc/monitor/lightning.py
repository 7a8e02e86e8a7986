"""Events of a Lightning Trainer go in; a TrainingMonitor is driven, and its rates reach the Trainer's loggers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from flopcalc.monitor.callback import MonitorCallback, guarded, pick_rates

# Two packages hold the same classes; the Trainer most likely comes from the one that is imported already.
if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback

_MOST_PENDING = 16  # older reports that never came are given up
_AUTOCAST = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


class FlopcalcMonitor(MonitorCallback, Callback):
    """`Trainer(callbacks=[FlopcalcMonitor()])`: MFU in `flopcalc.jsonl` and in the Trainer's loggers.

    A record every `log_every_n_steps` steps. Its monitor is `callback.monitor`, also after the end of a fit.
    """

    _step = 0  # the Trainer's global step when a step last ended
    _steps = 0  # steps of this fit
    _is_open = False  # between the first micro-batch of a step and its end
    _is_hidden = False  # the whole module is compiled: inputs of the model inside cannot be seen
    _rate: Any = None  # the learning rate of the last optimizer step
    _losses: tuple[Any, ...] = ()  # of the micro-batches of this step
    _pending: tuple[tuple[int, int], ...] = ()  # reports on their way: global step, and the loggers' step
    _pause: AbstractContextManager[None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pause": None, "_losses": (), "_pending": (), "_is_open": False}

    @guarded
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = next((each.log_dir for each in trainer.loggers if each.log_dir), trainer.default_root_dir)
        models = _find_models(pl_module)
        self._is_hidden = getattr(pl_module, "_compiler_ctx", None) is not None
        is_compiled = self._is_hidden or hasattr(models[0], "_orig_mod")
        found = {
            "sinks": ("jsonl",),  # services are reached by the Trainer's own loggers
        }
        cast = _AUTOCAST.get(str(trainer.precision), "none") if is_compiled else None
        self._open(models, folder, found, cast)
        self._step, self._steps = trainer.global_step, 0
        self._is_open, self._losses, self._pending = False, (), ()
        self._time_saves(trainer)

    @guarded
    def on_train_batch_start(self, _trainer: Trainer, _module: LightningModule, batch: object, _index: int) -> None:
        if not self._is_live or self.monitor is None:
            return
        if self._is_hidden:
            self.monitor.begin_step(batch)
        elif not self._is_open:
            self.monitor.begin_step()
        self._is_open = True

    @guarded
    def on_before_optimizer_step(self, _trainer: Trainer, _module: LightningModule, optimizer: Any) -> None:
        self._rate = optimizer.param_groups[0]["lr"]  # at the batch's end a scheduler has set the next one

    @guarded
    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: object, _batch: object, _index: int
    ) -> None:
        if isinstance(outputs, Mapping) and outputs.get("loss") is not None:
            self._losses = (*self._losses, outputs["loss"])
        if trainer.global_step == self._step:  # gradients add up
            return
        self._step = trainer.global_step
        self._steps += 1
        self._is_open = False
        losses, self._losses = self._losses, ()
        self._end_step(self._step)
        every = getattr(trainer, "log_every_n_steps", 0)
        if every and self._steps % every == 0:
            # Where Lightning adds gradients up it has divided each loss by their usual number; the last step of an
            # epoch may have fewer. A sum of tensors does not wait for the device.
            usual = trainer.accumulate_grad_batches if module.automatic_optimization else 1
            self._send(trainer, loss=sum(losses) * usual / len(losses) if losses else None)

    @guarded
    def on_validation_start(self, trainer: Trainer, _module: LightningModule) -> None:
        # In the midst of a step, time before belongs to the step; else loaders start before this event.
        if self._is_live and self._is_open and self.monitor is not None and not trainer.sanity_checking:
            self._pause = self.monitor.pause("eval")
            self._pause.__enter__()

    @guarded
    def on_validation_end(self, trainer: Trainer, _module: LightningModule) -> None:
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.__exit__(None, None, None)
        elif not trainer.sanity_checking:
            self._lose("eval")

    @guarded
    def on_train_end(self, trainer: Trainer, _module: LightningModule) -> None:
        try:
            if not self._is_reported:
                self._send(trainer)
        finally:
            self._finish(trainer)
        self._log(trainer)  # what was still on its way

    @guarded
    def on_exception(self, trainer: Trainer, _module: LightningModule, _error: BaseException) -> None:
        self._finish(trainer)

    def _send(self, trainer: Trainer, loss: object = None) -> None:
        step = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", self._step)  # as Lightning's own metrics
        self._pending = (*self._pending[-_MOST_PENDING:], (self._step, step))
        self._report(self._step, epoch=trainer.current_epoch, loss=loss, learning_rate=self._rate)
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        """The newest record that the device is done with, to the loggers, once and under its own step."""
        if self.monitor is None or not trainer.is_global_zero:
            return
        metrics = self.monitor.metrics()
        step = dict(self._pending).get(metrics["global_step"])
        if step is None:
            return
        self._pending = tuple(each for each in self._pending if each[1] > step)
        rates = pick_rates(metrics)
        for logger in trainer.loggers if rates else ():
            logger.log_metrics(rates, step=step)

    def _time_saves(self, trainer: Trainer) -> None:
        """Lightning calls back before it writes a checkpoint, and never for weights alone: time the call."""
        save = trainer.save_checkpoint

        @functools.wraps(save)
        def run(*args: Any, **kwargs: Any) -> None:
            if self.monitor is None:
                return save(*args, **kwargs)
            with self.monitor.pause("checkpoint"):
                return save(*args, **kwargs)

        trainer.__dict__["save_checkpoint"] = run

    def _finish(self, trainer: Trainer) -> None:
        trainer.__dict__.pop("save_checkpoint", None)
        self._pause = None
        self._close()


def _find_models(module: object) -> list[Any]:
    """What a LightningModule calls: Hugging Face models, and other parts with weights; those that train come first."""
    found = _list_parts(module)
    trained = [each for each in found if any(weight.requires_grad for weight in each.parameters())]
    others = [each for each in found if all(each is not other for other in trained)]
    return [*trained, *others] or [module]


def _list_parts(module: Any) -> list[Any]:
    """Outermost Hugging Face models and modules without one inside; containers are not called, their parts are."""
    found: list[object] = []
    for each in module.children():
        if next(each.parameters(), None) is None:
            continue
        has_models = any(getattr(getattr(part, "config", None), "model_type", None) for part in each.modules())
        is_model = getattr(getattr(each, "config", None), "model_type", None)
        is_wrapped = hasattr(each, "_orig_mod") or hasattr(each, "get_base_model")
        is_list = type(each).__name__ in ("ModuleList", "ModuleDict")
        if is_model or is_wrapped or not (has_models or is_list):
            found.append(each)
        else:
            found += _list_parts(each)
    return list({id(each): each for each in found}.values())
