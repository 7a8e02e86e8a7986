"""A trainer's name and a causal language model in; one whole optimizer step per call out, plain or DP-SGD by Opacus.

Opacus says nothing where a module's rows are not samples, and gives wrong gradients. So what is known to go wrong is
refused when a trainer is made, and every step checks that each parameter's per-sample gradient has the batch's size.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from flopcalc.base.data import describe_install
from flopcalc.base.errors import FlopcalcError, format_nearest, format_value
from flopcalc.measure.sweep.matrix import TRAINERS

_IGNORED = -100  # a label that is no target, as HF marks it
_REASON_CHARACTERS = 300
_TOWERS = ("vision_config", "audio_config")
# Said at every backward pass: of an embedding's integers nobody wants a gradient, and Opacus hooks it all the same.
_HOOK_WARNING = "Full backward hook is firing when gradients are computed with respect to module outputs"


class TrainerError(FlopcalcError):
    """A model or a batch that a trainer cannot train rightly."""


class SampleLoss(torch.nn.Module):
    """Next-token cross-entropy: the mean of each sample's own targets, then the mean of the samples.

    HF's own loss is the mean of all targets of the batch, where a sample's share depends on the others' lengths. With
    rows of one length the two are equal. Opacus asks for one loss per sample by setting `reduction` to "none".
    """

    reduction = "mean"

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        targets = functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]  # position t predicts token t + 1
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)  # as HF: at least fp32
        losses = functional.cross_entropy(scores, targets.flatten(), ignore_index=_IGNORED, reduction="none")
        counts = (targets != _IGNORED).sum(1).clamp(min=1)
        samples = losses.view(targets.shape).sum(1) / counts
        return samples if self.reduction == "none" else samples.mean()


class StandardTrainer:
    """AdamW on the mean of the samples' losses."""

    def __init__(
        self, model: Any, learning_rate: float, max_grad_norm: float, noise_multiplier: float, seed: int
    ) -> None:
        self.name = type(self).__name__
        self._model = model
        self.module: torch.nn.Module = model  # what step() runs: the model, or Opacus's wrapper of it
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._check_model(model)
        # Positions that are looked up in a table without a batch dimension would have one gradient for all samples.
        self._needs_positions = _takes_positions(model) and _has_other_tables(model)
        self._batch_size = 0
        model.train()
        self._optimizer: Any = torch.optim.AdamW(self._parameters.values(), lr=learning_rate, fused=True)
        self._criterion: Any = SampleLoss()
        self._prepare(model, max_grad_norm, noise_multiplier, seed)

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One optimizer step; the loss stays on its device, so that nothing waits for it."""
        inputs, labels = self._read_batch(batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._criterion(self._forward(inputs), labels)
        self._backward(loss)
        self.check()
        self._optimizer.step()
        result: torch.Tensor = loss.detach()
        return result

    def check(self) -> None:
        """TrainerError unless every trained parameter has a gradient per sample; plain training needs none."""

    def _prepare(self, model: object, max_grad_norm: float, noise_multiplier: float, seed: int) -> None:
        """Hand model, optimizer and criterion to Opacus."""

    def _forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.module(**inputs, use_cache=False).logits
        return logits

    def _backward(self, loss: Any) -> None:
        loss.backward()

    def _check_model(self, model: Any) -> None:
        if not self._parameters:
            raise TrainerError(
                f"{self.name}: nothing of {type(model).__name__} trains: requires_grad is off everywhere"
            )
        if getattr(model.config, "is_encoder_decoder", False):
            raise TrainerError(
                f"{self.name} trains causal language models; {type(model).__name__} is an encoder-decoder: "
                "take a decoder-only model"
            )

    def _read_batch(self, batch: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs = dict(batch)
        labels: torch.Tensor | None = inputs.pop("labels", None)
        tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if tokens is None or tokens.dim() != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
            shape = None if tokens is None else tuple(tokens.shape)
            raise TrainerError(f"a batch needs input_ids of (samples, at least 2 tokens), not {shape}")
        size, length = (int(each) for each in tokens.shape)
        for key, value in batch.items():
            if not value.dim() or value.shape[0] != size:
                raise TrainerError(
                    f"{key} has shape {tuple(value.shape)}, but input_ids has {size} samples: "
                    "every tensor of a batch needs the samples first"
                )
        if self._needs_positions and "position_ids" not in inputs:
            inputs["position_ids"] = torch.arange(length, device=tokens.device).repeat(size, 1)
        if labels is None:
            labels = tokens
            if mask is not None and mask.shape == tokens.shape:
                labels = tokens.masked_fill(mask.eq(0), _IGNORED)  # padding is no target
        elif labels.shape != tokens.shape:
            raise TrainerError(
                f"labels has shape {tuple(labels.shape)}, input_ids {tuple(tokens.shape)}: give a label per token"
            )
        self._batch_size = size
        return inputs, labels


class DPSGDTrainer(StandardTrainer):
    """A gradient of every sample by hooks, each clipped to max_grad_norm, summed, noised, averaged.

    Batches are what step() is given: nothing is sampled, so no privacy budget is reported.
    """

    def check(self) -> None:
        for name, parameter in self._parameters.items():
            self._check_size(name, getattr(parameter, "grad_sample", None), tuple(parameter.shape))

    def _check_size(self, name: str, found: Any, shape: tuple[int, ...]) -> None:
        if found is None:
            raise TrainerError(
                f"{self.name}: {name} trains, but Opacus found no per-sample gradient of it: its module took no part "
                "in the loss, or Opacus does not know it; freeze it (requires_grad_(False)) or take StandardTrainer"
            )
        wanted = (self._batch_size, *shape)
        seen = tuple(found.shape) if isinstance(found, torch.Tensor) else f"{len(found)} tensors"
        if seen != wanted:
            raise TrainerError(
                f"{self.name}: per-sample gradient of {name} has shape {seen}, not {wanted} for {self._batch_size} "
                "samples: the first dimension of what its module reads is not the batch; give the model inputs with "
                "a row per sample (position_ids, say), freeze it (requires_grad_(False)) or take StandardTrainer"
            )

    def _check_model(self, model: Any) -> None:
        super()._check_model(model)
        kind = type(model).__name__
        towers = [key for key in _TOWERS if getattr(model.config, key, None) is not None]
        if towers:
            raise TrainerError(
                f"{self.name} cannot clip {kind} ({', '.join(towers)}): its tower's rows are patches or frames, which "
                "Opacus would take for samples; take its language model alone, or StandardTrainer"
            )
        if getattr(model, "is_gradient_checkpointing", False):
            self._check_checkpointing(model)

    def _check_checkpointing(self, model: Any) -> None:
        found = [each for each in map(_read_reentrant, model.modules()) if each is not None]
        if not all(found):
            raise TrainerError(
                f"{self.name}: non-reentrant gradient checkpointing leaves most parameters of {type(model).__name__} "
                "without per-sample gradients; switch it off (gradient_checkpointing_disable()), or take "
                'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})'
            )

    def _read_batch(self, batch: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs, labels = super()._read_batch(batch)
        self._check_padding(inputs["input_ids"])
        self._optimizer.expected_batch_size = self._batch_size  # what the sum of clipped gradients is divided by
        return inputs, labels

    def _check_padding(self, tokens: torch.Tensor) -> None:
        words = self._model.get_input_embeddings()
        index = getattr(words, "padding_idx", None)
        # To read a value makes the host wait for the device; few models have such an index.
        if index is not None and words.weight.requires_grad and bool((tokens == index).any()):
            raise TrainerError(
                f"{self.name}: the batch holds token {index}, the padding_idx of the input embedding: torch gives its "
                "row no gradient, Opacus clips as if it had one; set padding_idx of that module to None, or use "
                "another token"
            )

    def _prepare(self, model: object, max_grad_norm: float, noise_multiplier: float, seed: int) -> None:
        self._make_private(model, "hooks", max_grad_norm, noise_multiplier, seed)

    def _make_private(
        self, module: Any, mode: str, max_grad_norm: float, noise_multiplier: float, seed: int
    ) -> tuple[Any, ...]:
        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader, TensorDataset

        device = next(iter(self._parameters.values())).device
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Secure RNG turned off")  # here nothing is kept secret
                made: tuple[Any, ...] = PrivacyEngine().make_private(
                    module=module,
                    optimizer=self._optimizer,
                    criterion=self._criterion,
                    # Asked for the batch size and the rate of sampling alone; step() sets the one, nobody the other.
                    data_loader=DataLoader(TensorDataset(torch.zeros(1))),
                    noise_multiplier=noise_multiplier,
                    max_grad_norm=max_grad_norm,
                    poisson_sampling=False,
                    noise_generator=torch.Generator(device).manual_seed(seed),
                    grad_sample_mode=mode,
                )
        except (ValueError, NotImplementedError) as error:  # its validator's errors among them
            raise TrainerError(
                f"{self.name}: Opacus does not take {type(self._model).__name__}: {_shorten(error)}"
            ) from None
        self.module, self._optimizer = made[:2]
        return made

    def _forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        try:
            return super()._forward(inputs)
        except (AttributeError, NotImplementedError) as error:
            raise self._blame(error) from error
        except RuntimeError as error:
            if "BackwardHookFunction" not in str(error):  # a module changes in place what they handed it
                raise
            raise self._blame(error) from error

    def _backward(self, loss: object) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_HOOK_WARNING)
                super()._backward(loss)
        except (AttributeError, IndexError, NotImplementedError, TypeError) as error:
            raise self._blame(error) from error

    def _blame(self, error: Exception) -> TrainerError:
        """What Opacus's hooks raise of modules that they cannot take."""
        return TrainerError(
            f"{self.name}: {type(self._model).__name__} fails under Opacus's hooks ({_shorten(error)}): a module runs "
            "twice, is given more or other things than one tensor, or changes it in place; take StandardTrainer"
        )


class DPGhostClippingTrainer(DPSGDTrainer):
    """Norms of the samples' gradients without the gradients, then a second backward pass of the weighted losses."""

    _allows_tied = False

    def check(self) -> None:
        for name, parameter in self._parameters.items():
            # A parameter's own norms have no public name; the sum over parameters has, but hides which one is wrong.
            self._check_size(name, getattr(parameter, "_norm_sample", None), ())

    def _check_model(self, model: Any) -> None:
        super()._check_model(model)
        names: dict[Any, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        tied = next((found for each, found in names.items() if len(found) > 1 and each.requires_grad), None)
        if tied is not None and not self._allows_tied:
            raise TrainerError(
                f"{self.name} cannot clip a tied weight ({' = '.join(tied)}): untie it (tie_word_embeddings = false), "
                "freeze it, or take DPSGDTrainer or DPFastGradientClippingTrainer"
            )

    def _check_checkpointing(self, model: object) -> None:
        raise TrainerError(
            f"{self.name} goes back through the graph twice, which gradient checkpointing does not allow: switch "
            f"it off in {type(model).__name__} (gradient_checkpointing_disable()), or take DPSGDTrainer with "
            "use_reentrant=True"
        )

    def _prepare(self, model: object, max_grad_norm: float, noise_multiplier: float, seed: int) -> None:
        self._criterion = self._make_private(model, "ghost", max_grad_norm, noise_multiplier, seed)[2]

    def _backward(self, loss: object) -> None:
        for parameter in self._parameters.values():
            parameter._norm_sample = None  # the last step's must not pass for this one's
        try:
            super()._backward(loss)
        except (TrainerError, RuntimeError) as error:
            # Between its two passes Opacus stacks the norms of all parameters, and fails where one is missing or of
            # another size: check() says which.
            if "NoneType" in str(error) or "stack expects" in str(error):
                self.check()
            raise


class DPFastGradientClippingTrainer(DPGhostClippingTrainer):
    """As ghost clipping, but norms are taken of real per-sample gradients, made and thrown away layer by layer."""

    _allows_tied = True

    def _prepare(self, model: object, max_grad_norm: float, noise_multiplier: float, seed: int) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        try:
            wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=max_grad_norm, use_ghost_clipping=False)
        except NotImplementedError as error:
            raise TrainerError(f"{self.name}: Opacus does not take {type(model).__name__}: {_shorten(error)}") from None
        super()._prepare(wrapped, max_grad_norm, noise_multiplier, seed)


Trainer = StandardTrainer
_CLASSES: dict[str, type[StandardTrainer]] = {
    each.__name__: each
    for each in (StandardTrainer, DPSGDTrainer, DPGhostClippingTrainer, DPFastGradientClippingTrainer)
}


def make_trainer(
    name: str,
    model: object,
    *,
    learning_rate: float = 1e-3,
    max_grad_norm: float = 1.0,
    noise_multiplier: float = 1.0,
    seed: int = 0,
) -> Trainer:
    """The trainer of this name for a HF model; the model is trained in place, and by no other trainer after it."""
    if name not in TRAINERS:
        raise TrainerError(
            f"trainer {format_value(name)} unknown.{format_nearest(str(name), TRAINERS)} Known: {', '.join(TRAINERS)}"
        )
    try:
        return _CLASSES[name](model, learning_rate, max_grad_norm, noise_multiplier, seed)
    except ModuleNotFoundError as error:
        if error.name != "opacus":
            raise
        raise TrainerError(f"{name} needs Opacus: {describe_install('sweep')}") from None


def _takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def _has_other_tables(model: Any) -> bool:
    """Whether something besides the words is looked up in a table that trains: positions, most likely."""
    words = model.get_input_embeddings()
    return any(
        isinstance(each, torch.nn.Embedding) and each is not words and each.weight.requires_grad
        for each in model.modules()
    )


def _read_reentrant(module: object) -> bool | None:
    """Whether a module's checkpointing is reentrant; None where it has none."""
    if not getattr(module, "gradient_checkpointing", False):
        return None
    function = getattr(module, "_gradient_checkpointing_func", None)
    return bool(getattr(function, "keywords", {}).get("use_reentrant", False))


def _shorten(error: BaseException) -> str:
    return " ".join(str(error).split())[:_REASON_CHARACTERS]
