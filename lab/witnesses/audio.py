"""Published models that hear through a Whisper encoder over clips of any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from lab.witnesses.base import Chat, Norm
from lab.witnesses.grids import MiniCPMV


class WhisperAny(WhisperEncoder):
    """vllm-project/vllm: vllm/model_executor/models/minicpmo.py, ultravox.py: no padding to 30 s."""

    def forward(self, mel: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = nn.functional.gelu(self.conv1(mel))
        x = nn.functional.gelu(self.conv2(x)).transpose(1, 2)
        x = x + self.embed_positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, mask)
            x = x[0] if isinstance(x, tuple) else x
        out: torch.Tensor = self.layer_norm(x)
        return out


def put_clips(embeds: torch.Tensor, places: torch.Tensor, features: list[torch.Tensor]) -> torch.Tensor:
    """Features of clips in the places of the audio token."""
    return embeds.masked_scatter(places.unsqueeze(-1), torch.cat(features))


# --- MiniCPM-o --------------------------------------------------------------------------------------------------------
class MiniCPMO(MiniCPMV):
    """vllm-project/vllm: vllm/model_executor/models/minicpmo.py, MiniCPMO2_6 and 4_5, without its voice."""

    def build(self, config: Any) -> None:
        super().build(config)
        d = config.text_config.hidden_size
        self.apm = WhisperAny(config.audio_config)
        project = self.audio_projection_layer = nn.Module()
        project.linear1, project.linear2 = nn.Linear(config.audio_config.encoder_ffn_dim // 4, d), nn.Linear(d, d)

    def hide(self, frames: torch.Tensor) -> torch.Tensor:
        """What a position may not see: chunks after its own, and padding."""
        places = torch.arange((frames.shape[1] + 1) // 2)
        own = (frames.sum(1) + 1) // 2
        chunk = int(self.config.audio_chunk_length * 50)
        ends = (places // chunk + 1) * chunk if chunk > 0 else torch.full_like(places, len(places))
        is_open = (places < ends.unsqueeze(1)) & (places < own.view(-1, 1, 1, 1))
        return torch.zeros(is_open.shape).masked_fill(~is_open, torch.finfo(torch.float32).min)

    def embed(self, input_ids: torch.Tensor, inputs: dict[str, Any], embeds: Any = None) -> dict[str, Any]:
        made = super().embed(input_ids, inputs, embeds)
        if inputs.get("audio_features") is not None:
            project, pool = self.audio_projection_layer, self.config.audio_pool_step
            x = self.apm(inputs["audio_features"], self.hide(inputs["audio_mask"]))
            x = project.linear2(nn.functional.relu(project.linear1(x)))
            x = nn.functional.avg_pool1d(x.transpose(1, 2), pool, pool).transpose(1, 2)
            lengths = (((inputs["audio_mask"].sum(1) + 1) // 2 - pool) // pool + 1).tolist()
            features = [each[:own] for each, own in zip(x, lengths, strict=True)]
            places = input_ids == self.config.audio_token_id
            made["inputs_embeds"] = put_clips(made["inputs_embeds"], places, features)
        return made


# --- Ultravox ---------------------------------------------------------------------------------------------------------
class UltravoxModel(Chat):
    """vllm-project/vllm: vllm/model_executor/models/ultravox.py, UltravoxFeedForwardProjector."""

    def build(self, config: Any) -> None:
        self.audio_tower = WhisperAny(config.audio_config)
        wide, d = config.audio_config.d_model * config.stack_factor, config.text_config.hidden_size
        self.gated = config.projector_act == "swiglu"
        mid = config.hidden_size // (2 if self.gated else 1)
        project = self.multi_modal_projector = nn.Module()
        project.ln_pre, project.linear_1 = Norm(wide), nn.Linear(wide, config.hidden_size, bias=False)
        project.linear_2 = nn.Linear(mid, d, bias=False)
        project.ln_mid = Norm(mid) if config.projector_ln_mid else nn.Identity()
        project.ln_post = nn.Identity() if config.projector_ln_mid else Norm(d)

    def hear(self, mel: torch.Tensor) -> torch.Tensor:
        """Features of clips, frames side by side."""
        x, factor, project = self.audio_tower(mel), self.config.stack_factor, self.multi_modal_projector
        x = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % factor)).unflatten(1, (-1, factor)).flatten(2)
        x = project.linear_1(project.ln_pre(x))
        if self.gated:
            opened, gate = x.chunk(2, -1)
            x = opened * nn.functional.silu(gate)
        else:
            x = nn.functional.gelu(x)
        out: torch.Tensor = project.ln_post(project.linear_2(project.ln_mid(x)))
        return out

    def embed(self, input_ids: torch.Tensor, inputs: dict[str, Any], embeds: Any = None) -> dict[str, Any]:
        made = super().embed(input_ids, inputs, embeds)
        if inputs.get("audio_values") is not None:
            step = 2 * self.config.stack_factor
            lengths = ((inputs["audio_lens"].sum(1) + step - 1) // step).tolist()
            features = [each[:own] for each, own in zip(self.hear(inputs["audio_values"]), lengths, strict=True)]
            places = input_ids == self.config.audio_token_index
            made["inputs_embeds"] = put_clips(made["inputs_embeds"], places, features)
        return made
