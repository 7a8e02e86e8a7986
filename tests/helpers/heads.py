"""Classes of transformers with other heads than a language model's, and tiny cases of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from flopcalc.core.spec.spec import find_spec
from flopcalc.measure.hf.examples import Example, find_example, list_cases, make_estimator

LABELS = 5
MAPPINGS = {
    "none": "MODEL_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "encoder": "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES",
}
LOSSES = {"none": "last_hidden_state", "encoder": "last_hidden_state", "question": "start_logits"}
# Classes that are refused with a reason, and those whose forward wants inputs that an example does not have.
REFUSED = {
    "BlipModel",
    "DepthProModel",
    "UdopModel",
    "PerceiverForSequenceClassification",
    "LongformerForQuestionAnswering",
}
NOT_RUN = {
    "FunnelBaseModel": "its spec has the decoder, which this class lacks",
    "HGNetV2Backbone": "hands out feature maps; counted as the classifier, which a note says",
    "FastVlmModel": "needs timm", "Gemma3nModel": "needs timm", "PerceptionLMModel": "needs timm",
    "TimmWrapperModel": "needs timm",
    "InstructBlipModel": "hands out no last hidden state", "InstructBlipVideoModel": "hands out no last hidden state",
    "Blip2Model": "hands out no last hidden state", "OwlViTModel": "hands out no last hidden state",
    "Owlv2Model": "hands out no last hidden state",
    "VJEPA2Model": "trains what its predictor hands out; it has traces of its own",
    "RTDetrModel": "trains what its encoder's heads hand out too; it has traces of its own",
    "RTDetrV2Model": "trains what its encoder's heads hand out too; it has traces of its own",
    "DFineModel": "trains what its encoder's heads hand out too; it has traces of its own",
    "Mask2FormerModel": "hands out no last hidden state", "MaskFormerModel": "hands out no last hidden state",
    "MusicgenModel": "cannot be built", "MusicgenMelodyModel": "cannot be built",
    "PerceiverModel": "takes what no tokenizer makes", "PI0Model": "takes actions",
    "SeamlessM4TModel": "the whole speech model", "SeamlessM4Tv2Model": "the whole speech model",
    "SpeechT5Model": "takes what its wrappers make", "T5GemmaEncoderModel": "wants another config",
}  # fmt: skip

# PEFT takes pre_classifier for the classifier that it trains; its wrapper cannot run the model; or what it adapts is
# not on the way to the loss (the pooler alone is linear; a function of the model's own cuts gradients).
NOT_ADAPTED = (
    "DistilBertForSequenceClassification",
    "DeepseekV4Model",
    "IBertModel",
    "SqueezeBertModel",
    "ReformerModel",
)


class Case(NamedTuple):
    """A tiny config of a class, and how it is run."""

    config: dict[str, Any]
    example: Example
    workload: dict[str, Any]


def list_classes(model_type: str) -> dict[str, str]:
    """The classes of a model type -> what kind of head they have."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for kind, mapping in MAPPINGS.items():
        named = getattr(modeling_auto, mapping).get(model_type)
        for name in [named] if isinstance(named, str) else named or ():
            found.setdefault(name, kind)
    return {name: kind for name, kind in found.items() if name not in REFUSED and name not in NOT_RUN}


def list_class_cases(model_type: str, named: str, kind: str) -> Iterator[Case]:
    """A case for every config of the type's example."""
    example = find_example(model_type)
    is_own = named == (example.architecture or find_spec(model_type).architecture)
    loss = example.loss if is_own else LOSSES.get(kind, "logits")
    made = example._replace(architecture=named, loss=loss)
    for config in example.configs:
        changed = {**config, "num_labels": LABELS} if kind in ("sequence", "token") else dict(config)
        if kind == "sequence":
            _set_padding(changed)
        workload = dict(next(list_cases(example, config))[0])
        if "decoder_seq" in workload and not make_estimator(made, changed).has_decoder:
            del workload["decoder_seq"]
        if kind == "sequence" and "decoder_seq" in workload:
            workload["decoder_seq"] = workload["seq"]
            changed["eos_token_id"] = 2
            ids = [[*[3] * (workload["seq"] - 1), 2]] * workload["batch"]
            made = made._replace(inputs={**made.inputs, "input_ids": {"fill": "value", "value": ids, "dtype": "int"}})
        yield Case(changed, made, workload)


def _set_padding(config: dict[str, Any]) -> None:
    """A classifier looks for the last token that is no padding."""
    for table in (config, config.get("text_config")):
        if isinstance(table, dict) and table.get("pad_token_id") is None:
            table["pad_token_id"] = 1


def list_recipes(kind: str, named: str) -> list[dict[str, Any]]:
    """Everything trains, with and without recomputation; then adapters, where PEFT can adapt all but the head."""
    import transformers

    recipes: list[dict[str, Any]] = [{}]
    if getattr(transformers, named).supports_gradient_checkpointing:
        recipes.append({"recompute": "full"})
    if kind in ("none", "sequence") and named not in NOT_ADAPTED:
        recipes.append({"lora": {"r": 3, "targets": "all-linear"}})
    return recipes
