"""Every number of a config, spoiled: HF's code and a spec refuse the same, and what both take is counted the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest
from tiers import mark_heavy

from flopcalc.errors import FlopcalcError

Json = dict[str, Any]
# One type of each kind of tower: its numbers are spoiled by nulls, words and lists too.
TOWERS = (
    "beit", "bit", "clip", "clip_vision_model", "convnext", "cvt", "deit", "dinat", "dinov2", "efficientnet",
    "focalnet", "hgnet_v2", "hiera", "levit", "mobilenet_v2", "mobilevit", "poolformer", "pvt", "pvt_v2", "regnet",
    "resnet", "siglip", "vit",
)  # fmt: skip
# Others that were spoiled and mended; types that are not here were never asked.
TYPES = (
    *TOWERS,
    "KeyeVL1_5", "afmoe", "aimv2", "aimv2_vision_model", "albert", "altclip", "apertus", "arcee", "arctic", "aria",
    "aria_text", "audioflamingo3", "axk1", "axk2", "aya_vision", "bailing_hybrid", "bamba", "bart", "bart-causal",
    "beam", "bee", "bert", "bert-causal", "bert-generation", "big_bird", "big_bird-causal", "bigbird_pegasus",
    "bigbird_pegasus-causal", "biogpt", "bit-body", "bitnet", "blenderbot", "blenderbot-causal", "blenderbot-small",
    "blenderbot-small-causal", "blip", "blip-2", "bloom", "blt", "camembert", "camembert-causal", "canary",
    "chameleon", "chinese_clip", "clip-image", "clip_text_model", "clip_text_model-projection",
    "clip_vision_model-projection", "clipseg", "clipseg-segmentation", "codegen", "cogvlm", "cohere", "cohere2",
    "cohere2_moe", "cohere2_vision", "cohere_asr", "cohere_compass", "cohere_compass_text", "colmodernvbert",
    "colpali", "colqwen2", "conditional_detr", "convbert", "convnextv2", "cosmos3_edge", "cosmos3_omni", "cpmant",
    "ctrl", "cwm", "data2vec-text", "data2vec-text-causal", "data2vec-vision", "dbrx", "deberta", "deberta-v2",
    "deepseek_ocr2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_vl", "deepseek_vl_hybrid",
    "deepseek_vl_v2", "deformable_detr", "deit-teacher", "depth_anything", "detr", "dia", "diffllama",
    "diffusion_gemma", "dinov2_with_registers", "dinov3_convnext", "dinov3_vit", "distilbert", "doge", "donut-swin",
    "dots1", "dots_ocr", "dpt", "dpt-semantic", "eagle_2_5_vl", "electra", "electra-causal", "emu3", "emu3_text_model",
    "encoder-decoder", "ernie", "ernie-causal", "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe", "esm", "esmc",
    "eurobert", "evolla", "exaone4", "exaone4_5", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flaubert",
    "flex_olmo", "flint", "florence2", "fnet", "fsmt", "fun_asr_nano", "funnel", "fuyu", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma3n_text", "gemma4", "gemma4_assistant", "gemma4_text", "gemma4_unified",
    "gemma4_unified_assistant", "gemma4_unified_text", "git", "glm", "glm4", "glm46v", "glm4_moe", "glm4_moe_lite",
    "glm4v", "glm4v_moe", "glm5_next", "glm_moe_dsa", "glm_ocr", "glmasr", "glmga", "glpn", "got_ocr2", "gpt-sw3",
    "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite4_vision",
    "granite_speech", "granite_speech_plus", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "gte", "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl", "hy_v3",
    "hy_v4", "hyperclovax", "hyperclovax_vision_v2", "ibert", "idefics", "idefics2", "idefics3", "ijepa", "imagegpt",
    "inkling_text", "instructblip", "instructblipvideo", "internvl", "jais2", "jamba", "janus", "jetmoe",
    "jina_embeddings_v3", "kimi_k25", "kimi_linear", "kimi_vl", "kolibri1", "kosmos-2", "kosmos-2.5",
    "kyutai_speech_to_text", "laguna", "layoutlm", "led", "levit-teacher", "lfm2", "lfm2_moe", "lfm2_vl",
    "lighton_ocr", "llama", "llama4", "llama4_text", "llama_nemotron_vl", "llava", "llava_next", "llava_next_video",
    "llava_onevision", "llavaonevision1_5", "longcat_flash", "longformer", "longt5", "luke", "m2m_100", "mamba",
    "mamba2", "marian", "minicpmv4_7", "mixtral", "mobilenet_v1", "modernbert", "modernbert-decoder", "moonshine",
    "moonshine_streaming", "moss_transcribe_diarize", "mpt", "musicflamingo", "musicgen_melody", "nanochat",
    "nomic_bert", "olmo2", "olmo3", "pegasus_x", "pop2piano", "pp_formulanet", "qwen2_5_omni_thinker", "qwen2_5_vl",
    "qwen2_audio", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_asr", "qwen3_moe", "qwen3_next", "roberta-prelayernorm",
    "sam", "sam2", "seamless_m4t", "segformer", "siglip2_vision_model", "smollm3", "smolvlm", "solar_open",
    "speech-encoder-decoder", "speech_to_text", "speecht5", "swiftformer", "swin", "switch_transformers", "t5",
    "t5gemma", "table-transformer", "tapas", "timesformer", "udop", "ultrabert", "vibevoice", "vibevoice_asr", "vivit",
    "voxtral", "voxtral_realtime", "whisper", "xglm", "yolos", "yoso", "zamba2",
    "afmoe", "aimv2", "aimv2_vision_model", "albert", "altclip", "apertus", "arcee", "audioflamingo3", "axk1", "axk2",
    "aya_vision", "bailing_hybrid", "bamba", "bart", "beam", "bert", "bert-generation", "big_bird", "bigbird_pegasus",
    "biogpt", "bitnet", "blenderbot", "blenderbot-small", "blip", "blip-2", "bloom", "camembert", "canary",
    "chinese_clip", "clip-image", "clip_text_model", "clip_text_model-projection", "clip_vision_model-projection",
    "clipseg", "clipseg-segmentation", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere2_vision", "cohere_asr",
    "cohere_compass", "cohere_compass_text", "colpali", "colqwen2", "conditional_detr", "convnextv2", "cosmos3_edge",
    "cosmos3_omni", "cpmant", "ctrl", "cwm", "data2vec-text", "data2vec-vision", "dbrx", "deberta", "deberta-v2",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_vl", "deit-teacher", "depth_anything",
    "detr", "dia", "diffllama", "diffusion_gemma", "dinov2_with_registers", "dinov3_convnext", "dinov3_vit",
    "distilbert", "doge", "donut-swin", "dots1", "eagle_2_5_vl", "electra", "emu3_text_model", "encoder-decoder",
    "ernie", "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe", "esm", "esmc", "eurobert", "evolla", "exaone4",
    "exaone4_5", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flaubert", "flex_olmo", "flint", "florence2",
    "fnet", "fsmt", "fun_asr_nano", "funnel", "fuyu", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text",
    "gemma4_assistant", "gemma4_text", "gemma4_unified", "gemma4_unified_assistant", "gemma4_unified_text", "git",
    "glm", "glm4", "glm46v", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe", "glm_moe_dsa", "glm_ocr", "glmasr",
    "glmga", "got_ocr2", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss",
    "gptj", "granite", "granite4_vision", "granite_speech", "granite_speech_plus", "granite_swa", "granitemoe",
    "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "gte", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "hy_v3", "hy_v4", "hyperclovax", "ibert", "idefics", "idefics2", "idefics3", "ijepa", "imagegpt", "inkling_text",
    "instructblip", "instructblipvideo", "internvl", "jais2", "jamba", "jetmoe", "jina_embeddings_v3", "kimi_k25",
    "kimi_linear", "kimi_vl", "kolibri1", "layoutlm", "led", "levit-teacher", "lfm2", "lfm2_moe", "lighton_ocr",
    "llama", "llama4", "llama4_text", "llama_nemotron_vl", "llava", "llava_next", "llava_next_video",
    "llava_onevision", "longcat_flash", "longformer", "luke", "m2m_100", "mamba", "mamba2", "marian-causal",
    "mask2former", "mask2former-body", "maskformer", "maskformer-body", "mbart", "mbart-causal", "megatron-bert",
    "megatron-bert-causal", "mellum", "metaclip_2", "metaclip_2-image", "mimo_v2_flash", "minicpm3", "minicpm_ocr",
    "minicpmo", "minicpmv", "minicpmv2_0", "minicpmv4_6", "minicpmv4_7", "minimax", "minimax_m2", "minimax_m3_vl",
    "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mistral3", "mistral4", "mistral_large4", "mixtral",
    "mlcd_vision_model", "mllama", "mllama-causal", "mllama_text_model", "mobilebert", "mobilenet_v1",
    "mobilenet_v1-body", "mobilenet_v2-body", "mobilevit-body", "mobilevitv2", "mobilevitv2-body", "modernbert",
    "modernbert-decoder", "modernvbert", "molmo", "molmo2", "moonshine", "moonshine_streaming", "moshi",
    "moss_transcribe_diarize", "mpnet", "mpt", "mra", "mt5", "muse_glimmer", "muse_spark", "musicflamingo",
    "musicgen", "musicgen_decoder", "musicgen_melody", "musicgen_melody_decoder", "mvp", "mvp-causal", "nanochat",
    "nemo_speechlm", "nemotron", "nemotron-nas", "nemotron_h", "nemotron_h_omni", "neomme", "nllb-moe", "nomic_bert",
    "nvembed", "nystromformer", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt",
    "openai_privacy_filter", "openelm", "opt", "ovis1_6", "ovis2", "ovis2_5", "owlv2", "owlv2-body", "owlvit",
    "owlvit-body", "paddleocr_vl", "paligemma", "pegasus", "pegasus-causal", "pegasus_x", "perceiver",
    "perceiver-conv", "perceiver-fourier", "perceiver-learned", "persimmon", "phi", "phi3", "phi3_v", "phi4-siglip",
    "phi4_multimodal", "phimoe", "pi0", "pix2struct", "pixio", "plamo3", "plbart", "plbart-causal", "poolformer-body",
    "pop2piano", "pp_chart2table", "pp_formulanet", "pp_lcnet", "prompt_depth_anything", "prophetnet",
    "prophetnet-causal", "pvt-body", "pvt_v2-body", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl",
    "qwen2_audio", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_asr", "qwen3_moe", "qwen3_next", "roberta-prelayernorm",
    "sam", "sam2", "seamless_m4t", "segformer", "siglip2_vision_model", "smollm3", "smolvlm", "solar_open",
    "speech-encoder-decoder", "speech_to_text", "speecht5", "swiftformer", "swin", "switch_transformers", "t5",
    "t5gemma", "table-transformer", "tapas", "timesformer", "udop", "ultrabert", "vibevoice", "vibevoice_asr",
    "vivit", "voxtral", "voxtral_realtime", "whisper", "xglm", "yolos", "yoso", "zamba2",
    "llava_onevision", "longcat_flash", "longformer", "luke", "m2m_100", "mamba", "mamba2", "minicpmv4_7", "mixtral",
    "mobilenet_v1", "modernbert", "modernbert-decoder", "moonshine", "moonshine_streaming", "moss_transcribe_diarize",
    "mpt", "musicflamingo", "musicgen_melody", "nanochat", "nomic_bert", "olmo2", "olmo3", "pegasus_x", "pop2piano",
    "pp_formulanet", "qwen2", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_moe", "qwen2_vl", "qwen3",
    "qwen3_5", "qwen3_5-causal", "qwen3_5_moe", "qwen3_5_moe-causal", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_asr",
    "qwen3_moe", "qwen3_next", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "qwen4_exp-causal",
    "qwen4_exp_text", "recurrent_gemma", "reformer", "reformer-masked", "regnet-body", "rembert", "rembert-causal",
    "resnet-body", "rnj1", "roberta", "roberta-causal", "roberta-prelayernorm", "roberta-prelayernorm-causal",
    "roc_bert", "roc_bert-causal", "roformer", "roformer-causal", "rt_detr", "rt_detr-body", "rt_detr_v2",
    "rt_detr_v2-body", "rwkv", "sailvl", "sam", "sam2", "sam2_vision_model", "sam_hq", "sam_hq_vision_model",
    "sam_vision_model", "sarashina2_vision", "seamless_m4t", "seamless_m4t-speech", "seamless_m4t_v2",
    "seamless_m4t_v2-speech", "seed_oss", "segformer", "segformer-body", "segformer-semantic", "shieldgemma2",
    "shieldgemma2-classifier", "siglip-image", "siglip2", "siglip2-image", "siglip2_vision_model",
    "siglip_vision_model", "smollm3", "smolvlm", "solar_open", "speech-encoder-decoder", "speech_to_text", "speecht5",
    "squeezebert", "stablelm", "starcoder2", "step3_text", "step3_vl", "step3p5", "step3p7", "step_robotics",
    "superpoint", "swiftformer", "swiftformer-body", "swin", "swin-body", "swin2sr", "swin2sr-body", "swinv2",
    "swinv2-body", "switch_transformers", "t5", "t5gemma", "t5gemma2", "table-transformer", "table-transformer-body",
    "tapas", "textnet", "textnet-body", "timesformer", "timesformer-body", "tipsv2", "tipsv2_vision_model", "trocr",
    "udop", "ultrabert", "ultravbert", "ultravox", "umt5", "unlimited_ocr", "upernet", "vaultgemma", "vibevoice",
    "vibevoice_asr", "video_llama_3", "video_llava", "videomae", "videomae-body", "vipllava", "vision-encoder-decoder",
    "vit-body", "vit_mae", "vit_mae-body", "vit_msn", "vit_msn-body", "vitdet", "vitmatte", "vitpose", "vivit",
    "vivit-body", "vjepa2", "vjepa2-body", "voxtral", "voxtral_realtime", "whisper", "whisper-causal", "xglm", "xlm",
    "xlm-roberta", "xlm-roberta-causal", "xlm-roberta-xl", "xlm-roberta-xl-causal", "xlnet", "xlstm", "xmod",
    "xmod-causal", "yolos", "yolos-body", "yoso", "youtu", "zamba", "zamba2", "zaya",
)  # fmt: skip
# The inputs depend on these: another one is another workload.
OF_INPUTS = (
    "image_size", "patch_size", "patch_sizes", "patch_stride", "window_size", "num_patches", "num_mel_bins",
    "max_source_positions", "num_frames",
)  # fmt: skip
NO_NUMBERS = ("token", "dropout", "drop_", "eps", "init", "_id", "vocabulary_map")
# The inputs of these examples do not reach the key, or do not fit another value of it.
NOT_REACHED = {
    "chameleon": ["vq_config.num_embeddings"],  # as many as vocabulary_map has names for
    "colqwen2": ["vlm_config.vision_config.hidden_size"],
    "encoder-decoder": ["decoder.vocab_size"],
    "emu3": ["vq_config.codebook_size"],
    "gemma4": ["audio_config.hidden_size", "audio_config.num_attention_heads"],
    "gemma4_assistant": ["text_config.num_key_value_heads", "text_config.head_dim", "text_config.global_head_dim"],
    "gemma4_unified_assistant": [
        "text_config.num_key_value_heads", "text_config.head_dim", "text_config.global_head_dim",
    ],
    "git": ["num_image_with_embedding"],
    "glmasr": ["audio_config.hidden_size", "audio_config.max_position_embeddings"],
    "molmo": ["vision_backbone.image_patch_size"],
    "nemotron_h_omni": ["audio_config.hidden_size"],
    "qwen2_5_omni_thinker": ["audio_config.output_dim"],
    "qwen3_omni_moe_thinker": ["audio_config.output_dim"],
    "t5gemma": ["decoder.vocab_size"],
    "unlimited_ocr": ["text_config.num_attention_heads"],  # HF's eager attention repeats no keys, its others do
}  # fmt: skip
# Words of refusals that are no fault if HF runs: a spec says what it leaves out, a count would be no whole number, or
# the workload's pictures are not those of the changed config.
LEFT_OUT = ("described", "must have 2 to 4 layers", "no whole number", "this model takes videos of one size")


def list_numbers(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every whole number of a config, and every list of them."""
    for key, value in config.items():
        if any(word in key for word in NO_NUMBERS):
            continue
        if isinstance(value, dict):
            yield from list_numbers(value, (*path, key))
        elif type(value) is int or (isinstance(value, list) and value and all(type(entry) is int for entry in value)):
            yield (*path, key), value


def spoil(value: Any, *, kinds: bool) -> list[Any]:
    """Other values: sizes, lengths and fractions; with `kinds` also what is no number."""
    if isinstance(value, list):
        first = [value[0] + 1, *value[1:]]
        last = [[*value[:-1], entry] for entry in (0, -1, value[-1] + 1, *(("x", None) if kinds else ()))]
        return [value[:-1], [*value, value[-1]], first, *last, *([None, "x", []] if kinds else [])]
    return [value + 1, 2 * value, 0, -1, value + 0.5, *([None, "x", []] if kinds else [])]


def put(config: Json, path: tuple[str, ...], value: Any) -> Json:
    changed = inner = deepcopy(config)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("model_type", mark_heavy(TYPES, ("clip_vision_model",)))
def test_numbers(model_type: str) -> None:
    """What a spec does not describe is refused in these words, and sizes of 0 in general: no fault here."""
    torch = pytest.importorskip("torch")
    from flopcalc.measure.counters.flop_counter import count_flops
    from flopcalc.measure.hf.compare import compare, make_load
    from flopcalc.measure.hf.examples import find_example, list_cases, make_estimator, make_inputs, takes
    from flopcalc.measure.hf.kernels import install
    from flopcalc.measure.hf.models import build_model, count_parameters
    from flopcalc.measure.hf.verify import prepare

    prepare()
    example = find_example(model_type)
    if example.needs:
        pytest.importorskip(example.needs)
    config = example.configs[-1]
    named = {"architectures": [example.architecture]} if example.architecture else {}
    unspoiled = make_estimator(example, config)
    architecture = example.architecture or unspoiled.spec.architecture
    loads = [load for load, recipe in list_cases(example, config) if not recipe and load.get("phase") == "train"]
    load = {**next((load for load in loads if load.get("images")), loads[0]), "phase": "forward"}

    def count(changed: Json) -> Any:
        """The estimator, if it counts the workload."""
        estimator = make_estimator(example, changed)
        estimator.estimate(make_load(load))
        return estimator

    def trace(changed: Json, estimator: Any) -> Json:
        install(example.kernels)
        model = build_model(changed, example.attention, architecture=architecture).eval()
        extra = {**example.call, **({"use_cache": False} if takes(model, "use_cache") else {})}
        inputs = make_inputs(example, model.config, load, estimator)
        total, trainable = count_parameters(model)
        with torch.no_grad():
            counted = count_flops(model, lambda: model(**inputs, **extra))
        return {"rows": counted.rows, "total": total, "trainable": trainable, "not_counted": counted.not_counted}

    wrong, taken = [], 0
    for path, value in list_numbers(config):
        if ".".join(path) in NOT_REACHED.get(model_type, ()):
            continue
        for spoiled in spoil(value, kinds=model_type in TOWERS):
            changed = put(config, path, spoiled)
            said = f"{'.'.join(path)} {value} -> {spoiled}"
            estimator, refusal = unspoiled, ""
            try:
                estimator = count(changed)
            except FlopcalcError as error:
                refusal = str(error)
                is_size = (
                    type(spoiled) is int and spoiled > 0 and path[-1] not in OF_INPUTS and model_type not in TOWERS
                )
                if not is_size or any(words in refusal for words in LEFT_OUT):
                    continue
            try:
                traced = trace(changed, estimator)
            except Exception as error:  # whatever HF's code raises
                is_kernel = "multiple of 16 bytes" in str(error)  # a limit of torch's grouped products
                if not refusal and not is_kernel and path[-1] not in OF_INPUTS:
                    wrong.append(f"{said}: counted, but HF says {type(error).__name__}: {str(error)[:100]}")
                continue
            if refusal:
                wrong.append(f"{said}: HF runs it, but it is refused: {refusal}")
                continue
            taken += 1
            if path[-1] not in OF_INPUTS and not compare({**named, **changed}, load, {}, traced).is_equal:
                wrong.append(f"{said}: counted otherwise")
    assert not wrong, "\n".join(wrong)
    assert taken > 0
