"""Objectives before a run: passes equal the steps of TRL's trainers, launch files say them, odd ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flopcalc import FlopcalcError, Workload, estimate_flops, mfu, predict
from flopcalc.setup.launch import apply_launch, read_launch

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101,
}  # fmt: skip
LORA = {"r": 4, "targets": ["q_proj", "v_proj", "up_proj"]}
REFERENCE = "grpo,completion=6,reference=yes"
# What the monitor counted in steps of TRL 1.16's trainers, whose executed FLOPs an operator counter confirmed
# (benchmarks/trl_steps.py, with prompts of 5 tokens and answers of 6, and 7 logits with the end token).
TRL = [
    ("dpo,completion=7", {}, {"train": 4800768, "reference": 1600256}),
    ("dpo,completion=7", {"lora": LORA}, {"train": 3453952, "reference": 1600256}),
    ("dpo,completion=7,reference=no", {}, {"train": 4800768}),
    ("reward", {}, {"train": 4258560}),
    ("grpo,completion=6", {}, {"train": 2361600, "rollout": 720128}),
    (REFERENCE, {}, {"train": 2361600, "rollout": 720128, "reference": 787200}),
    (REFERENCE, {"lora": LORA}, {"train": 1701120, "rollout": 781568, "reference": 787200}),
]


@pytest.mark.parametrize(("objective", "more", "passes"), TRL)
def test_passes_equal_those_of_trl(objective: str, more: dict[str, Any], passes: dict[str, int]) -> None:
    found = estimate_flops(CONFIG, batch_size=2, seq_len=11, objective=objective, **more)
    assert {name: flops.total for name, flops in found.by_pass().items()} == passes
    assert found.total == sum(passes.values()) == sum(flops.total for flops in found.by_component().values())
    assert sum(row.forward + row.backward for row in found.by_module()) == found.total
    assert found.tokens == 11 * (4 if objective.startswith(("dpo", "reward")) else 2)


def test_a_teacher_and_a_score_are_passes() -> None:
    teacher = {**CONFIG, "num_hidden_layers": 5}
    found = estimate_flops(CONFIG, seq_len=16, objective={"name": "distill", "teacher": teacher})
    own = estimate_flops(CONFIG, seq_len=16)
    assert found.by_pass()["reference"].total == estimate_flops(teacher, seq_len=16, phase="forward").total
    assert found.by_pass()["train"].total == own.total
    assert found.parameters == own.parameters
    scored = estimate_flops(CONFIG, seq_len=16, objective="grpo,completion=1,score=yes", logits="all")
    assert scored.by_pass()["score"].total == estimate_flops(CONFIG, seq_len=16, phase="forward").total
    assert scored.by_pass()["rollout"].total == estimate_flops(CONFIG, seq_len=15, phase="prefill").total


def test_a_job_multiplies_every_pass() -> None:
    one = estimate_flops(CONFIG, seq_len=16, objective="dpo")
    job = estimate_flops(CONFIG, seq_len=16, objective="dpo", gpus=4, global_batch=24, recompute="full")
    assert job.passes["train"].total == 24 * one.passes["train"].total
    assert job.total == 24 * one.total
    assert job.to_dict()["passes"]["reference"]["forward"] == 24 * one.passes["reference"].total
    assert job.global_batch == 48  # sequences; the batch is in pairs
    assert job.to_dict()["workload"]["grad_accum"] == 6
    assert not any("no backward pass" in note for note in job.notes)
    assert mfu(job, 1.0, peak=1e12).value == pytest.approx(job.total / 4e12)
    assert (2 * one).move(one.terms[0].estimator.device or _h200()).passes["train"].total == 2 * one.passes[
        "train"
    ].total
    assert "passes train" in job.describe()


def _h200() -> Any:
    from flopcalc.hardware.devices import find_device

    return find_device("h200")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"objective": "ppo"}, "ppo has passes that are not counted"),
        ({"objective": 3}, "a mapping, not 3"),
        ({"objective": "dpo,reference"}, "no KEY=VALUE"),
        ({"objective": "dpo,teacher=gpt2"}, "dpo has completion, reference, not 'teacher'"),
        ({"objective": "reward,x=1"}, "reward has no settings"),
        ({"objective": "dpo,reference=maybe"}, "reference must be True or False"),
        ({"objective": "grpo"}, "say how many"),
        ({"objective": "grpo,completion=16"}, "leave no prompt in 16"),
        ({"objective": "grpo,completion=2", "seq_len": None, "lengths": [4, 5]}, "sequences of one length"),
        ({"objective": "distill"}, "needs its teacher"),
        ({"objective": "dpo", "phase": "forward"}, "not phase forward"),
        ({"objective": "dpo", "trace": True}, "takes no objective"),
    ],
)
def test_what_makes_no_step_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopcalcError, match=words):
        estimate_flops(CONFIG, **{"seq_len": 16, **more})


def test_a_whole_workload_is_refused() -> None:
    with pytest.raises(FlopcalcError, match="from sizes"):
        estimate_flops(CONFIG, Workload(1, 8), objective="dpo")


VERL = """
# verl: hydra overrides
N=8
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.max_prompt_length=512 data.max_response_length=1024 data.train_batch_size=16 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-0.6B actor_rollout_ref.rollout.n=$N \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.use_kl_loss=True \\
    algorithm.use_kl_in_reward=False trainer.logger='["console"]' trainer.n_gpus_per_node=4 $@
"""
OPENRLHF = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \\
   --model.model_name_or_path Qwen/Qwen3-0.6B --data.max_len 2048 \\
   --train.batch_size 64 --train.micro_batch_size 2 --ds.param_dtype bf16 --ds.lora.rank 8 \\
   --model.gradient_checkpointing_enable
EOF
deepspeed --module $training_commands
"""
REINFORCE = """
ROLLOUT_ARGS=(
   --actor.model_name_or_path Qwen/Qwen3-0.6B
   # --reward.model_name_or_path none
   --data.max_len 4096
   --rollout.max_new_tokens 1024
   --train.batch_size 32
   --train.micro_batch_size 1
   --algo.kl.init_coef 0
   --algo.advantage.estimator rloo
)
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray ${ROLLOUT_ARGS[@]}
"""
EARLIER_DPO = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \\
   --train_batch_size 256 --micro_train_batch_size 1 --pretrain Qwen/Qwen3-0.6B --bf16 --max_len 8192 \\
   --zero_stage 3 --learning_rate 5e-7 --beta 0.1 --flash_attn --gradient_checkpointing
EOF
deepspeed --module $training_commands
"""
EARLIER_RL = """
ray job submit --runtime-env-json='{"working_dir": "/openrlhf"}' -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor_num_nodes 2 --actor_num_gpus_per_node 8 --vllm_num_engines 4 --advantage_estimator reinforce_baseline \\
   --colocate_all_models --rollout_batch_size 1024 --n_samples_per_prompt 8 \\
   --pretrain Qwen/Qwen3-0.6B --reward_pretrain none --micro_train_batch_size 4 --train_batch_size 128 \\
   --prompt_max_len 1024 --generate_max_len 512 --init_kl_coef 1e-4 --gradient_checkpointing
"""
TRL_GRPO = """
model_name_or_path: Qwen/Qwen3-0.6B
max_completion_length: 256
beta: 0.04
use_vllm: true
num_generations: 8
"""
TRL_DPO = "trl dpo --model_name_or_path Qwen/Qwen3-0.6B --precompute_ref_log_probs --max_length 512\n"
LLAMAFACTORY = "model_name_or_path: Qwen/Qwen3-0.6B\nstage: rm\nfinetuning_type: full\n"
SWIFT = """
model: Qwen/Qwen3-0.6B
tuner_type: full
rlhf_type: gkd
teacher_model: Qwen/Qwen3-8B
max_length: 512
"""
AXOLOTL = "base_model: Qwen/Qwen3-0.6B\nrl: grpo\ntrl: {max_completion_length: 64, beta: 0}\nsequence_len: 256\n"
# Text of a file, and what it means; without a comma or a known name: passes that are not counted.
MEANT = [
    ("a.yml", "base_model: gpt2\nrl: orpo\nsequence_len: 8\n", "dpo,reference=no"),
    ("a.yml", "base_model: gpt2\nrl: kto\nsequence_len: 8\n", "kto"),
    ("a.yml", "base_model: gpt2\nprocess_reward_model: true\n", "rewards of steps"),
    ("lf.yaml", "model_name_or_path: gpt2\nstage: dpo\nfinetuning_type: full\npref_loss: simpo\n", "dpo,reference=no"),
    ("lf.yaml", "model_name_or_path: gpt2\nstage: dpo\nfinetuning_type: full\npref_loss: sigmoid\n", "dpo"),
    ("lf.yaml", "model_name_or_path: gpt2\nstage: ppo\nfinetuning_type: full\n", "ppo"),
    ("lf.yaml", "model_name_or_path: gpt2\nstage: sft\nfinetuning_type: full\n", None),
    ("swift.yaml", "model: gpt2\ntuner_type: full\nrlhf_type: cpo\n", "dpo,reference=no"),
    ("swift.yaml", "model: gpt2\ntuner_type: full\nrlhf_type: kto\n", "kto"),
    ("swift.yaml", "model: gpt2\ntuner_type: full\nrlhf_type: grpo\n", "grpo,completion=512,reference=yes"),
    ("run.sh", "swift sft --model gpt2 --max_length 8\n", None),
    ("run.sh", "trl kto --model_name_or_path gpt2\n", "kto"),
    ("run.sh", "trl orpo --model_name_or_path gpt2\n", "dpo,reference=no"),
    ("run.sh", "trl sft --model_name_or_path gpt2\n", None),
    ("run.sh", "trl rloo --model_name_or_path gpt2\n", "rloo"),
    ("run.sh", "python examples/scripts/dpo.py --model_name_or_path gpt2\n", "dpo"),
    ("trl.yaml", "model_name_or_path: gpt2\nmax_length: 8\nbeta: 0.1\n", "preference training or RL"),
    ("trl.yaml", "model_name_or_path: gpt2\nmax_length: 8\n", None),
    ("verl.sh", VERL.replace("adv_estimator=grpo", "adv_estimator=gae"), "PPO with a critic"),
    ("verl.sh", VERL.replace("algorithm.adv_estimator=grpo", ""), "PPO with a critic"),
    ("verl.sh", VERL.replace("adv_estimator=grpo", "adv_estimator=remax"), "remax"),
    ("rl.sh", REINFORCE.replace("--algo.advantage.estimator rloo", ""), "PPO with a critic"),
    ("sft.sh", OPENRLHF.replace("train_dpo", "train_sft"), None),
]


@pytest.mark.parametrize(("name", "text", "meant"), MEANT)
def test_no_objective_is_taken_for_plain_training(name: str, text: str, meant: str | None, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    taken = read_launch(path).taken
    assert (taken["objective"].value if "objective" in taken else None) == meant
    assert not any("stage" in each or each.startswith(("rl", "command")) for each in read_launch(path).not_understood)
    if meant in ("kto", "remax", "PPO with a critic", "preference training or RL"):
        with pytest.raises(
            FlopcalcError, match=f"means {meant}, whose passes are not counted: give objective dpo, grpo,"
        ):
            estimate_flops(launch=path)
        plain = estimate_flops(launch=path, objective="none", seq_len=8, global_batch=None)
        assert plain.total
        assert not plain.passes
        assert f"plan takes plain training; {meant} has other passes" in str(
            apply_launch(path, "plan", {"gpus": 8}).notes
        )


FILES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("verl.sh", VERL, "verl", {
        "objective": "grpo,completion=1024,score=yes,reference=yes", "seq": 1536, "gpus": 4, "global_batch": 128,
        "recompute": "full", "batch": 4,
    }),
    ("dpo.sh", OPENRLHF, "OpenRLHF", {
        "objective": "dpo", "seq": 2048, "global_batch": 64, "batch": 2, "recompute": "full",
        "lora": {"r": 8, "targets": ("all-linear",)},
    }),
    ("rl.sh", REINFORCE, "OpenRLHF", {
        "objective": "grpo,completion=1024,score=yes,reference=no", "seq": 4096, "global_batch": 1024, "batch": 1,
    }),
    ("dpo_before.sh", EARLIER_DPO, "OpenRLHF", {
        "objective": "dpo", "seq": 8192, "global_batch": 256, "batch": 1, "recompute": "full", "compute": "bf16",
    }),
    ("rl_before.sh", EARLIER_RL, "OpenRLHF", {
        "objective": "grpo,completion=512,score=yes,reference=yes", "seq": 1536, "global_batch": 8192, "batch": 4,
        "gpus": 16, "recompute": "full",
    }),
    ("trl.yaml", TRL_GRPO, "TRL", {"objective": "grpo,completion=256,score=yes,reference=yes", "batch": 8}),
    ("trl.sh", TRL_DPO, "TRL", {"objective": "dpo,reference=no", "seq": 512, "batch": 8}),
    ("lf.yaml", LLAMAFACTORY, "LLaMA-Factory", {"objective": "reward"}),
    ("swift.yaml", SWIFT, "ms-swift", {"objective": "distill,teacher=Qwen/Qwen3-8B", "seq": 512}),
    ("axolotl.yaml", AXOLOTL, "axolotl", {"objective": "grpo,completion=64,reference=no", "seq": 256}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "framework", "expected"), FILES)
def test_launch_files_say_their_objective(
    name: str, text: str, framework: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = read_launch(path)
    assert found.frameworks == (framework,)
    assert {key: found.taken[key].value for key in expected} == expected
    assert all(": sequences of one update" in each for each in found.not_understood)
    length = {} if "seq" in found.taken else {"seq_len": 1024}
    assert estimate_flops(launch=path, **length).passes


UPDATE = "sequences of one update, a step is a whole rollout and all updates on it"
REWARD = "the reward model's pass is not counted, estimate its forward pass by itself and add it"


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        (EARLIER_RL, [f"train_batch_size: {UPDATE}"]),
        (
            EARLIER_RL.replace("colocate_all_models", "ref_num_gpus_per_node 8").replace(
                "pretrain none", "pretrain a/b"
            ),
            [
                "vllm_num_engines, ref_num_gpus_per_node: gpus are those of the actor alone, for the MFU of all give "
                "their sum as gpus",
                f"reward_pretrain: {REWARD}",
                f"train_batch_size: {UPDATE}",
            ],
        ),
        (
            REINFORCE.replace("--train.batch", "--train.max_epochs 2 --train.batch"),
            ["train.max_epochs: training on a rollout is counted once", f"train.batch_size: {UPDATE}"],
        ),
        (EARLIER_DPO.replace("--bf16", "--max_epochs 2"), []),
        (VERL.replace("$@", "reward_model.enable=True"), [f"reward_model.enable: {REWARD}"]),
        (
            VERL.replace("$@", "reward_model.enable=False actor_rollout_ref.actor.ppo_mini_batch_size=8"),
            [f"actor_rollout_ref.actor.ppo_mini_batch_size: {UPDATE}"],
        ),
    ],
)
def test_what_a_step_of_a_launch_file_leaves_out_is_said(text: str, notes: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    assert list(read_launch(path).not_understood) == notes


@pytest.mark.parametrize(
    ("objective", "more", "names", "copies"),
    [
        ("dpo", {}, ["train", "reference"], 2),
        ("dpo", {"lora": LORA}, ["train", "reference"], 1),
        ("dpo,reference=no", {}, [], 1),
        (REFERENCE, {}, ["train", "rollout", "reference"], 2),
        ("reward", {}, [], 1),
    ],
)
def test_predict_times_all_passes(objective: str, more: dict[str, Any], names: list[str], copies: int) -> None:
    found = predict(CONFIG, batch_size=2, seq_len=11, device="h200", objective=objective, advise=False, **more)
    said = [note for note in found.notes if note.startswith("passes of a step, each alone")]
    assert len(said) == bool(names)
    assert all(f" {name} " in said[0] for name in names)
    plain = predict(CONFIG, batch_size=4, seq_len=11, device="h200", advise=False, **more)
    assert found.memory is not None
    assert plain.memory is not None
    if objective != "reward":  # which has another head
        base = 2 * sum(each.parameters for each in estimate_flops(CONFIG, seq_len=11).weights)
        assert found.memory.weights == plain.memory.weights + (copies - 1) * base


def test_log_probabilities_take_less_than_a_loss_on_labels() -> None:
    config = {**CONFIG, "vocab_size": 50_000}
    dpo = predict(config, batch_size=2, seq_len=512, device="h200", objective="dpo", advise=False).memory
    plain = predict(config, batch_size=4, seq_len=512, device="h200", advise=False).memory
    assert dpo is not None
    assert plain is not None
    assert (dpo.logits, plain.logits) == (2 * 2 * 4 * 512 * 50_000, 3 * 4 * 4 * 512 * 50_000)
