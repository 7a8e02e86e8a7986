"""Published models that speak: codes of speech behind a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from lab.witnesses.base import Witness

GROUPS = 16  # codes of a frame, as the training code has it


def make_body(config: Any, attention: str) -> Any:
    """Qwen3's layers and last norm, without words."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    own = {key: getattr(config, key) for key in keys}
    head_dim = getattr(config, "head_dim", None) or own["hidden_size"] // own["num_attention_heads"]
    bias = getattr(config, "attention_bias", False)
    body = Qwen3Model(Qwen3Config(**own, head_dim=head_dim, attention_bias=bias, vocab_size=1))
    body.config._attn_implementation = attention
    del body.embed_tokens
    return body


class TimeDelay(nn.Module):
    """modeling_qwen3_tts.py, TimeDelayNetBlock: a convolution that keeps the length."""

    def __init__(self, width: int, out: int, kernel: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, out, kernel, padding="same")


class VoiceBlock(nn.Module):
    """modeling_qwen3_tts.py, SqueezeExcitationRes2NetBlock."""

    def __init__(self, width: int, scale: int, squeeze: int, kernel: int) -> None:
        super().__init__()
        part = width // scale
        self.tdnn1, self.tdnn2 = TimeDelay(width, width), TimeDelay(width, width)
        self.res2net_block, self.se_block = nn.Module(), nn.Module()
        self.res2net_block.blocks = nn.ModuleList(TimeDelay(part, part, kernel) for _ in range(scale - 1))
        self.se_block.conv1, self.se_block.conv2 = nn.Conv1d(width, squeeze, 1), nn.Conv1d(squeeze, width, 1)


class SpeakerEncoder(nn.Module):
    """modeling_qwen3_tts.py, Qwen3TTSSpeakerEncoder: it runs before forward, and never trains."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        wide, kernels = config.enc_channels, config.enc_kernel_sizes
        self.blocks = nn.ModuleList([TimeDelay(config.mel_dim, wide[0], kernels[0])])
        for width, kernel in zip(wide[1:-1], kernels[1:-1], strict=True):
            self.blocks.append(VoiceBlock(width, config.enc_res2net_scale, config.enc_se_channels, kernel))
        self.mfa, self.asp = TimeDelay(wide[-1], wide[-1], kernels[-1]), nn.Module()
        self.asp.tdnn = TimeDelay(3 * wide[-1], config.enc_attention_channels)
        self.asp.conv = nn.Conv1d(config.enc_attention_channels, wide[-1], 1)
        self.fc = nn.Conv1d(2 * wide[-1], config.enc_dim, 1)
        self.requires_grad_(False)


class Qwen3TTSForConditionalGeneration(Witness, PreTrainedModel, GenerationMixin):
    """QwenLM/Qwen3-TTS: modeling_qwen3_tts.py, with the forward that ms-swift trains: swift/model/models/qwen.py.

    There a position has two ids, of text and of speech; here `input_ids` are the text, and `codec_ids` hold the code.
    """

    config_class = PretrainedConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        own, attention = config.talker_config, config._attn_implementation
        inner, d, words = own.code_predictor_config, own.hidden_size, own.text_hidden_size
        talker, predictor = nn.Module(), nn.Module()
        self.talker, talker.code_predictor = talker, predictor
        talker.model, predictor.model = make_body(own, attention), make_body(inner, attention)
        self.check_rotary(own.rope_scaling, talker.model.config.head_dim)
        talker.model.text_embedding = nn.Embedding(own.text_vocab_size, words)
        talker.model.codec_embedding = nn.Embedding(own.vocab_size, d)
        talker.text_projection = nn.Module()
        talker.text_projection.linear_fc1 = nn.Linear(words, words)
        talker.text_projection.linear_fc2 = nn.Linear(words, d)
        talker.text_projection.act_fn = nn.SiLU()
        talker.codec_head = nn.Linear(d, own.vocab_size, bias=False)
        others = range(inner.num_code_groups - 1)
        predictor.model.codec_embedding = nn.ModuleList(nn.Embedding(inner.vocab_size, d) for _ in others)
        predictor.lm_head = nn.ModuleList(nn.Linear(inner.hidden_size, inner.vocab_size, bias=False) for _ in others)
        is_same = inner.hidden_size == d
        predictor.small_to_mtp_projection = nn.Identity() if is_same else nn.Linear(d, inner.hidden_size)
        self.speaker_encoder = None
        if config.tts_model_type == "base":
            self.speaker_encoder = SpeakerEncoder(config.speaker_encoder_config)
            if config.speaker_encoder_config.enc_dim != d:
                raise ValueError("the voice takes a position of the talker")
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Numbers do not matter here."""

    def check_rotary(self, scaling: Any, head_dim: int) -> None:
        """What apply_multimodal_rotary_pos_emb can cut."""
        sections = scaling["mrope_section"]
        if len(sections) > 3 if scaling["interleaved"] else 2 * sum(sections) != head_dim or min(sections) < 0:
            raise ValueError(f"sections {sections} do not fit heads of {head_dim}")

    def get_input_embeddings(self) -> Any:
        return self.talker.model.codec_embedding

    def get_output_embeddings(self) -> Any:
        return None

    def predict(self, codes: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """forward_sub_talker_finetune: logits of all codes of each frame but the first."""
        predictor = self.talker.code_predictor
        if codes.shape[1] != self.config.talker_config.num_code_groups:
            raise ValueError(f"{codes.shape[1]} codes in a frame")
        tables = [self.talker.model.codec_embedding, *predictor.model.codec_embedding]
        read = [states, *(table(codes[:, i]) for i, table in enumerate(tables[: GROUPS - 1]))]
        x = predictor.small_to_mtp_projection(torch.stack(read, 1))
        x = predictor.model(inputs_embeds=x, use_cache=False).last_hidden_state
        return torch.stack([head(x[:, i]) for i, head in enumerate(predictor.lm_head, 1)], 1)

    def forward(
        self,
        input_ids: torch.Tensor,
        codec_ids: torch.Tensor,
        codec_mask: torch.Tensor,
        attention_mask: Any = None,
        speaker_embedding: Any = None,
        labels: Any = None,
    ) -> Any:
        talker = self.talker
        project, first = talker.text_projection, codec_ids[..., 0]
        x = project.linear_fc2(project.act_fn(project.linear_fc1(talker.model.text_embedding(input_ids))))
        spoken = talker.model.codec_embedding(first)
        if speaker_embedding is not None:
            spoken = torch.cat([spoken[:, :6], speaker_embedding.unsqueeze(1), spoken[:, 7:]], 1)
        x = x + spoken
        for i in range(1, GROUPS):
            x = x + talker.code_predictor.model.codec_embedding[i - 1](codec_ids[..., i]) * codec_mask.unsqueeze(-1)
        x = talker.model(inputs_embeds=x, attention_mask=attention_mask, use_cache=False).last_hidden_state
        logits = talker.codec_head(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), first.flatten())
        if codec_mask.any():
            codes = codec_ids[codec_mask]
            others = self.predict(codes, x[:, :-1][codec_mask[:, 1:]])
            if loss is not None:
                loss = loss + 0.3 * nn.functional.cross_entropy(others.flatten(0, 1), codes[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)
