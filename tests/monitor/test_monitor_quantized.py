"""The monitor in a loop that trains LoRA adapters over weights of four bits: it counts what estimate_flops counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopcalc import estimate_flops
from flopcalc.monitor import TrainingMonitor

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
}


class Params4bit(torch.nn.Parameter):
    """bitsandbytes' public attributes."""

    quant_type, compress_statistics, blocksize = "nf4", True, 64


class Linear4bit(torch.nn.Linear):
    """A stand-in of the same name; a real one computes with a dequantized copy, as this one does."""

    def __init__(self, plain: Any) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        packed = torch.zeros(plain.weight.numel() // 2, 1, dtype=torch.uint8)
        self.weight = Params4bit(packed, requires_grad=False)
        self.weight.quant_state = type("QuantState", (), {"shape": tuple(plain.weight.shape)})()
        self.compute_dtype = torch.float32
        self.register_buffer("copy", plain.weight.data, persistent=False)

    def forward(self, inputs: Any) -> Any:
        return torch.nn.functional.linear(inputs, self.copy)


def make_real(plain: Any) -> Any:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    made = bitsandbytes.nn.Linear4bit(
        plain.in_features, plain.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    made.weight = bitsandbytes.nn.Params4bit(plain.weight.data, requires_grad=False, quant_type="nf4")
    return made.to("cpu")


@pytest.mark.parametrize("make", [Linear4bit, make_real], ids=["stand-in", "bitsandbytes"])
@pytest.mark.filterwarnings("ignore")  # PEFT's and bitsandbytes' own
def test_lora_over_four_bits(make: Any, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    for path, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and path != "lm_head":
            model.set_submodule(path, make(module))
    adapted = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, adapted)
    monitor = TrainingMonitor(str(tmp_path), {"monitoring": {"mfu_calculation_mode": "estimate"}}, model=model)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.01)
    words = torch.ones(2, 8, dtype=torch.long)
    for step in range(2):
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log_step(step, 0, float(loss), 0.0, 0.01, attention_mask=torch.ones(2, 8))
    found = monitor.metrics()
    monitor.close()
    expected = estimate_flops(model, batch_size=2, seq_len=8)
    assert found["perf/model_flops"] == expected.total
    assert "nf4-double" in {held.format for held in expected.weights}
