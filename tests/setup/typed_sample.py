"""What a type checker says of calls: lines that are marked as errors are wrong, all others are right.

test_typed_sample.py runs mypy over this file. It is never executed.
"""

from flopcalc import bind, estimate_flops, plan, predict, translate
from flopcalc.prediction.step import Prediction

# Right: every group of keywords, numbers and texts with units.
total: int = estimate_flops("llama-3.1-8b", batch_size=4, seq_len="8k", gpus=8).total
estimate_flops("qwen2-vl", text=512, images=[(640, 480), "640x480"], max_pixels="1M", freeze="vision")
estimate_flops("qwen2-vl", seq_len=2048, freeze=["vision", "projector"], lora={"r": 16, "targets": ["q_proj"]})
estimate_flops("llama-3.1-8b", lengths=[512, 1024], convention="hardware", recompute="full", phase="train")
estimate_flops("llama-3.1-8b", seq_len=64, global_batch="16M tokens", step_time_s="500ms", peak={"bf16": 989e12})
estimate_flops(launch=["train.yaml", "accelerate.yaml"], gpus=8)
estimator = bind("llama-3.1-8b", lora="r=16,targets=q_proj", compute="bf16")
step: Prediction = predict("llama-3.1-8b", seq_len=2048, device="h200", execution="compiled", optimizer="adamw", gpus=8)
best = plan("llama-3.1-8b", tokens="2T", device="h200", gpus="1k", tp=[1, 2], zero="1,3", price="2.50$").best[0]
translate("llama-3.1-8b", seq_len=4096, mfu="45%", from_="6nd", device="h100-sxm")

# Wrong: a keyword that does not exist, a value of another type, a word that is not in the list.
estimate_flops("llama-3.1-8b", sequence=2048)  # error: Unexpected keyword argument "sequence"
estimate_flops("llama-3.1-8b", seq_len=[2048])  # error: Argument "seq_len"
estimate_flops("llama-3.1-8b", seq_len=2048, phase="backward")  # error: Argument "phase"
estimate_flops("llama-3.1-8b", seq_len=2048, convention="half")  # error: Argument "convention"
estimate_flops("llama-3.1-8b", seq_len=2048, freeze=3)  # error: Argument "freeze"
estimate_flops("llama-3.1-8b", seq_len=2048, batch=4)  # error: Argument "batch"
bind("llama-3.1-8b", lora=16)  # error: Argument "lora"
bind("llama-3.1-8b", adapter="r=16")  # error: Unexpected keyword argument "adapter"
predict("llama-3.1-8b", seq_len=2048, device=200)  # error: Argument "device"
predict("llama-3.1-8b", seq_len=2048, device="h200", execution="fast")  # error: Argument "execution"
predict("gpt2", seq_len=8, optimiser="adamw")  # error: Unexpected keyword argument "optimiser"
plan("gpt2", tokens="2T", device="h200", gpus=8.5)  # error: Argument "gpus"
plan("gpt2", tokens="2T", device="h200", tensor_parallel=2)  # error: Unexpected keyword argument "tensor_parallel"
translate("gpt2", seq_len=8, mfu=["45%"], from_="6nd")  # error: Argument "mfu"
wrong: str = estimate_flops("gpt2", seq_len=8).total  # error: Incompatible types in assignment
