"""Live modules of bitsandbytes and torchao: formats and bytes as stored, counts as those of the plain model.

The packages are no part of the test extra: where one is missing its tests are skipped, and stand-ins with the same
public attributes are read instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from flopcalc import bind, estimate_flops

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
Make = Callable[[Any], Any]


def make_model(dtype: Any = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(dtype)


def replace_linears(model: Any, make: Make) -> Any:
    for path, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and path != "lm_head":
            model.set_submodule(path, make(module))
    return model


def import_package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        pytest.skip(f"{name} is not installed")


def count_linear_numbers() -> int:
    return sum(module.weight.numel() for path, module in make_model().named_modules() if is_inner(path, module))


def is_inner(path: str, module: Any) -> bool:
    return type(module) is torch.nn.Linear and path != "lm_head"


def count_frozen(phase: str = "train", **recipe: Any) -> Any:
    """What the plain model counts with the same weights frozen."""
    model = make_model()
    for path, module in model.named_modules():
        if is_inner(path, module):
            module.weight.requires_grad_(False)
    return estimate_flops(model, batch_size=1, seq_len=8, phase=phase, **recipe)


# --- bitsandbytes -----------------------------------------------------------------------------------------------------
def make_8bit(module: Any) -> Any:
    nn = import_package("bitsandbytes").nn
    made = nn.Linear8bitLt(module.in_features, module.out_features, bias=False, has_fp16_weights=False)
    made.weight = nn.Int8Params(module.weight.data, has_fp16_weights=False, requires_grad=False)
    return made


def make_4bit(kind: str, is_double: bool) -> Make:
    def make(module: Any) -> Any:
        nn = import_package("bitsandbytes").nn
        made = nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=False,
            compute_dtype=torch.bfloat16,
            quant_type=kind,
            compress_statistics=is_double,
        )
        made.weight = nn.Params4bit(
            module.weight.data, requires_grad=False, quant_type=kind, compress_statistics=is_double
        )
        return made

    return make


@pytest.mark.parametrize(
    ("make", "name", "compute"),
    [
        (make_8bit, "int8", "int8"),
        (make_4bit("nf4", False), "nf4", "bf16"),
        (make_4bit("nf4", True), "nf4-double", "bf16"),
        (make_4bit("fp4", False), "fp4", "bf16"),
    ],
    ids=["int8", "nf4", "nf4-double", "fp4"],
)
def test_bitsandbytes(make: Make, name: str, compute: str) -> None:
    import_package("bitsandbytes")
    numbers = count_linear_numbers()
    for model in (replace_linears(make_model(), make), replace_linears(make_model(), make).to("cpu")):
        found = estimate_flops(model, batch_size=1, seq_len=8)
        plain = count_frozen()
        assert (found.forward, found.total) == (plain.forward, plain.total)
        held = {each.format: each for each in found.weights}
        assert held[name].parameters == numbers
        assert found.by_dtype()[compute].forward >= 2 * 8 * numbers
    real = sum(count_stored(parameter) for parameter in model.parameters())
    assert sum(each.bytes + each.scale_bytes for each in found.weights) == real


def count_stored(parameter: Any) -> int:
    """Bytes of a weight of bitsandbytes and of what it keeps beside; 8 bits: one float32 per row."""
    total = parameter.numel() * parameter.element_size()
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        held = [state.absmax, state.code]
        if state.nested:
            held += [state.state2.absmax]
            total += 4 * 1  # the mean; the table of the second scales is one for all weights
        total += sum(tensor.numel() * tensor.element_size() for tensor in held)
    elif type(parameter).__name__ == "Int8Params":
        total += 4 * parameter.shape[0]
    return int(total)


def test_qlora_over_bitsandbytes() -> None:
    import_package("bitsandbytes")
    peft = import_package("peft")
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    plain = estimate_flops(peft.get_peft_model(make_model(), peft.LoraConfig(**settings)), batch_size=1, seq_len=8)
    model = peft.get_peft_model(
        replace_linears(make_model(), make_4bit("nf4", True)).to("cpu"), peft.LoraConfig(**settings)
    )
    found = estimate_flops(model, batch_size=1, seq_len=8)
    assert (found.forward, found.backward, found.total) == (plain.forward, plain.backward, plain.total)
    assert {each.format for each in found.weights} == {"nf4-double", "bf16", "fp32"}
    # Adapters are float32, as PEFT makes them; under autocast they compute in bf16.
    assert set(found.by_dtype()) == {"bf16", "fp32"}
    assert set(bind(model, autocast=True)(1, 8).by_dtype()) == {"bf16"}


# --- torchao ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "name", "compute"),
    [
        ("Int8WeightOnlyConfig", "int8", "bf16"),
        ("Float8WeightOnlyConfig", "fp8", "bf16"),
        ("Int8DynamicActivationInt8WeightConfig", "int8", "int8"),
        ("IntxWeightOnlyConfig", "int8", "bf16"),
        ("Int8DynamicActivationIntxWeightConfig", "int8", "bf16"),
    ],
)
def test_torchao(config: str, name: str, compute: str) -> None:
    quantization = import_package("torchao").quantization
    model = make_model()
    quantization.quantize_(model.model, getattr(quantization, config)())
    found = estimate_flops(model, batch_size=1, seq_len=8, phase="forward")
    assert found.total == estimate_flops(make_model(), batch_size=1, seq_len=8, phase="forward").total
    assert {each.format: each.parameters for each in found.weights}[name] == count_linear_numbers()
    assert found.by_dtype()[compute].forward >= 2 * 8 * count_linear_numbers()
    real = 0
    for parameter in model.parameters():
        parts = [getattr(parameter, part, None) for part in ("qdata", "scale", "zero_point")]
        tensors = [part for part in parts if part is not None] or [parameter]
        real += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert sum(each.bytes + each.scale_bytes for each in found.weights) == real


# --- stand-ins --------------------------------------------------------------------------------------------------------
class Packed(torch.Tensor):
    """A tensor subclass with torchao's public attributes: the true shape and dtype outside, packed numbers inside."""

    block_size: Any
    act_quant_kwargs: Any = None
    zero_point: Any = None

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # torch's protocol
        return [], None


def make_stand_in(kind: str, **attributes: Any) -> Make:
    def make(module: Any) -> Any:
        made = torch.nn.Module()
        weight = module.weight.data.as_subclass(type(kind, (Packed,), attributes))
        made.weight = torch.nn.Parameter(weight, requires_grad=False)
        for key, value in attributes.items():
            setattr(made.weight, key, value)
        return made

    return make


HALF, WHOLE = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
CAST = {"block_size": [1, 128], "scale": WHOLE, "act_quant_kwargs": object()}


@pytest.mark.parametrize(
    ("kind", "attributes", "name", "bits", "group", "scale_bytes", "compute"),
    [
        ("Int4Tensor", {"block_size": [1, 32], "scale": HALF, "zero_point": HALF}, "int4", 4, 32, 4, "bf16"),
        ("Int8Tensor", {"block_size": [1, 128], "scale": HALF}, "int8", 8, 128, 2, "bf16"),
        ("Int8Tensor", CAST, "int8", 8, 128, 4, "int8"),
        ("Float8Tensor", {"block_size": [1, 128], "scale": WHOLE}, "fp8", 8, 128, 4, "bf16"),
        ("Float8Tensor", CAST, "fp8", 8, 128, 4, "fp8"),
        (
            "MXTensor",
            {"block_size": 32, "elem_dtype": torch.float8_e4m3fn, "scale": torch.zeros(1, dtype=torch.uint8)},
            "mxfp8",
            8,
            32,
            1,
            "bf16",
        ),
    ],
)
def test_stand_ins(
    kind: str, attributes: dict[str, Any], name: str, bits: int, group: int, scale_bytes: int, compute: str
) -> None:
    model = replace_linears(make_model(), make_stand_in(kind, **attributes))
    found = estimate_flops(model, batch_size=1, seq_len=8, phase="forward")
    assert found.total == estimate_flops(make_model(), batch_size=1, seq_len=8, phase="forward").total
    held = {each.format: each for each in found.weights}[name]
    blocks = sum(
        module.out_features * math.ceil(module.in_features / group)
        for path, module in make_model().named_modules()
        if is_inner(path, module)
    )
    assert (held.bytes, held.scale_bytes) == (count_linear_numbers() * bits // 8, blocks * scale_bytes)
    assert found.by_dtype()[compute].forward >= 2 * 8 * count_linear_numbers()


def test_unknown_tensor_is_refused_by_name() -> None:
    from flopcalc.base.errors import ConfigError

    model = replace_linears(make_model(), make_stand_in("Int3RotatedTensor", block_size=[1, 32]))
    with pytest.raises(ConfigError, match=r"Int3RotatedTensor, whose number format is not known: weights=FORMAT"):
        bind(model)
    assert bind(model, weights="int4")(1, 8).total > 0
