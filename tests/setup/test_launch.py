"""Launch files of every framework: what is taken, from where, what is not understood, and what wins."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hostile import OddPath

from flopcalc import ConfigError, FlopcalcError, estimate_flops, plan, predict
from flopcalc.cli import main
from flopcalc.setup.fields import Command
from flopcalc.setup.launch import FRAMEWORKS, apply_launch, read_launch

AXOLOTL = """
base_model: Qwen/Qwen3-8B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
lora_modules_to_save: [lm_head]
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: true}
bf16: auto
datasets: [{path: x, type: alpaca}]
learning_rate: 0.0002
weird_key: 3
"""
LLAMAFACTORY = """
model_name_or_path: Qwen/Qwen2-VL-7B-Instruct
stage: sft
finetuning_type: full
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
template: qwen2_vl
"""
SWIFT = """
model: Qwen/Qwen2.5-7B-Instruct
tuner_type: lora
torch_dtype: bfloat16
max_length: 2048
gradient_accumulation_steps: 16
gradient_checkpointing: false
lora_rank: 4
"""
MEGATRON_SWIFT = """
model: Qwen/Qwen3-4B-Instruct-2507
tuner_type: lora
max_length: 2048
micro_batch_size: 1
global_batch_size: 4
recompute_granularity: full
recompute_method: uniform
recompute_num_layers: 1
tensor_model_parallel_size: 2
lr: 1e-4
temperature: 1.0
"""
RAY_SWIFT = """
model: Qwen/Qwen3-4B
rlhf_type: grpo
max_length: 2048
micro_batch_size: 2
global_batch_size: 16
train: {gpus: 4, tuner_type: full, tensor_model_parallel_size: 2}
"""
LLAMAFACTORY_V1 = """
model: Qwen/Qwen3-4B
model_class: llm
peft_config: {name: lora, lora_alpha: 32}
kernel_config: {name: auto}
train_dataset: data/sft.yaml
micro_batch_size: 2
max_steps: 10
"""
TITAN = """
[job]
dump_folder = "out"
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 1
global_batch_size = 32
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""
TRL = """
model_name_or_path: openai-community/gpt2
use_peft: true
lora_target_modules: c_attn
max_length: 512
per_device_train_batch_size: 4
bf16: true
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
num_processes: 8
mixed_precision: bf16
fsdp_config: {fsdp_activation_checkpointing: true}
"""
DEEPSPEED = json.dumps({
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto",
})  # fmt: skip
MEGATRON = r"""
#!/bin/bash
export GPUS_PER_NODE=4
NNODES=${SLURM_NNODES:-"2"}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
)
MODEL_ARGS="
    --num-layers 4 \
    --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --kv-channels 16 \
    --group-query-attention --num-query-groups 2 \
    --seq-length 128 --vocab-size 1000 --make-vocab-size-divisible-by 64 --swiglu \
    --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 \
    --num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 48 --moe-layer-freq ([0]*1+[1]*3) \
    --moe-shared-expert-intermediate-size 96 --untie-embeddings-and-output-weights
"
TRAINING_ARGS=(
    --micro-batch-size 2   # on each GPU
    --global-batch-size 32
#   --bf16
    "--fp8-format hybrid"
    --use-distributed-optimizer --optimizer adam
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --tensor-model-parallel-size 2 --expert-model-parallel-size 2
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $MODEL_ARGS ${TRAINING_ARGS[@]} --mock-data
"""
MEGATRON_MODEL = {
    "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024, "tie_word_embeddings": False,
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
ARGUMENTS = json.dumps({
    "output_dir": "out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "fp16": True,
    "gradient_checkpointing": False, "odd": 1, "max_length": 100,
})  # fmt: skip
CASES: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    # file: text, framework, what estimate_flops is to be given, what is not understood
    "axolotl.yml": (
        AXOLOTL, "axolotl",
        {"model": "qwen3-8b", "seq_len": 4096, "batch_size": 2, "grad_accum": 4, "compute": "bf16", "weights": "nf4",
         "lora": {"r": 32, "targets": ("q_proj", "v_proj"), "save": ("lm_head",)}, "recompute": "full-reentrant"},
        ["weird_key"],
    ),
    "lf.yaml": (
        LLAMAFACTORY, "LLaMA-Factory",
        {"model": "qwen2-vl-7b", "seq_len": 2048, "grad_accum": 2, "compute": "bf16",
         "recipe": {"freeze": ("vision", "projector"), "recompute": "full-reentrant"}},
        [],
    ),
    "swift.yaml": (
        SWIFT, "ms-swift",
        {"model": "qwen2.5-7b", "seq_len": 2048, "grad_accum": 16, "compute": "bf16",
         "lora": {"r": 4, "targets": ("all-linear",)}},
        [],
    ),
    "regex.yml": (
        AXOLOTL.replace("[q_proj, v_proj]", "'model.layers.[\\d]+.(mlp|self_attn).(up|q)_proj'"), "axolotl",
        {"model": "qwen3-8b", "seq_len": 4096, "batch_size": 2, "grad_accum": 4, "compute": "bf16", "weights": "nf4",
         "lora": {"r": 32, "targets": (r"re:model.layers.[\d]+.(mlp|self_attn).(up|q)_proj",), "save": ("lm_head",)},
         "recompute": "full-reentrant"},
        ["weird_key"],
    ),
    "megatron.yaml": (
        MEGATRON_SWIFT, "ms-swift with Megatron",
        {"model": "qwen3-4b", "seq_len": 2048, "grad_accum": 4, "recompute": "full",
         "lora": {"r": 8, "targets": ("all-linear",)}},
        ["temperature"],
    ),
    "ray.yaml": (
        RAY_SWIFT, "ms-swift with Megatron",
        {"model": "qwen3-4b", "seq_len": 2048, "batch_size": 2, "gpus": 4, "tp": 2, "global_batch": 16,
         "objective": "grpo,completion=512,reference=yes"},
        [],
    ),
    "v1.yaml": (
        LLAMAFACTORY_V1, "LLaMA-Factory v1",
        {"model": "qwen3-4b", "seq_len": 2048, "batch_size": 2, "compute": "bf16", "recompute": "full",
         "lora": {"r": 8, "targets": ("all-linear",)}},
        [],
    ),
    "titan.toml": (
        TITAN, "torchtitan",
        {"model": "llama-3.1-8b", "seq_len": 8192, "batch_size": 1, "gpus": 16, "tp": 2, "global_batch": 32,
         "compute": "fp8", "recompute": "full"},
        [],
    ),
    "trl.yaml": (
        TRL, "TRL",
        {"model": "gpt2", "seq_len": 512, "batch_size": 4, "compute": "bf16", "recompute": "full",
         "lora": {"r": 16, "targets": ("c_attn",)}},
        [],
    ),
    "params.yaml": (
        TRL.replace("openai-community/gpt2", "Qwen/Qwen3-30B-A3B").replace("modules: c_attn", "modules: []")
        + "lora_target_parameters: [experts.down_proj]\nattn_implementation: eager\npacking: true\n"
        "padding_free: false\nactivation_offloading: true\n", "TRL",
        {"model": "qwen3-30b-a3b", "seq_len": 512, "batch_size": 4, "compute": "bf16", "recompute": "full",
         "lora": {"r": 16, "targets": ("param:experts.down_proj",)}, "attention_kernel": "eager"},
        ["packing: a row counts as one text of the full length, lengths gives those of the texts in it",
         "activation_offloading: what lies on the host is counted on the GPU"],
    ),
    "args.json": (
        ARGUMENTS, "HF TrainingArguments",
        {"model": "gpt2", "seq_len": 100, "batch_size": 2, "grad_accum": 8, "compute": "fp16"},
        ["odd"],
    ),
    "freeze.yaml": (
        "model_name_or_path: gpt2\nfinetuning_type: freeze\nfreeze_trainable_layers: 2\nstage: sft\n"
        "cutoff_len: 64\nper_device_train_batch_size: 2\ndisable_gradient_checkpointing: true\n", "LLaMA-Factory",
        {"model": "gpt2", "seq_len": 64, "batch_size": 2},
        ["finetuning_type, freeze_trainable_layers: counted as if all of it trained, train_only names what trains"],
    ),
}  # fmt: skip


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


class Done(NamedTuple):
    """What a command printed, and how it ended."""

    exit_code: Any
    stdout: str
    output: str  # errors too


def run(*arguments: str) -> Done:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
    return Done(code, out.getvalue(), out.getvalue() + err.getvalue())


@pytest.mark.parametrize("name", CASES)
def test_what_files_say(name: str, tmp_path: Path) -> None:
    text, framework, expected, unknown = CASES[name]
    path = write(tmp_path, name, text)
    model = "gpt2" if name == "args.json" else None  # these arguments name no model
    found = estimate_flops(model, launch=path, convention="hardware")
    same = estimate_flops(**expected, convention="hardware")
    assert (found.flops, found.terms[0].load) == (same.flops, same.terms[0].load)
    assert found.terms[0].estimator.recipe == same.terms[0].estimator.recipe
    assert found.terms[0].estimator.formats == same.terms[0].estimator.formats
    launch = read_launch(path)
    assert launch.frameworks == (framework,)
    assert list(launch.not_understood) == unknown
    assert any(note.startswith(f"taken from {name} ({framework}): ") for note in found.notes)


def test_command_prints_what_it_took_and_what_it_did_not_understand(tmp_path: Path) -> None:
    path = write(tmp_path, "axolotl.yml", AXOLOTL)
    shown = json.loads(run("estimate", "--launch", path, "--batch", "1", "--json").stdout)
    report = shown["launch"]
    assert report["frameworks"] == ["axolotl"]
    assert {each["option"]: each["key"] for each in report["taken"]} == {
        "model": "base_model",
        "seq": "sequence_len",
        "grad_accum": "gradient_accumulation_steps",
        "recompute": "gradient_checkpointing, gradient_checkpointing_kwargs.use_reentrant",
        "lora": "adapter, lora_target_modules, lora_r, lora_modules_to_save",
        "compute": "bf16",
        "weights": "load_in_4bit",
    }
    assert report["overridden"] == ["batch"]
    assert report["not_understood"] == ["weird_key"]
    assert shown["workload"]["batch"] == 1
    table = " ".join(run("estimate", "--launch", path).stdout.split())
    assert "seq 4096 from sequence_len" in table
    assert "not taken from the launch file: weird_key" in table


@pytest.mark.parametrize(
    ("options", "key", "expected"),
    [
        (["--seq", "100"], "seq", 100),
        (["--lengths", "100,200"], "lengths", [100, 200] * 2),
        (["--grad-accum", "2"], "grad_accum", 2),
    ],
)
def test_options_win_over_the_file(options: list[str], key: str, expected: Any, tmp_path: Path) -> None:
    path = write(tmp_path, "axolotl.yml", AXOLOTL)
    shown = json.loads(
        run("estimate", "qwen3-4b", "--lora", "r=2,targets=q_proj", "--launch", path, *options, "--json").stdout
    )
    assert shown["workload"][key] == expected
    assert shown["model"]["name"] == "qwen3-4b"
    assert shown["recipe"]["lora"]["r"] == 2


def test_torchtitan_defaults(tmp_path: Path) -> None:
    """Its global batch of -1 is what micro-batches make; checkpointing is selective unless a file says otherwise."""
    text = TITAN.replace("global_batch_size = 32", "global_batch_size = -1").partition("[activation_checkpoint]")[0]
    launch = read_launch(write(tmp_path, "titan.toml", text))
    assert (launch.taken["recompute"].value, launch.taken["recompute"].key) == ("selective", "torchtitan's default")
    assert "grad_accum" not in launch.taken


def test_axolotl_names_its_gpus(tmp_path: Path) -> None:
    text = AXOLOTL + "dp_shard_size: 4\ndp_replicate_size: 2\ntensor_parallel_size: 2\n"
    assert read_launch(write(tmp_path, "axolotl.yml", text)).taken["gpus"].value == 16


def test_two_files_and_gpus(tmp_path: Path) -> None:
    first, second = write(tmp_path, "trl.yaml", TRL), write(tmp_path, "accelerate.yaml", ACCELERATE)
    found = estimate_flops(launch=[first, second])
    assert (found.terms[0].load.rows, found.gpus, found.global_batch) == (4, 8, 32)  # 4 on each of 8 GPUs
    shown = json.loads(
        run("estimate", "--launch", first, "--launch", second, "--peak", "100T", "--step-time", "1", "--json").stdout
    )
    assert shown["mfu"]["value"] == pytest.approx(found.total / 8e14, rel=1e-12)


@pytest.mark.heavy
def test_predict_and_plan(tmp_path: Path) -> None:
    trl = write(tmp_path, "trl.yaml", TRL)
    shown = json.loads(run("predict", "--launch", trl, "--device", "h200", "--json").stdout)
    found = predict(launch=trl, device="h200")
    same = predict(
        "gpt2", device="h200", seq_len=512, batch_size=4, compute="bf16", recompute="full", lora="r=16,targets=c_attn",
        hf_trainer=True,
    )  # fmt: skip
    assert shown["step_time_s"]["mid"] == found.step_time_s.mid == same.step_time_s.mid
    assert shown["launch"]["frameworks"] == ["TRL"]
    text = TITAN.replace('converters = ["float8"]\n', "")
    plain = write(tmp_path, "plain.toml", text)
    planned = json.loads(run("plan", "--launch", plain, "--device", "h200", "--tokens", "1B", "--json").stdout)
    assert (planned["gpus"], planned["global_batch"]) == (16, 32)
    assert all(entry["layout"]["tp"] == 2 for entry in planned["best"])
    direct = plan(launch=plain, device="h200", tokens="1B")
    assert direct.to_dict()["best"] == planned["best"]
    missing = run("plan", "--launch", trl, "--device", "h200", "--tokens", "1B")
    assert missing.exit_code == 2
    assert "a plan needs --gpus: the number of GPUs" in missing.output


def make_bomb(table: str, entry: str) -> str:
    """YAML of nine tables, each of which names the one before ten times."""
    lines = ["a0: &a0 1"]
    for depth in range(1, 9):
        entries = ", ".join(entry.format(number, depth - 1) for number in range(10))
        lines.append(f"a{depth}: &a{depth} {table.format(entries)}")
    return "\n".join(["base_model: gpt2", *lines])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "base_model: [", "not valid YAML: "),
        ("a.yaml", "- 1\n- 2\n", "holds [1, 2], not a mapping of settings"),
        ("a.yaml", "base_model: !!python/object/apply:os.system ['true']", "not valid YAML: could not determine"),
        ("a.yaml", "nothing: known", "not a launch file of axolotl, LLaMA-Factory"),
        ("a.yaml", "base_model: 3\n", "a.yaml: base_model must be a name or path, not 3"),
        ("a.yaml", "base_model: gpt2\nsequence_len: -4\n", "a.yaml: sequence_len must be at least 1, not -4"),
        ("a.yaml", "base_model: mamba-130m\nadapter: lora\nsequence_len: 8\n", "PEFT has none by default for mamba"),
        (
            "a.yaml",
            "micro_batch_size: 1\nsequence_len: 8\n",
            "it does not say the whole model; name the model yourself",
        ),
        ("a.yaml", "base_model: no/such-model\nsequence_len: 8\n", "'no/such-model' is not a path"),
        ("a.yaml", "base_model: gpt2\nx: &x [*x]\n", "a.yaml: more than 10,000 entries, the most that is read"),
        ("a.yaml", make_bomb("{{{}}}", "k{}: *a{}"), "a.yaml: more than 10,000 entries"),
        ("a.yaml", make_bomb("[{}]", "*a{1}"), "a.yaml: more than 10,000 entries"),
        ("a.yaml", make_bomb("!!pairs [{}]", "k{}: *a{}"), "a.yaml: more than 10,000 entries"),
        ("a.yaml", make_bomb("{{<<: [{}]}}", "*a{1}").replace("1", "{x: 1}", 1), "a.yaml: more than 10,000 entries"),
        ("a.yaml", "base_model: gpt2\nsequence_len: '²'\n", "sequence_len must be a whole number, not '²'"),
        ("a.yaml", f"base_model: gpt2\nsequence_len: '{'9' * 5000}'\n", "sequence_len must be a whole number, not '9"),
        ("a.yaml", f"base_model: gpt2\nx: {'[' * 60}{']' * 60}\n", "a.yaml: more than 50 tables or lists inside"),
        ("a.yaml", f"base_model: gpt2\n#{'x' * 500_000}\n", "a.yaml: larger than 500000 bytes"),
        ("a.json", f'{{"x": {"[" * 500}{"]" * 500}}}', "a.json: more than 50 tables or lists inside"),
        ("a.toml", "[model\n", "not valid TOML: "),
        ("a.json", "{", "not valid JSON: "),
        ("a.txt", "", "a launch file other than a .sh script is a .yaml, .yml, .json, .toml file"),
    ],
)
def test_bad_files_are_one_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    done = run("estimate", "--launch", write(tmp_path, name, text))
    assert done.exit_code != 0
    assert message in done.output
    assert done.output.count("\n") == 1


def test_bad_arguments() -> None:
    for launch in (3, [], [3]):
        with pytest.raises(ConfigError, match="launch must be the path of a launch file"):
            estimate_flops(launch=launch)
    with pytest.raises(ConfigError, match="launch must be a path, not a OddPath"):
        estimate_flops(launch=OddPath())
    with pytest.raises(ConfigError, match="cannot be read"):
        estimate_flops(launch="no-such-file.yaml")
    with pytest.raises(ConfigError, match="which model"):
        estimate_flops(seq_len=3)


def test_arguments_beside_a_launch_file_are_handed_on(tmp_path: Path) -> None:
    path = write(tmp_path, "trl.yaml", TRL)
    found = estimate_flops(launch=path, phase="forward", logits=3, grad_accum=1, convention="full")
    expected = estimate_flops(
        "gpt2", batch_size=4, seq_len=512, phase="forward", logits=3, convention="full", lora="r=16,targets=c_attn"
    )
    assert found.flops == expected.flops
    with pytest.raises(FlopcalcError, match="guidance"):  # of pipelines alone: refused as without a launch file
        estimate_flops(launch=path, guidance=2.0)


def test_the_pixel_limit_needs_an_image(tmp_path: Path) -> None:
    path = write(tmp_path, "lf.yaml", LLAMAFACTORY + "image_max_pixels: 262144\n")
    assert "image_max_pixels: no image or video was given" in " ".join(estimate_flops(launch=path).notes)
    shown = json.loads(run("estimate", "--launch", path, "--image", "1024x1024", "--json").stdout)
    same = json.loads(run("estimate", "qwen2-vl-7b", "--seq", "2048", "--image", "512x512", "--json").stdout)
    assert shown["workload"]["patches"] == 2 * same["workload"]["patches"]  # two micro-batches
    assert shown["launch"]["not_understood"] == []


def test_every_framework_has_its_table() -> None:
    folder = Path(__file__).parents[2] / "flopcalc" / "setup" / "launch"
    assert {path.stem for path in folder.glob("*.toml")} == {*FRAMEWORKS, "noted", "peft"}


BASE = "per_device_train_batch_size: 1\nmax_length: 8\nmodel_name_or_path: gpt2\n"
OPTIMIZED: list[tuple[str, str, str, str | None]] = [
    # file, text, command, the optimizer that is taken; None: the command's own
    ("trl.yaml", BASE + "optim: adamw_bnb_8bit", "predict", "adamw-8bit"),
    ("trl.yaml", BASE + "optim: paged_adamw_8bit", "plan", "adamw-8bit"),
    ("trl.yaml", BASE + "optim: paged_adamw_32bit", "predict", "adamw-32bit"),
    ("trl.yaml", BASE + "optim: adamw_torch", "predict", "adamw-foreach"),
    ("trl.yaml", BASE + "optim: adamw_torch_fused", "predict", "adamw"),
    ("trl.yaml", BASE + "optim: adamw_torch_fused", "plan", None),  # with float32 weights beside
    ("trl.yaml", BASE + "optim: adamw_torch_fused", "estimate", None),
    ("args.json", json.dumps({"output_dir": "x", "model_name_or_path": "gpt2", "optim": "sgd"}), "predict", "sgd"),
    ("a.yml", "base_model: gpt2\noptimizer: ao_adamw_fp8\n", "predict", "adamw-fp8"),
    ("a.yml", "base_model: gpt2\noptimizer: lion_pytorch\n", "plan", "lion"),
    ("lf.yaml", BASE + "stage: sft\noptim: adamw_8bit\n", "predict", "adamw-8bit"),
    ("swift.yaml", "model: gpt2\nmax_length: 8\noptim: adamw_8bit\n", "predict", "adamw-8bit"),
    ("v1.yaml", LLAMAFACTORY_V1 + "optim_config: {name: adamw_8bit}\n", "predict", "adamw-8bit"),
    ("megatron.yaml", MEGATRON_SWIFT + "optimizer: adam\n", "plan", "adamw-master"),
    ("megatron.yaml", MEGATRON_SWIFT + "optimizer_cpu_offload: true\n", "plan", "adamw-offload"),
    ("titan.toml", TITAN + "[optimizer]\nname = 'AdamW'\n", "predict", "adamw"),
    ("ds.json", json.dumps({"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}), "plan",
     "adamw-master"),
    ("m.sh", MEGATRON, "plan", "adamw-master"),
    ("ds.json", json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}), "plan",
     "adamw-offload"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "command", "optimizer"), OPTIMIZED)
def test_the_optimizer_reaches_the_setup(
    name: str, text: str, command: Command, optimizer: str | None, tmp_path: Path
) -> None:
    applied = apply_launch(write(tmp_path, name, text), command, {"gpus": 16}, "gpt2")
    assert applied.options.get("optimizer") == optimizer
    assert not any("optim" in each for each in applied.report["not_understood"])


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", "lion_8bit"])
def test_an_optimizer_that_is_not_known_is_said(optimizer: str, tmp_path: Path) -> None:
    path = write(tmp_path, "trl.yaml", f"{BASE}optim: {optimizer}\n")
    for command, expected in (
        ("estimate", []),
        ("plan", [f"optim: {optimizer}, not known here; the default one is taken"]),
    ):
        applied = apply_launch(path, command, {"gpus": 1})
        assert (applied.report["not_understood"], applied.options.get("optimizer")) == (expected, None)


def test_deepspeed_says_the_stage_of_a_plan(tmp_path: Path) -> None:
    path = write(tmp_path, "ds.json", json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    applied = apply_launch(path, "plan", {}, "gpt2")
    assert (applied.options["zero"], applied.options["compute"]) == (3, "bf16")
    assert "zero" not in apply_launch(path, "estimate", {}, "gpt2").options


TRAIN = "--model_name_or_path gpt2 --per_device_train_batch_size 4 --max_length 64 --output_dir x"
ARGUED = {"model": "gpt2", "seq": 64, "batch": 4, "grad_accum": 1}
SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2"
LINES: list[tuple[str, tuple[str, ...], dict[str, Any], list[str]]] = [
    # line, frameworks, what is taken, what is not understood
    (f"accelerate launch --num_processes 8 --mixed_precision bf16 train.py {TRAIN}",
     ("HF TrainingArguments", "accelerate"), {**ARGUED, "gpus": 8, "compute": "bf16"}, []),
    (f"CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node=8 --nnodes 2 --rdzv_backend c10d train.py {TRAIN}",
     ("HF TrainingArguments", "torchrun"), {**ARGUED, "gpus": 16}, []),
    (f"python -m torch.distributed.run --nproc_per_node gpu train.py {TRAIN} --bf16",
     ("HF TrainingArguments", "torchrun"), {**ARGUED, "compute": "bf16"}, ["nproc_per_node: 'gpu'"]),
    (f"deepspeed --num_gpus=4 train.py --deepspeed ds.json {TRAIN}",
     ("HF TrainingArguments", "deepspeed"), {**ARGUED, "gpus": 4}, ["ds.json: not read"]),
    ("torchrun --nproc_per_node 8 train.py --width 3", ("torchrun",), {"gpus": 8}, ["width"]),
    ("accelerate launch --num_processes 2 sft.py --config sft.yaml --max_length 32",
     ("TRL", "accelerate"), {"model": "gpt2", "seq": 32, "gpus": 2, "batch": 1}, []),
    ("accelerate launch --config_file acc.yaml -m axolotl.cli.train axolotl.yml",
     ("axolotl", "accelerate"), {"model": "gpt2", "seq": 16, "gpus": 8}, []),
    ("NPROC_PER_NODE=8 swift rlhf --model gpt2 --max_length 64 --tuner_type full",
     ("ms-swift", "environment"), {"gpus": 8, "objective": "dpo", "seq": 64}, []),
    ("export MAX_PIXELS=1003520\nNPROC_PER_NODE=4\nexport NPROC_PER_NODE\nswift sft --model gpt2 --max_length 64",
     ("ms-swift", "environment"), {"gpus": 4, "max_pixels": 1003520, "seq": 64}, []),
    ("IMAGE_MAX_TOKEN_NUM=1024 swift sft --model gpt2 --max_length 64", ("ms-swift",), {"seq": 64},
     ["ENV.IMAGE_MAX_TOKEN_NUM"]),
    ("axolotl train axolotl.yml --launcher accelerate -- --num_processes 8",
     ("axolotl",), {"model": "gpt2", "gpus": 8}, []),
    ("llamafactory-cli train no-such.yaml --model_name_or_path gpt2 --stage sft",
     ("LLaMA-Factory",), {"model": "gpt2", "seq": 2048}, ["no-such.yaml: not read"]),
    (f"deepspeed --num_gpus 4 train.py --deepspeed ds3.json {TRAIN}",
     ("HF TrainingArguments", "deepspeed", "DeepSpeed"), {**ARGUED, "gpus": 4, "zero": 3, "optimizer": "adamw-offload"},
     ["zero_optimization.offload_param.device: what lies on the host is counted on the GPU"]),
    ("accelerate launch --use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP --fsdp_activation_checkpointing true "
     f"--num_processes 2 train.py {TRAIN}",
     ("HF TrainingArguments", "accelerate"), {**ARGUED, "gpus": 2, "zero": 2, "recompute": "full"}, []),
    ("NPROC_PER_NODE=8 megatron sft --model gpt2 --max_length 64 --tensor_model_parallel_size 2 --micro_batch_size 3",
     ("ms-swift with Megatron", "environment"), {"model": "gpt2", "gpus": 8, "seq": 64, "tp": 2, "batch": 3}, []),
    (f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --vocab-size 50257 --bf16 --expert-model-parallel-size 2",
     ("Megatron-LM", "torchrun"), {"gpus": 8, "seq": 128, "batch": 2, "ep": 2, "compute": "bf16"}, []),
    (f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --vocab-file v.json --rampup-batch-size 16 16 99",
     ("Megatron-LM", "torchrun"), {"gpus": 8},
     ["rampup-batch-size", "num-layers …: the model's vocabulary is not said, add --vocab-size N to the script"]),
]  # fmt: skip


def test_a_megatron_script_describes_its_model(tmp_path: Path) -> None:
    path = write(tmp_path, "run.sh", MEGATRON)
    found = read_launch(path)
    taken = {"tp": 2, "ep": 2, "gpus": 8, "zero": 1, "recompute": "full", "compute": "fp8", "global_batch": 32}
    assert {word: found.taken[word].value for word in taken} == taken
    assert found.not_understood == ()
    same = estimate_flops(MEGATRON_MODEL, seq_len=128, batch_size=2, global_batch=32, gpus=8, tp=2, recompute="full")
    assert estimate_flops(launch=path).total == same.total
    for more, message in (("--mtp-num-layers 1", "these arguments of Megatron: mtp_num_layers=1 is not mapped"),):
        with pytest.raises(ConfigError, match=message):
            read_launch(write(tmp_path, "other.sh", MEGATRON.replace("--mock-data", more)))


@pytest.mark.parametrize(("line", "frameworks", "taken", "unknown"), LINES)
def test_a_line_is_read_as_its_file_would_be(
    line: str, frameworks: tuple[str, ...], taken: dict[str, Any], unknown: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write(tmp_path, "sft.yaml", BASE)
    write(tmp_path, "axolotl.yml", "base_model: gpt2\nsequence_len: 16\n")
    write(tmp_path, "acc.yaml", ACCELERATE)
    write(tmp_path, "ds3.json", DEEPSPEED)
    monkeypatch.chdir(tmp_path)
    for launch in (line, write(tmp_path, "run.sh", line.replace(" --", " \\\n  --"))):
        found = read_launch(launch)
        assert found.frameworks == frameworks
        assert {word: found.taken[word].value for word in taken} == taken
        assert list(found.not_understood) == unknown
        assert ("gpus" in found.taken) == ("gpus" in taken)


def test_a_line_counts_on_its_gpus() -> None:
    found = estimate_flops(launch=LINES[0][0])
    assert found.total == estimate_flops("gpt2", seq_len=64, batch_size=4, gpus=8).total
    assert "taken from accelerate launch --num_processes 8 … (HF TrainingArguments)" in found.notes[0]
    with pytest.raises(ConfigError, match="make dinner: neither a file nor a line that starts a training"):
        estimate_flops(launch="make dinner")


def test_a_file_that_a_dropped_script_names_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "sft.yaml", BASE)
    monkeypatch.chdir(tmp_path)
    found = read_launch("trl sft --config sft.yaml --max_length 8", is_alone=True)
    assert "model" not in found.taken
    assert found.not_understood == ("sft.yaml: not read",)


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("Qwen/Qwen2.5-0.5B", "q_proj+v_proj"),
        ("meta-llama/Llama-3.1-8B", "q_proj+v_proj"),
        ("openai-community/gpt2", "c_attn"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", None),
    ],
)
def test_lora_without_targets_takes_those_of_peft(model: str, targets: str | None) -> None:
    """TRL's own examples name none; PEFT has a default for some types of models."""
    line = f"trl sft --model_name_or_path {model} --use_peft --lora_r 32 --max_length 64"
    if targets is None:
        with pytest.raises(ConfigError, match=r"PEFT has none by default for qwen2_5_vl: give lora=.r=16,"):
            estimate_flops(launch=line)
        assert estimate_flops(launch=line, lora="r=4,targets=all-linear").total > 0
        return
    assert estimate_flops(launch=line).total == estimate_flops(launch=line, lora=f"r=32,targets={targets}").total
