"""The table of fields: every question that a door may ask, once, with its type, unit, help, group and commands.

The keys of SetupKeywords are the Python keywords. Options, the page's form, the JSON schema and the reference page are
made from the same rows. A new field is one row here, and the code that uses it.
"""

# No `from __future__ import annotations` here: the rows are read from the evaluated annotations.

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from flopcalc.base.frozen import Value, frozen
from flopcalc.base.spelling import find_field
from flopcalc.base.vocabulary import (
    CLIPPING,
    CONVENTIONS,
    EXECUTIONS,
    KERNELS,
    OPTIMIZERS,
    PIPELINE_PHASES,
    Clipping,
    Convention,
    Execution,
    Kernel,
    Optimizer,
    PipelinePhase,
    Recompute,
)

if TYPE_CHECKING:
    from typing import Annotated, TypedDict

    from flopcalc.core.estimate.objective import Objective
    from flopcalc.core.recipe.recipe import Lora, Recipe
else:
    Lora = Objective = Recipe = Any  # only type checkers read them

    class Annotated:
        """At run time a row is its Field: to make types of all rows takes longer than to read a spec."""

        def __class_getitem__(cls, row: tuple[Any, "Field"]) -> "Field":
            return row[1]

    class TypedDict:
        """Likewise: the real one checks every row."""

        def __init_subclass__(cls, **_: object) -> None:
            pass


Command = Literal["estimate", "compare", "explain", "translate", "predict", "plan", "bind", "crosscheck", "serving"]
COMMANDS: tuple[Command, ...] = get_args(Command)
_LETTERS = dict(zip("ECXTPLBKS", COMMANDS, strict=True))
Group = Literal["model", "work", "media", "traffic", "engine", "training", "formats", "hardware", "layout", "output"]
# Sections of --help and of the page's form, the common ones first.
GROUPS: dict[Group, str] = {
    "model": "Model",
    "work": "Work",
    "media": "Images and sound",
    "traffic": "Traffic",
    "engine": "Serving engine",
    "training": "What trains",
    "formats": "Number formats",
    "hardware": "Hardware",
    "layout": "Layout on many GPUs",
    "output": "Output",
}
# How a value is read: see setup/values.py.
Kind = Literal[
    "text", "path", "word", "flag", "size", "count", "sizes", "number", "share", "tokens", "peak", "grids", "images", "videos",
    "seconds", "patterns", "lora", "objective", "mtp", "logits", "parts", "guidance", "global_batch", "degrees", "recomputes", "routing", "value",
]  # fmt: skip


@frozen()
class Field(Value):
    """One question. `takes` are the initials of its commands: see _LETTERS. {LP:text} is for commands L and P alone."""

    help: str
    group: Group
    takes: str
    kind: Kind = "text"
    metavar: str = ""
    words: tuple[str, ...] = ()
    default: str = ""  # printed by --help; what happens without the field
    also: str = ""  # another spelling of the option
    in_doors: bool = True  # False: Python only

    @property
    def repeats(self) -> bool:
        return self.kind in ("grids", "images", "videos", "seconds", "patterns") or (
            self.kind == "path" and self.metavar == "FILE…"
        )

    def fit(self, letter: str = "") -> "Field":
        """The row as one command shows it; without one, with the texts of all."""
        if "{" not in f"{self.help}{self.metavar}{self.default}":
            return self

        def choose(text: str) -> str:
            return re.sub(r"\{([A-Z]+):(.*?)\}", lambda found: found[2] if letter in found[1] else "", text).strip()

        return self.replace(help=choose(self.help), metavar=choose(self.metavar), default=choose(self.default))

    @property
    def commands(self) -> tuple[Command, ...]:
        return tuple(_LETTERS[letter] for letter in self.takes)


_COUNT = "ECXTP"  # commands that count one step
_PLAN = "ECXTPL"
_ALL = "ECXTPLB"
Size = int | str
Number = float | str
Texts = str | Iterable[str]
Degree = int | str | Sequence[int]


# fmt: off
class SetupKeywords(TypedDict, total=False):
    """What estimate_flops, bind, predict, plan and translate take by keyword; `flopcalc schema` prints it."""

    # model
    model_type: Annotated[str, Field("Read the config as this model type, instead of its own.", "model", _ALL + "KS", metavar="TYPE", also="as")]
    spec: Annotated[str | os.PathLike[str], Field("Add your own spec (TOML) for its model_type.", "model", _ALL + "S", "path", "FILE")]
    download: Annotated[bool, Field("Fetch a hub id's config.json if it is not in the cache.", "model", _ALL + "KS", "flag")]
    head: Annotated[str, Field("The model's head, instead of the one that its config names; N: labels (default: the config's).", "model", _ALL, metavar="lm|none|sequence:N|token:N")]
    mtp: Annotated[int | bool | str, Field("Layers of multi-token prediction: as many as the config says, or N.", "model", _ALL, "mtp", "[N]")]
    trace: Annotated[bool, Field("Count HF's own code instead of a spec and cache the result (needs torch once).", "model", "ECT", "flag")]
    launch: Annotated[Any, Field("A launch file: axolotl, LLaMA-Factory, ms-swift, TRL, verl or accelerate YAML, a shell script of verl, OpenRLHF or TRL, torchtitan TOML, JSON of HF TrainingArguments or DeepSpeed; or a line in quotes ('accelerate launch … train.py …'); repeatable. Other options win over it.", "model", _PLAN, "path", "FILE…")]
    # work
    batch_size: Annotated[Size, Field("Samples of one micro-batch, on each GPU{ECXT: (or group of GPUs that share a sample)}.", "work", _COUNT + "K", "size", "N", default="1")]
    seq_len: Annotated[Size, Field("Length per sample, visual tokens included; 4k is 4,096.", "work", _PLAN + "K", "size", "N")]
    text: Annotated[Size, Field("Text tokens per sample; visual and audio tokens are added.", "work", _PLAN + "K", "size", "N")]
    lengths: Annotated[Iterable[int] | str, Field("Lengths of the documents in one packed row, instead of a length; each row of the batch is alike.", "work", _COUNT, "sizes", "N,N,…")]
    decoder_seq_len: Annotated[Size, Field("Encoder-decoders: length of the decoder; the other length is the encoder's.", "work", _PLAN, "size", "N")]
    grad_accum: Annotated[Size, Field("Micro-batches per step.", "work", _COUNT, "size", "N", default="1")]
    global_batch: Annotated[Size, Field("All sequences of a step, or tokens as in '4M tokens'{L:; a plan's default is about 4M tokens, auto searches it}.", "work", _PLAN, "global_batch", "N|4Mtok{L:|auto}")]
    tokens: Annotated[Number, Field("Tokens of a whole run, such as 15T; gives steps, FLOPs and GPU-hours.", "work", "EL", "tokens", "N|2T|300B")]
    phase: Annotated[PipelinePhase, Field("A training step, a forward pass{ECXTP:, a prompt (prefill), new tokens (decode), or diffusion sampling}.", "work", _COUNT + "K", "word", "{K:train|forward}", PIPELINE_PHASES, default="train")]
    context: Annotated[Size, Field("decode: number of cached keys.", "work", _COUNT, "count", "C", default="0")]
    logits: Annotated[int | str, Field("Positions with logits (default: all; prefill: last).", "work", _COUNT, "logits", "all|last|N")]
    sampling_steps: Annotated[Size, Field("Diffusion: number of denoising steps; implies phase sample.", "work", _COUNT, "size", "N")]
    guidance: Annotated[bool | str, Field("Diffusion: with guidance each step runs twice (default: as the pipeline does).", "work", _COUNT, "guidance", words=("on", "off"))]
    parts: Annotated[Texts, Field("Diffusion: count only these parts: denoiser, text, vae (default: all).", "work", _COUNT, "parts", "A,B,…")]
    strength: Annotated[Number, Field("Diffusion from a given image: the share of the steps that runs (default: the pipeline's).", "work", _COUNT, "number", "0.6")]
    images_per_prompt: Annotated[Size, Field("Diffusion: images or videos made of each prompt.", "work", _COUNT, "size", "N", default="1")]
    references: Annotated[Size, Field("Diffusion: given images that the model reads as tokens (default: the pipeline's).", "work", _COUNT, "count", "N")]
    batch: Annotated[Mapping[str, Any], Field("A real batch: the keyword arguments of the model's forward.", "work", "EXTP", "value", in_doors=False)]
    # images and sound
    images: Annotated[Iterable[Any], Field("An image per sample{S: (request)}: its size in pixels, or a file; repeatable.", "media", _PLAN + "KS", "images", "WxH|FILE")]
    image_grid_thw: Annotated[Any, Field("An image per sample, in patches.", "media", _PLAN + "KS", "grids", "T,H,W")]
    videos: Annotated[Iterable[Any], Field("A video per sample: seconds and frames per second, or a number of frames; repeatable.", "media", _PLAN + "S", "videos", "[WxH:]30s@2fps|WxHxFRAMES")]
    video_grid_thw: Annotated[Any, Field("A video per sample, in patches.", "media", _PLAN + "KS", "grids", "T,H,W")]
    audio: Annotated[Iterable[Number], Field("An audio clip per sample, in seconds; repeatable.", "media", _PLAN + "S", "seconds", "SECONDS")]
    max_pixels: Annotated[Size, Field("max_pixels of the image processor (default: from its config).", "media", _PLAN + "S", "size", "N")]
    clips: Annotated[Iterable[int], Field("Audio clips of the whole batch, in frames of the feature extractor.", "media", "EXTP", "sizes", in_doors=False)]
    # traffic
    input_len: Annotated[Size, Field("Tokens of a prompt, those of images included; 8k is 8,192; a range is drawn from evenly, a file has one length per line.", "traffic", "S", "share", "N|A..B|FILE")]
    output_len: Annotated[Size, Field("Tokens of an answer, written in the same way.", "traffic", "S", "share", "N|A..B|FILE")]
    concurrency: Annotated[Size, Field("Requests in flight in the whole deployment; a new one comes when one ends.", "traffic", "S", "size", "N", default="1")]
    rate: Annotated[Number, Field("Requests per second, at random times (Poisson), instead of a concurrency.", "traffic", "S", "number", "R")]
    requests: Annotated[str | os.PathLike[str], Field("CSV file of requests: arrival_s,input,output.", "traffic", "S", "path", "FILE")]
    users: Annotated[Size, Field("Users who send a request, read the answer, think, and send the next, instead of a concurrency.", "traffic", "S", "size", "N")]
    think: Annotated[Number, Field("How long users think between requests, such as 20s.", "traffic", "S", "share", "TIME")]
    ttft: Annotated[Number, Field("Objective for the time to first token; gives goodput and the load at which it breaks.", "traffic", "S", "share", "2s[@p95]")]
    itl: Annotated[Number, Field("Objective for the time between tokens.", "traffic", "S", "share", "30ms[@p95]")]
    prefix_hit: Annotated[Number, Field("Tokens, or a share such as 60%, of each prompt that the cache holds.", "traffic", "S", "share", "N|SHARE")]
    benchmark: Annotated[str, Field("How a load generator measures: ten requests a slot, all start at once; inferencex draws lengths from 80 to 100 %, aiperf keeps them (default: fixed lengths, steady state).", "traffic", "S", "word", words=("inferencex", "aiperf"))]
    # serving engine
    engine: Annotated[str, Field("Serving engine: vllm, sglang or trtllm, with its version if you know it.", "engine", "S", metavar="NAME[@VERSION]", default="vllm")]
    max_batched_tokens: Annotated[Size, Field("Most tokens of one step (default: the engine's).", "engine", "S", "size", "N")]
    max_seqs: Annotated[Size, Field("Most requests that run at once on an attention rank (default: the engine's).", "engine", "S", "size", "N")]
    memory_fraction: Annotated[Number, Field("Share of the memory that the engine takes, as it defines it (default: the engine's).", "engine", "S", "share", "SHARE")]
    speculative: Annotated[str, Field("Speculative decoding: drafts of a step, and the share of them that is accepted; mtp,accept=0.7 drafts with the model's own layers.", "engine", "S", metavar="k=3,accept=0.7")]
    disaggregate: Annotated[str, Field("Separate workers for prompts and for decodes, each with the layout that is given.", "engine", "S", metavar="2p4d")]
    engine_args: Annotated[str, Field("Further flags as the engine spells them; unknown ones are named in a note.", "engine", "S", metavar="TEXT")]
    # what trains
    freeze: Annotated[Texts, Field("Freeze what matches: a glob of module paths, or vision|audio|projector|language; repeatable.", "training", _ALL + "K", "patterns", "PATTERN")]
    train_only: Annotated[Texts, Field("Train only what matches: patterns as for freezing; repeatable.", "training", _ALL + "K", "patterns", "PATTERN")]
    lora: Annotated[Lora | Mapping[str, Any] | str, Field("LoRA as PEFT applies it; save=… also trains these modules, exclude=… leaves these without, dtype=bf16 keeps adapters in bf16.", "training", _ALL + "K", "lora", "r=16,targets=q_proj+v_proj")]
    recompute: Annotated[Recompute | str | Sequence[str], Field("Gradient checkpointing. full: HF's default; full-reentrant: use_reentrant=True{L:; a plan also takes light (norms, activations), selective (attention), offload and half (every second layer), and tries several with commas}.", "training", _ALL + "K", "recomputes", "none|{ECXTPBK:full|full-reentrant}{L:light|selective|…}", default="{ECXTPBK:none}")]
    gradient_checkpointing: Annotated[bool, Field("The same as recompute full.", "training", _ALL + "K", "flag")]
    clipping: Annotated[Clipping, Field("Per-sample clipping (DP-SGD) as in Opacus; counted under convention hardware.", "training", "ECXTB", "word", words=CLIPPING, default="none")]
    recipe: Annotated[Recipe | Mapping[str, Any], Field("freeze, train_only, lora, recompute and clipping as one value.", "training", "ECXTPLB", "value", in_doors=False)]
    objective: Annotated[Objective | Mapping[str, Any] | str, Field("Count all passes of a step of DPO, GRPO, reward training or distillation; grpo needs completion=N, distill teacher=MODEL; none: plain training, the default.", "training", "EP", "objective", "dpo|grpo|reward|distill,KEY=VALUE")]
    # number formats
    compute: Annotated[str, Field("Number format of matrix products, such as bf16, fp16, tf32, fp32 or fp8.", "formats", _ALL, metavar="FORMAT")]
    dtype: Annotated[str, Field("The same as compute; a dtype in the config wins over the default, bf16.", "formats", _ALL, metavar="FORMAT")]
    weights: Annotated[str, Field("Number format of stored weights, such as bf16, fp8, int4-g128 or nf4-double.", "formats", _ALL + "S", metavar="FORMAT")]
    kv_cache: Annotated[str, Field("Number format of cached keys and values, such as bf16 or fp8.", "formats", "ECPBS", metavar="FORMAT")]
    autocast: Annotated[bool | str, Field("Matrix products run under torch.autocast, in bf16.", "formats", _ALL, "flag")]
    # hardware
    device: Annotated[str | None, Field("GPU whose peaks and kernels are used; auto: the one in this machine.", "hardware", _ALL + "S", metavar="NAME")]
    gpus: Annotated[Size, Field("GPUs of the job{ECXT:; a step is that of all of them}{P:; predict runs the step on each}.", "hardware", "ECXTPLS", "size", "N", default="{ECXTP:1}", also="num-devices")]
    step_time_s: Annotated[Number, Field("Measured time of one step, such as 0.5 or 500ms; gives MFU and HFU.", "hardware", "EC", "number", "TIME")]
    tokens_per_second: Annotated[Number, Field("Measured tokens per second of all GPUs, such as 12k{EC:; gives MFU and HFU}.", "hardware", "ECT", "number", "N")]
    peak: Annotated[Number | Mapping[str, float], Field("Dense peak of one device, instead of the table's: 989T for all, or bf16=989T,fp8=1979T.", "hardware", "ECT", "peak", "FLOPS_PER_S")]
    attention_kernel: Annotated[Kernel, Field("auto: the kernel that PyTorch's SDPA picks on the device; flash if no device is given.", "hardware", _ALL, "word", words=KERNELS, default="auto")]
    execution: Annotated[Execution, Field("How the step runs: eager (HF's code), compiled (torch.compile), graphs (compiled, as CUDA graphs), fused (kernels of a training framework); default: eager on one GPU, with LoRA and in HF's Trainer, else fused.", "hardware", "PL", "word", words=EXECUTIONS)]
    compiled: Annotated[bool, Field("The same as execution compiled.", "hardware", "P", "flag")]
    routing: Annotated[str | os.PathLike[str] | Sequence[int] | Sequence[Sequence[int]], Field("How routers deal tokens out to experts: even, spread:S (standard deviation over the mean, 0 to 1), rows per expert as N,N,…, or a JSON file of rows. Models without experts take even alone.", "hardware", _ALL, "routing", "even|spread:S|N,N,…|FILE", default="even")]
    optimizer: Annotated[Optimizer, Field("adamw: torch's fused one; adamw-foreach; adamw-master: with fp32 gradients, master weights and states; adamw-32bit: fp32 states of bf16 weights; adamw-8bit, adamw-fp8: states of one byte; adamw-offload: states on the host; lion, sgd, sgd-momentum; none; default: adamw on one GPU and with LoRA, else adamw-master.", "hardware", "PL", "word", "adamw|adamw-8bit|…", words=OPTIMIZERS)]
    clip_gradients: Annotated[bool, Field("Scale gradients to a largest norm before each optimizer's step. HF's Trainer always does.", "hardware", "P", "flag")]
    hf_trainer: Annotated[bool, Field("The step runs in HF's Trainer{P:: it also clips gradients and reads the loss after each backward pass}{L:, whose own time is left out}.", "hardware", "PL", "flag")]
    host_factor: Annotated[Number, Field("Your CPU's slowdown relative to the calibrated host.", "hardware", "P", "number", "F", default="1")]
    transformers: Annotated[str, Field("Version of transformers that you run (default 5.17). It matters for experts: 5.6 to 5.17 mask routed rows.", "hardware", "P", metavar="VERSION")]
    pause_s: Annotated[Number, Field("How long the host does something else after each step.", "hardware", "P", "value", in_doors=False)]
    # layout on many GPUs
    tp: Annotated[Degree, Field("Tensor parallel: GPUs that share each layer.", "layout", "ECTLS", "degrees", "N{L:[,N…]}")]
    pp: Annotated[Degree, Field("Pipeline stages.", "layout", "ECTLS", "degrees", "N{L:[,N…]}")]
    cp: Annotated[Degree, Field("Context parallel: GPUs that share a sequence.", "layout", "ECTL", "degrees", "N{L:[,N…]}")]
    dp: Annotated[Degree, Field("Data-parallel replicas.", "layout", "LS", "degrees", "N{L:[,N…]}")]
    virtual: Annotated[Degree, Field("Chunks of layers per stage (interleaved pipeline).", "layout", "L", "degrees", "N[,N…]")]
    ep: Annotated[Degree, Field("Expert parallel: GPUs that share a layer's experts.", "layout", "LS", "degrees", "N{L:[,N…]}")]
    zero: Annotated[Degree, Field("ZeRO stage 0 to 3; 3 is FSDP.", "layout", "L", "degrees", "N[,N…]")]
    micro_batch: Annotated[Degree, Field("Sequences that a replica processes at once.", "layout", "L", "degrees", "N[,N…]")]
    expert_imbalance: Annotated[Number, Field("Rows on the busiest rank of experts, relative to the mean.", "layout", "L", "number", "R", default="1")]
    overlap: Annotated[str, Field("none: communication is never hidden behind computation.", "layout", "L", metavar="all|none", default="all")]
    interconnect: Annotated[str, Field("Network between the GPUs (default: the GPU's usual one).", "layout", "L", metavar="NAME")]
    price: Annotated[Number, Field("Price of one GPU-hour in USD (default: a dated price, if known{P:, for diffusion}).", "hardware", "PLS", "number", "USD")]
    days: Annotated[Number, Field("Days that the run may take, such as 30 or 12h. Says whether the best layout keeps them; without a number of GPUs, tries 1, 2, 4, … until it does.", "layout", "L", "number", "DAYS", also="deadline")]
    budget: Annotated[Number, Field("USD that the run may cost, such as 50k. Says whether the best layout keeps it.", "layout", "L", "number", "USD")]
    grid: Annotated[Number, Field("Grams of CO2 of a kWh of your grid, such as 400g/kWh; gives the CO2.", "hardware", "PL", "number", "G_PER_KWH")]
    pue: Annotated[Number, Field("What the site takes over what its computers take (PUE), such as 1.2.", "hardware", "PL", "number", "R", default="1")]
    # output
    convention: Annotated[Convention, Field("Count what the model needs (for MFU), what HF's eager code executes (full), or what the kernels execute (hardware, for HFU).", "output", "ECXB", "word", words=CONVENTIONS, default="model")]
    mfu: Annotated[Number, Field("{E:The MFU of a whole run, such as 40%, for its GPU-hours (default: as measured, or 100 %).}{T: Such as 40%: the MFU that was quoted.}", "output", "ET", "share", "SHARE")]
    from_: Annotated[str, Field("Convention of the quoted number.", "output", "T", metavar="CONVENTION")]
    tflops: Annotated[Number, Field("The quoted rate of one GPU in TFLOP/s.", "output", "T", "number", "N")]
    top: Annotated[Size, Field("Number of layouts to show.", "output", "L", "size", "N", default="5")]
    memory: Annotated[bool, Field("Whether the memory is predicted too.", "output", "P", "value", in_doors=False)]
    advise: Annotated[bool, Field("Whether to look for the change that helps most.", "output", "P", "value", in_doors=False)]
    timeline: Annotated[bool, Field("Keep the events of host and device, for save_trace.", "output", "P", "value", in_doors=False)]
    progress: Annotated[Any, Field("A function of the layouts that are done, and of all.", "output", "L", "value", in_doors=False)]

# fmt: on

# Field by its option's name, which is its name in JSON and on the page too.
FIELDS: dict[str, Field] = {find_field(name): row.fit() for name, row in SetupKeywords.__annotations__.items()}


@cache
def list_fields(command: Command) -> dict[str, Field]:
    """What a command takes, in the order of the table."""
    letter = next(letter for letter, name in _LETTERS.items() if name == command)
    rows = {find_field(name): row for name, row in SetupKeywords.__annotations__.items()}
    return {name: row.fit(letter) for name, row in rows.items() if letter in row.takes}
