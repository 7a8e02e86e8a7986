"""Trainers: each DP-SGD gradient equals a plain loop over single samples, and what Opacus gets wrong is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flopcalc.api import bind
from flopcalc.measure.calibrate.tables.counts import get_config
from flopcalc.measure.counters.flop_counter import count_flops
from flopcalc.measure.hf.models import build_model
from flopcalc.measure.sweep import trainers
from flopcalc.measure.sweep.matrix import TRAINERS
from flopcalc.measure.sweep.trainers import SampleLoss, TrainerError, make_trainer

Json = dict[str, Any]
STANDARD, HOOKS, GHOST, FAST = TRAINERS
PRIVATE = (HOOKS, GHOST, FAST)
_LLAMA: Json = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_GPT2: Json = {
    "model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, Json] = {
    "llama": {"model_type": "llama", **_LLAMA},
    "tied": {"model_type": "llama", **_LLAMA, "tie_word_embeddings": True},
    "biases": {"model_type": "qwen2", **_LLAMA},  # of q, k, v
    "gpt2": {**_GPT2, "tie_word_embeddings": False},  # learned positions, LayerNorm, a linear layer of HF's own
    "gpt2-tied": _GPT2,
}
# HF's Llama normalizes and rotates in fp32, whatever its weights are; GPT-2 stays in fp64 from end to end.
TOLERANCES = {"llama": 1e-6, "tied": 1e-6, "biases": 1e-6, "gpt2": 1e-12, "gpt2-tied": 1e-12}
# Every kind of model in the full run, one that is tied and one that is not in the default one.
CASES = [
    pytest.param(case, name, marks=() if case in ("llama", "gpt2-tied") else pytest.mark.heavy)
    for case in CONFIGS
    for name in TRAINERS
    if not ("tied" in case and name == GHOST)
]


def build(case: str | Json, dtype: torch.dtype = torch.float64, attention: str = "eager") -> Any:
    return build_model(CONFIGS[case] if isinstance(case, str) else case, attention, dtype=dtype).train()


def make_batch(rows: int = 3, length: int = 7) -> dict[str, Tensor]:
    """Samples with different numbers of targets: a mean over the whole batch would be another loss."""
    tokens = torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[1, length // 2 :] = -100
    return {"input_ids": tokens, "labels": labels}


def list_sample_gradients(model: Any, batch: dict[str, Tensor]) -> tuple[list[list[Tensor]], list[float]]:
    """Every sample alone through the plain model: its gradients, and their norm over all parameters."""
    trained = [each for each in model.parameters() if each.requires_grad]
    found, norms = [], []
    for row in range(len(batch["input_ids"])):
        logits = model(input_ids=batch["input_ids"][row : row + 1], use_cache=False).logits[0, :-1]
        loss = nn.functional.cross_entropy(logits, batch["labels"][row, 1:], ignore_index=-100)
        gradients = list(torch.autograd.grad(loss, trained))
        found.append(gradients)
        norms.append(float(torch.cat([each.flatten() for each in gradients]).norm()))
    return found, norms


def average_clipped(gradients: list[list[Tensor]], norms: list[float], bound: float) -> list[Tensor]:
    factors = [min(1.0, bound / (norm + 1e-6)) for norm in norms]
    return [
        sum(factor * each for factor, each in zip(factors, column, strict=True)) / len(norms)
        for column in zip(*gradients, strict=True)
    ]


def list_gradients(model: Any) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.requires_grad]


def assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Against the largest gradient of all: some are zero in truth (a key's bias), and noise has no relative error."""
    largest = max(float(each.abs().max()) for each in expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * largest)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are tiny, and tests run beside each other: more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- The same gradient as a plain loop --------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "name"), CASES)
def test_gradient_is_that_of_a_loop_over_samples(case: str, name: str) -> None:
    model, batch = build(case), make_batch()
    gradients, norms = list_sample_gradients(model, batch)
    bound = sum(norms) / len(norms)  # some samples are clipped, some are not
    assert min(norms) < bound < max(norms)
    make_trainer(name, model, max_grad_norm=bound, noise_multiplier=0).step(batch)
    expected = average_clipped(gradients, norms, float("inf") if name == STANDARD else bound)
    assert_equal(list_gradients(model), expected, TOLERANCES[case])


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("lengths", [(7,), (2, 7, 4)])
def test_padding_is_as_if_it_were_not_there(name: str, lengths: tuple[int, ...]) -> None:
    """One sample, and several of different lengths: each gradient is that of the sample alone, without padding."""
    tokens = make_batch(3)["input_ids"][: len(lengths)]
    mask = (torch.arange(7) < torch.tensor(lengths)[:, None]).long()
    reference = build("gpt2")
    found = [
        list_sample_gradients(reference, {"input_ids": row[None, :length], "labels": row[None, :length]})
        for row, length in zip(tokens, lengths, strict=True)
    ]
    gradients, norms = [each[0][0] for each in found], [each[1][0] for each in found]
    bound = 0.9 * max(norms)
    model = build("gpt2")
    trainer = make_trainer(name, model, max_grad_norm=bound, noise_multiplier=0)
    trainer.step({"input_ids": tokens, "attention_mask": mask})  # without labels: padding is no target
    expected = average_clipped(gradients, norms, float("inf") if name == STANDARD else bound)
    assert_equal(list_gradients(model), expected, 1e-12)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_sample_without_targets_has_no_gradient(name: str) -> None:
    batch = make_batch()
    batch["labels"][0] = -100
    model = build("gpt2")
    gradients, norms = list_sample_gradients(model, {key: value[1:] for key, value in batch.items()})
    make_trainer(name, model, max_grad_norm=1e9, noise_multiplier=0).step(batch)
    gradients.append([torch.zeros_like(each) for each in gradients[0]])
    assert_equal(list_gradients(model), average_clipped(gradients, [*norms, 0.0], float("inf")), 1e-12)


def test_loss_is_hf_own_where_rows_are_full() -> None:
    model = build("gpt2")
    tokens = make_batch()["input_ids"]
    expected = model(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(
        SampleLoss()(model(input_ids=tokens).logits, tokens), expected.double(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("name", PRIVATE)
def test_without_noise_and_bound_it_is_plain_training(name: str) -> None:
    batch = make_batch()
    losses, weights = [], []
    for each in (STANDARD, name):
        model = build("gpt2")
        trainer = make_trainer(each, model, max_grad_norm=1e9, noise_multiplier=0)
        losses.append([float(trainer.step(batch)) for _ in range(3)])
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert losses[0][2] < losses[0][0]
    for plain, private in zip(*weights, strict=True):
        torch.testing.assert_close(private, plain, rtol=0, atol=1e-6)  # AdamW magnifies what is nearly 0


def test_noise_is_the_seed_s() -> None:
    batch = make_batch()

    def run(name: str, noise: float, seed: int) -> Tensor:
        model = build("llama")
        make_trainer(name, model, noise_multiplier=noise, max_grad_norm=2.0, seed=seed).step(batch)
        return torch.cat([each.flatten() for each in list_gradients(model)])

    clean = run(HOOKS, 0.0, 0)
    noises = [run(name, 1.5, 0) - clean for name in PRIVATE]
    for each in noises:
        torch.testing.assert_close(each, noises[0], rtol=0, atol=1e-6)
        assert float(each.std()) == pytest.approx(1.5 * 2.0 / 3, rel=0.02)  # of 25,088 numbers; multiplier · norm / B
    assert not torch.equal(run(HOOKS, 1.5, 1) - clean, noises[0])


@pytest.mark.parametrize("name", TRAINERS)
def test_bf16_goes_the_same_way(name: str) -> None:
    batch = make_batch()
    found = []
    weights = build("llama", torch.bfloat16).state_dict()
    for dtype in (torch.float64, torch.bfloat16):
        model = build("llama", dtype, "sdpa")
        model.load_state_dict(weights)
        loss = make_trainer(name, model, noise_multiplier=0).step(batch)
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert all(each.dtype == dtype for each in list_gradients(model))
        found.append(torch.cat([each.flatten().double() for each in list_gradients(model)]))
    assert float(nn.functional.cosine_similarity(*found, dim=0)) > 0.999
    assert float(found[1].norm() / found[0].norm()) == pytest.approx(1, abs=0.02)


def test_frozen_parameters_stay_and_need_no_gradient() -> None:
    model = build("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    batch = make_batch()
    gradients, norms = list_sample_gradients(model, batch)
    bound = sum(norms) / len(norms)
    for name in PRIVATE:
        copied = build("llama")
        copied.model.embed_tokens.requires_grad_(False)
        copied.model.layers[0].requires_grad_(False)
        make_trainer(name, copied, max_grad_norm=bound, noise_multiplier=0).step(batch)
        assert_equal(list_gradients(copied), average_clipped(gradients, norms, bound), 1e-6)
        assert torch.equal(copied.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("name", PRIVATE)
def test_batches_may_differ_in_size(name: str) -> None:
    model = build("gpt2")
    trainer = make_trainer(name, model, learning_rate=0, max_grad_norm=5.0, noise_multiplier=0)  # weights stay
    trainer.step(make_batch(3))
    trainer.step(make_batch(2))
    gradients, norms = list_sample_gradients(build("gpt2"), make_batch(2))
    assert_equal(list_gradients(model), average_clipped(gradients, norms, 5.0), 1e-12)


# --- FLOPs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "name"), CASES)
def test_a_whole_step_counts_what_the_core_says(case: str, name: str) -> None:
    trainer = make_trainer(name, build(case, torch.float32))
    batch = make_batch(3, 11)
    trainer.step(batch)
    counted = count_flops(trainer.module, lambda: trainer.step(batch))
    assert counted.not_counted == {}
    core = bind(CONFIGS[case], convention="hardware", attention_kernel="eager", clipping=TRAINERS[name])
    assert counted.total == core(3, 11).total


# --- Traps: refused before the first step -----------------------------------------------------------------------------


def checkpoint(reentrant: bool) -> Any:
    model = build("gpt2")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def freeze_all() -> Any:
    return build("llama").requires_grad_(False)


def make_vision() -> Any:
    return build(get_config("qwen2_5_vl", "test"), torch.float32)


def make_encoder_decoder() -> Any:
    model = build("llama")
    model.config.is_encoder_decoder = True
    return model


def make_batch_norm() -> Any:
    model = build("llama")
    model.norm = nn.BatchNorm1d(4)
    return model


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        (GHOST, lambda: build("tied"), "tied weight .model.embed_tokens.weight = lm_head.weight.: untie it"),
        (HOOKS, lambda: checkpoint(False), 'leaves most parameters of GPT2LMHeadModel .*"use_reentrant": True'),
        (GHOST, lambda: checkpoint(True), "twice, which gradient checkpointing does not allow: switch it off"),
        (FAST, lambda: checkpoint(False), "twice, which gradient checkpointing does not allow: switch it off"),
        *[(name, make_vision, "vision_config.: its tower's rows are patches") for name in PRIVATE],
        *[(name, make_batch_norm, "Opacus does not take LlamaForCausalLM: .*BatchNorm") for name in PRIVATE],
        (STANDARD, make_encoder_decoder, "is an encoder-decoder: take a decoder-only model"),
        (FAST, freeze_all, "nothing of LlamaForCausalLM trains"),
        ("DPTrainer", lambda: None, "trainer 'DPTrainer' unknown. Did you mean StandardTrainer, DPSGDTrainer"),
    ],
)
def test_traps_are_refused_when_a_trainer_is_made(name: str, make: Callable[[], Any], words: str) -> None:
    with pytest.raises(TrainerError, match=words):
        make_trainer(name, make())


def test_a_tied_weight_that_is_frozen_is_no_trap() -> None:
    model = build("tied")
    model.lm_head.weight.requires_grad_(False)
    make_trainer(GHOST, model).step(make_batch())


def test_missing_opacus_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opacus", None)
    with pytest.raises(TrainerError, match=r"DPSGDTrainer needs Opacus: pip install 'flopcalc\[sweep\]'"):
        make_trainer(HOOKS, build("llama"))
    make_trainer(STANDARD, build("llama")).step(make_batch())


def test_hooks_with_reentrant_checkpointing_are_right() -> None:
    batch = make_batch()
    gradients, norms = list_sample_gradients(build("gpt2"), batch)
    model = checkpoint(True)
    make_trainer(HOOKS, model, max_grad_norm=1.0, noise_multiplier=0).step(batch)
    assert_equal(list_gradients(model), average_clipped(gradients, norms, 1.0), 1e-12)


# --- Traps: seen at the first step, before a weight has changed -------------------------------------------------------


class Positions(nn.Module):
    """A causal model of the common kind, but its positions are looked up once for all samples."""

    def __init__(self, uses: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.words, self.positions, self.head = nn.Embedding(97, 8), nn.Embedding(16, 8), nn.Linear(8, 97)
        self.uses = uses

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:  # noqa: ARG002
        states = self.words(input_ids)
        if self.uses:
            states = states + self.positions(torch.arange(input_ids.shape[1])[None])
        return SimpleNamespace(logits=self.head(states))


def hide_positions(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trainers, "_takes_positions", lambda _model: False)
    return build("gpt2")


def hide_checkpointing(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trainers.DPSGDTrainer, "_check_checkpointing", lambda *_: None)
    return checkpoint(False)


DIFFLLAMA = {"model_type": "diffllama", **_LLAMA}
FALCON = {
    "model_type": "falcon", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", **_LLAMA, "num_local_experts": 4}
OPT = {
    "model_type": "opt", "vocab_size": 97, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 16, "word_embed_proj_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        *[
            (each, lambda _: Positions(), r"of positions.weight has shape \(1.*\), not \(3.*\) for 3")
            for each in PRIVATE
        ],
        *[(each, lambda _: Positions(False), "positions.weight trains, but Opacus found no") for each in PRIVATE],
        # Without the guards above, the same errors: the check at the step does not lean on them.
        *[(each, hide_positions, r"of transformer.wpe.weight has shape \(1") for each in PRIVATE],
        (HOOKS, hide_checkpointing, "trains, but Opacus found no per-sample gradient"),
        *[(each, lambda _: build(OPT), "OPTForCausalLM fails under Opacus's hooks") for each in PRIVATE],
        (HOOKS, lambda _: build(FALCON), "FalconForCausalLM fails under Opacus's hooks .*modified inplace"),
        (FAST, lambda _: build(DIFFLLAMA), "DiffLlamaForCausalLM fails under Opacus's hooks .list index"),
        *[
            (each, lambda _: build(MIXTRAL, torch.float32), "MixtralForCausalLM fails under Opacus's hooks")
            for each in PRIVATE
        ],
    ],
)
def test_traps_are_seen_at_the_first_step(
    name: str, make: Callable[[pytest.MonkeyPatch], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(monkeypatch)
    before = [each.detach().clone() for each in model.parameters()]
    trainer = make_trainer(name, model)
    with pytest.raises(TrainerError, match=words):
        trainer.step(make_batch())
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", PRIVATE)
def test_a_later_step_is_checked_too(name: str) -> None:
    model = Positions(False)
    model.positions.requires_grad_(False)
    trainer = make_trainer(name, model)
    trainer.step(make_batch())
    trainer.check()
    trainer._parameters["positions.weight"] = model.positions.weight
    with pytest.raises(TrainerError, match=r"positions\.weight"):
        trainer.check()


@pytest.mark.parametrize("name", [GHOST, FAST])
def test_norms_of_the_step_before_are_not_taken_for_this_one_s(name: str) -> None:
    model = Positions(False)
    trainer = make_trainer(name, model)
    model.positions.weight._norm_sample = torch.ones(3)
    with pytest.raises(TrainerError, match=r"positions\.weight trains, but Opacus found no"):
        trainer.step(make_batch())


@pytest.mark.parametrize("name", PRIVATE)
def test_a_padding_token_is_clipped_wrongly_and_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIGS["llama"], "pad_token_id": 5}
    batch = make_batch()
    batch["input_ids"] = batch["input_ids"].where(batch["input_ids"] != 5, 6)
    trainer = make_trainer(name, build(config))
    trainer.step(batch)
    batch["input_ids"][0, 2] = 5
    with pytest.raises(TrainerError, match="token 5, the padding_idx of the input embedding"):
        trainer.step(batch)  # a later step too
    make_trainer(STANDARD, build(config)).step(batch)
    # The trap is real: without the guard the gradient is another than a plain loop's.
    monkeypatch.setattr(trainers.DPSGDTrainer, "_check_padding", lambda *_: None)
    model = build(config)
    gradients, norms = list_sample_gradients(model, batch)
    make_trainer(name, model, max_grad_norm=1.0, noise_multiplier=0).step(batch)
    with pytest.raises(AssertionError):
        assert_equal(list_gradients(model), average_clipped(gradients, norms, 1.0), 1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": torch.ones(3, 1, dtype=torch.long)}, r"at least 2 tokens\), not \(3, 1\)"),
        ({"input_ids": torch.ones(6, dtype=torch.long)}, r"not \(6,\)"),
        ({"position_ids": torch.arange(7)[None]}, r"position_ids has shape \(1, 7\), but input_ids has 3 samples"),
        ({"labels": torch.ones(2, 7, dtype=torch.long)}, r"labels has shape \(2, 7\)"),
        ({"labels": torch.ones(3, 6, dtype=torch.long)}, "give a label per token"),
    ],
)
def test_batches_without_a_row_per_sample_are_refused(change: dict[str, Tensor], words: str) -> None:
    with pytest.raises(TrainerError, match=words):
        make_trainer(STANDARD, build("gpt2")).step(make_batch() | change)
