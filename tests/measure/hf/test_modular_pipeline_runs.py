"""Sampling runs of tiny modular pipelines with their default blocks, text encoders among them, under a counter."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import mark_heavy

pytest.importorskip("diffusers")
import diffusers
import torch
import transformers
from diffusers.configuration_utils import FrozenDict
from diffusers.modular_pipelines.helios import encoders as helios_text
from diffusers.modular_pipelines.wan import encoders as wan_text
from diffusion import build
from PIL import Image
from test_more_pipeline_runs import CASES as MORE
from test_more_pipeline_runs import Connectors, Sound
from test_newer_pipeline_runs import CASES as NEWER
from test_pipeline_runs import CASES as FIRST
from test_pipeline_runs import EULER, FLOW, PLAIN, STEPS, TEXT, TWO, Case
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BatchFeature

from flopcalc import estimate_flops
from flopcalc.core.estimate.counted import CountedEstimator
from flopcalc.core.model.bound import bind_model
from flopcalc.core.model.config import load_config
from flopcalc.core.workload.workload import Workload
from flopcalc.measure.counters.flop_counter import count_flops


class Tokenizer:
    """Ids of any prompt, padded to a length where one is asked for."""

    model_max_length, padding_side, pad_token = 77, "left", "pad"
    bos_token_id = eos_token_id = 1

    def __init__(self, length: int = TEXT) -> None:
        self.length = length
        self.tokenizer = self  # as a processor has it

    def __call__(self, prompt: Any, padding: Any = None, max_length: int = 0, **options: Any) -> Any:
        length = max_length if padding == "max_length" else self.length
        ids = torch.ones(1 if isinstance(prompt, str) else len(prompt), length).long()
        if not options.get("return_tensors"):
            return BatchFeature({"input_ids": ids[0].tolist()})
        mask = ids.clone()
        mask[:, self.length :] = 0
        return BatchFeature({"input_ids": ids, "attention_mask": mask})

    def convert_tokens_to_ids(self, _token: str) -> int:
        return 1

    def tokenize(self, _prompt: str) -> list[str]:
        return []

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **options: Any) -> Any:
        return self(messages, **options) if tokenize else "words"


_CLIP = {
    "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30, "eos_token_id": 2,
    "bos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 77,
}  # fmt: skip
_T5 = {"d_model": 10, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "vocab_size": 30}


def make_encoder(name: str, **settings: Any) -> torch.nn.Module:
    """A text encoder of transformers with random weights."""
    kind = getattr(transformers, name)
    return kind(kind.config_class(**settings)).eval()


def clip(name: str, hidden: int, **settings: Any) -> torch.nn.Module:
    return make_encoder(name, hidden_size=hidden, **_CLIP, **settings)


def t5(name: str = "T5EncoderModel", width: int = 10) -> torch.nn.Module:
    return make_encoder(name, **{**_T5, "d_model": width})


class Run:
    """A modular pipeline's default blocks: parts as in a plain pipeline's case, its encoders, what its call takes."""

    def __init__(
        self, like: Case, encoders: dict[str, Any], call: dict[str, Any] | None = None,
        asked: dict[str, Any] | None = None, *, images: str = "", without: str = "", guided: bool = True,
        config: dict[str, Any] | None = None, parts: dict[str, Any] | None = None, tokens: int = TEXT,
        size: tuple[int, int] | None = None, steps: int = STEPS, others: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None, scheduler: tuple[str, dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.tokens, self.size, self.steps, self.others = tokens, size or like.size, steps, others or {}
        self.settings, self.scheduler = settings or {}, scheduler or (like.scheduler, like.options)
        self.like, self.encoders, self.call, self.asked = like, encoders, call or {}, asked or {}
        self.images, self.without, self.guided = images.split(), without.split(), guided
        self.config, self.parts = {**like.config, **(config or {})}, parts or {}


_FLUX = Run(FIRST["flux"], {"text_encoder": clip("CLIPTextModel", 6), "text_encoder_2": t5()}, guided=False)
_WAN = Run(FIRST["wan"], {"text_encoder": t5("UMT5EncoderModel")})
_QWEN3 = {
    "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 30,
}  # fmt: skip


def qwen3(hidden: int, name: str = "Qwen3Model", layers: int = 2) -> torch.nn.Module:
    return make_encoder(name, hidden_size=hidden, num_hidden_layers=layers, **_QWEN3)


_KLEIN = {"text_encoder": qwen3(5, "Qwen3ForCausalLM", 3)}
_OUT = {"text_encoder_out_layers": (1, 2)}
_LONG = {"max_sequence_length": 512}
_EDIT = {"without": "text_encoder", "images": "image"}
_EMBEDS = {f"{side}prompt_embeds": torch.randn(1, TEXT, 10) for side in ("", "negative_")}
_MASKS = {f"{side}prompt_embeds_mask": torch.ones(1, TEXT).long() for side in ("", "negative_")}
_PAIR = {
    "text_encoder": clip("CLIPTextModelWithProjection", 4, projection_dim=2),
    "text_encoder_2": clip("CLIPTextModelWithProjection", 6, projection_dim=4),
}
_IMAGED = {"in_channels": 8, "out_channels": 2}
_VACE = FIRST["wan, vace"]
_SEEN = make_encoder(
    "CLIPVisionModel", hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, image_size=224,
    patch_size=14,
)  # fmt: skip


class ImageProcessor:
    """Prepares no image."""

    def __call__(self, **_options: Any) -> Any:
        return BatchFeature({"pixel_values": torch.zeros(1, 3, 224, 224)})


_FLUX3 = Case("", "Flux3Transformer2DModel", {}, "AutoencoderKLFlux2", {}, EULER)
_COSMOS = Case(
    "", "Cosmos3OmniTransformer", {"latent_channel": 2, "patch_latent_dim": 8}, "AutoencoderKLWan", PLAIN,
    "UniPCMultistepScheduler", FLOW, frames=9,
)  # fmt: skip
_SAFE = {"enable_safety_checker": False}


class Audio(Sound):
    """The same with a config as models have it."""

    config, latents_mean, latents_std = FrozenDict(vars(Sound.config)), torch.zeros(10), torch.ones(10)


_LTX2_GUIDER = diffusers.LTX2Guidance(
    guidance_scale=3.0, stg_scale=1.0, modality_scale=3.0, spatio_temporal_guidance_blocks=[28]
)
_QWEN21_CALL = {
    **_EMBEDS, **_MASKS,
    **{f"{side}image_pad_mask": torch.zeros(1, TEXT).bool() for side in ("", "negative_")},
}  # fmt: skip
_CONDITIONER = {
    "source_dim": 10, "target_dim": 10, "model_dim": 16, "num_layers": 2, "num_attention_heads": 2,
    "target_vocab_size": 30, "min_sequence_length": 20,
}  # fmt: skip
RUNS = {
    "AnimaModularPipeline": Run(
        Case("", "CosmosTransformer3DModel", {**TWO, "max_size": [8, 32, 32]}, "AutoencoderKLQwenImage", PLAIN, EULER),
        {"text_encoder": qwen3(10), "text_conditioner": build("AnimaTextConditioner", _CONDITIONER).eval()},
    ),
    "Cosmos3OmniModularPipeline": Run(_COSMOS, {}, tokens=TEXT - 2, settings=_SAFE),
    "Cosmos3DistilledModularPipeline": Run(
        _COSMOS,
        {},
        tokens=TEXT - 2,
        settings={**_SAFE, "distilled_sigmas": [0.9, 0.6, 0.3]},
        guided=False,
        scheduler=(EULER, {}),
    ),
    "FluxModularPipeline": _FLUX,
    "FluxKontextModularPipeline": Run(
        FIRST["flux"], _FLUX.encoders, images="image", guided=False, asked={"references": 1}, size=(1024, 1024), steps=1
    ),
    "Flux2ModularPipeline": Run(FIRST["flux2"], _KLEIN, _OUT, {"references": 0}, guided=False),
    "Flux2KleinModularPipeline": Run(FIRST["flux2, klein"], _KLEIN, _OUT, guided=False),
    "Flux2KleinBaseModularPipeline": Run(FIRST["flux2, klein"], _KLEIN, _OUT),
    "Flux3ModularPipeline": Run(_FLUX3, _KLEIN, {**_OUT, **_LONG}, without="prompt_upsampler"),
    "Flux3DistilledModularPipeline": Run(
        _FLUX3, _KLEIN, {**_OUT, **_LONG}, without="prompt_upsampler", guided=False, config={"flow_map": True}
    ),
    "StableDiffusion3ModularPipeline": Run(FIRST["sd3"], {**_PAIR, "text_encoder_3": t5()}),
    "StableDiffusionXLModularPipeline": Run(
        FIRST["sdxl"],
        {
            **_PAIR,
            "text_encoder": clip("CLIPTextModel", 4),
            "text_encoder_2": clip("CLIPTextModelWithProjection", 6, projection_dim=6),
        },
        asked={"text": 77},
    ),
    "QwenImageModularPipeline": Run(FIRST["qwen-image"], {"text_encoder": qwen3(10)}, tokens=34 + TEXT),
    "QwenImageEditModularPipeline": Run(
        FIRST["qwen-image"], {}, {**_EMBEDS, **_MASKS}, {"references": 1}, size=(1024, 1024), steps=1, **_EDIT
    ),
    "QwenImageEditPlusModularPipeline": Run(
        FIRST["qwen-image"], {}, {**_EMBEDS, **_MASKS}, {"references": 1}, size=(1024, 1024), steps=1, **_EDIT
    ),
    "QwenImageLayeredModularPipeline": Run(
        FIRST["qwen-image"],
        {"text_encoder": qwen3(10)},
        tokens=34 + TEXT,
        size=(640, 640),
        steps=1,
        images="image",
        config={"use_additional_t_cond": True, "use_layer3d_rope": True},
    ),
    "QwenImage21ModularPipeline": Run(NEWER["qwen-image 2.1"], {}, _QWEN21_CALL, without="text_encoder"),
    "QwenImage21TurboModularPipeline": Run(
        NEWER["qwen-image 2.1"], {}, _QWEN21_CALL, without="text_encoder", guided=False
    ),
    "ZImageModularPipeline": Run(FIRST["z-image"], {"text_encoder": qwen3(10)}, _LONG),
    "Krea2ModularPipeline": Run(FIRST["krea2"], {}, FIRST["krea2"].more, without="text_encoder"),
    "Krea2TurboModularPipeline": Run(FIRST["krea2"], {}, FIRST["krea2"].more, without="text_encoder", guided=False),
    "Ideogram4ModularPipeline": Run(
        NEWER["ideogram 4"],
        {},
        {
            "text_features": torch.randn(1, TEXT, 10),
            "text_lengths": [TEXT],
            "guidance_schedule": (4.0,) * STEPS,
        },
        without="text_encoder",
        guided=False,
        parts={"unconditional_transformer": NEWER["ideogram 4"].beside},
    ),
    "ErnieImageModularPipeline": Run(FIRST["ernie"], {"text_encoder": qwen3(10)}),
    "HeliosModularPipeline": Run(NEWER["helios"], _WAN.encoders),
    "HeliosPyramidModularPipeline": Run(
        NEWER["helios"],
        _WAN.encoders,
        {"pyramid_num_inference_steps_list": [2, 2, 2]},
        size=(64, 128),
        steps=2,
        scheduler=("HeliosScheduler", {"stages": 3}),
    ),
    "HunyuanVideo15ModularPipeline": Run(
        MORE["hunyuanvideo 1.5"],
        {"text_encoder": qwen3(10, layers=4), "text_encoder_2": t5(width=6)},
        asked={"text": 1000},
        tokens=1108,
    ),
    "LTXModularPipeline": Run(FIRST["ltx-video"], {"text_encoder": t5()}),
    "LTX2ModularPipeline": Run(
        MORE["ltx-2"],
        {"text_encoder": qwen3(10)},
        others={"connectors": Connectors(), "audio_vae": Audio(), "vocoder": Audio(), "guider": _LTX2_GUIDER},
    ),
    "EchoModularPipeline": Run(
        MORE["ltx-2, image"],
        {"text_encoder": qwen3(10)},
        others={"connectors": Connectors(), "audio_vae": Audio(), "vocoder": Audio()},
        guided=False,
        steps=8,
    ),
    "WanModularPipeline": _WAN,
    "WanImage2VideoModularPipeline": Run(
        FIRST["wan"],
        {**_WAN.encoders, "image_encoder": _SEEN},
        _LONG,
        {"text": 512},
        config={**_IMAGED, "image_dim": 8, "added_kv_proj_dim": 24},
        images="image",
        others={"image_processor": ImageProcessor()},
    ),
    "Wan22ModularPipeline": Run(FIRST["wan"], _WAN.encoders, parts={"transformer_2": FIRST["wan"].config}),
    "Wan22Image2VideoModularPipeline": Run(
        FIRST["wan"],
        _WAN.encoders,
        config=_IMAGED,
        images="image",
        parts={"transformer_2": {**FIRST["wan"].config, **_IMAGED}},
    ),
    "Wan22VaceModularPipeline": Run(_VACE, _WAN.encoders, parts={"transformer_2": _VACE.config}),
}
# Their default blocks do not run without guidance in diffusers 0.42.1.
ALWAYS_GUIDED = ("Wan", "LTX", "HunyuanVideo15")
CASES = [
    (name, guided)
    for name, run in RUNS.items()
    for guided in ((True, False) if run.guided else (False,))
    if guided or not name.startswith(ALWAYS_GUIDED)
]


def build_pipeline(name: str, guided: bool) -> tuple[Any, torch.nn.ModuleDict]:
    """A modular pipeline with tiny components, and those that are watched."""
    run = RUNS[name]
    kind = getattr(diffusers, name)
    blocks = kind().blocks
    for block in run.without:
        blocks.sub_blocks.pop(block)
    pipeline = kind(blocks=blocks)
    expected = {spec.name for spec in blocks.expected_components}
    denoiser = "unet" if "unet" in expected else "transformer"
    watched = {
        denoiser: build(run.like.denoiser, run.config).eval(),
        "vae": build(run.like.vae, run.like.vae_config).eval(),
        **run.encoders,
        **{key: build(run.like.denoiser, config).eval() for key, config in run.parts.items()},
    }
    others: dict[str, Any] = {name: Tokenizer(run.tokens) for name in expected if "tokenizer" in name}
    others["scheduler"] = getattr(diffusers, run.scheduler[0])(**run.scheduler[1])
    if "guider" in expected:
        others["guider"] = diffusers.ClassifierFreeGuidance(guidance_scale=4.0 if guided else 1.0)
    pipeline.update_components(**{**others, **run.others, **watched, **run.settings})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline, torch.nn.ModuleDict(watched)


@pytest.mark.filterwarnings("ignore")  # of third parties: sizes are tiny, and parts are missing
@pytest.mark.parametrize(("name", "guided"), mark_heavy(CASES))
def test_a_run_of_default_blocks_is_counted_exactly(name: str, guided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RUNS[name]
    for text in (wan_text, helios_text):  # what they clean prompts with may not be installed
        monkeypatch.setattr(text, "ftfy", SimpleNamespace(fix_text=str), raising=False)
    pipeline, watched = build_pipeline(name, guided)
    width, height = run.size
    call = {"prompt": "words", "width": width, "height": height, "max_sequence_length": TEXT, **run.call}
    call |= {key: Image.new("RGB", run.size) for key in run.images}
    call |= {"num_frames": run.like.frames} if run.like.frames else {}
    if run.guided and not hasattr(pipeline, "guider"):
        call["guidance_scale"] = 4.0 if guided else 1.0
    taken = {each.name for each in pipeline.blocks.inputs}

    def sample() -> None:
        with torch.no_grad():
            pipeline(
                num_inference_steps=run.steps, output_type="np", **{key: call[key] for key in call if key in taken}
            )

    with sdpa_kernel(SDPBackend.MATH):
        counted = count_flops(watched, sample)
    theirs = dict.fromkeys(watched, 0)
    for path, row in counted.rows.items():
        if path:  # else it is noise of Helios' own, outside of models
            theirs[path.partition(".")[0]] += sum(row)
    sizes: dict[str, Any] = (
        {"videos": [(width, height, run.like.frames)]} if run.like.frames else {"images": [(width, height)]}
    )
    estimate = estimate_flops(
        pipeline,
        **{**sizes, "text": TEXT, **run.asked},
        sampling_steps=run.steps,
        guidance="on" if guided else "off",
        convention="full",
        attention_kernel="eager",
    )
    ours: dict[str, int] = {}
    for part in estimate.pipeline.parts:
        key = part.name.partition(",")[0]
        ours[key] = ours.get(key, 0) + part.flops.total
    assert ours == {part: flops for part, flops in theirs.items() if flops}
    assert inspect.getattr_static(type(pipeline), "default_blocks_name") in " ".join(estimate.notes)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["FluxModularPipeline", "StableDiffusionXLModularPipeline", "Wan22ModularPipeline"])
def test_a_saved_pipeline_is_counted_as_the_live_one(name: str, tmp_path: Path) -> None:
    pipeline, _ = build_pipeline(name, guided=True)
    pipeline.update_components(**{name: None for name in pipeline.components if name.startswith("tokenizer")})
    pipeline.save_pretrained(str(tmp_path))
    asked: dict[str, Any] = {"images": [(64, 96)], "sampling_steps": 3}
    live, saved = (estimate_flops(source, **asked) for source in (pipeline, tmp_path))
    assert saved.total == live.total
    assert {part.name for part in saved.pipeline.parts} == {part.name for part in live.pipeline.parts}


@pytest.mark.parametrize("changes", [{}, {"use_self_attention": False, "use_layer_norm": True}])
def test_animas_conditioner_is_equal_row_by_row(changes: dict[str, Any]) -> None:
    config = {**_CONDITIONER, **changes}
    model = build("AnimaTextConditioner", config).eval()

    def step() -> None:
        with torch.no_grad():
            model(torch.randn(2, TEXT, 10), torch.ones(2, TEXT).long())

    bound = bind_model(load_config({"_class_name": "AnimaTextConditioner", **config}), is_part=True)
    estimate = CountedEstimator(bound, None, "full", "eager").estimate(Workload(2, TEXT, phase="forward"))
    ours = {row.path: row.forward for row in estimate.by_module(per_layer=True) if row.forward}
    assert ours == {path: row[0] for path, row in count_flops(model, step).rows.items() if row[0]}
    assert estimate.parameters["total"] == sum(each.numel() for each in model.parameters())
