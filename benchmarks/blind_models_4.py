"""Counted steps of the fourth blind test in blind_steps.py: executed FLOPs alone, after tiles were fitted again.

No table and no earlier round has one of these steps. Lengths are odd on purpose; some batches fill a multiple of 32 or
64 rows. Experts and towers are among them.
"""

from __future__ import annotations

from blind_models import Model

MODELS: dict[str, Model] = {}  # nothing is timed

# Preset, layers (text, vision), batch, length, patches of each sample's image.
EXECUTED: dict[str, tuple[str, int, int, int, int, list[list[int]]]] = {
    "qwen2.5-7b 2x1050": ("qwen2.5-7b", 3, 0, 2, 1050, []),
    "llama-3-8b 1x1500": ("llama-3-8b", 2, 0, 1, 1500, []),
    "gemma-7b 1x1200": ("gemma-7b", 3, 0, 1, 1200, []),
    "olmo-3-7b 2x720": ("olmo-3-7b", 3, 0, 2, 720, []),
    "smollm3-3b 3x960": ("smollm3-3b", 5, 0, 3, 960, []),
    "qwen3-30b-a3b 2x1150": ("qwen3-30b-a3b", 3, 0, 2, 1150, []),
    "granite-3.0-3b-a800m 3x1150": ("granite-3.0-3b-a800m", 8, 0, 3, 1150, []),
    "mixtral-8x7b 2x1350": ("mixtral-8x7b", 2, 0, 2, 1350, []),
    "qwen3-vl-4b 2x900 image": ("qwen3-vl-4b", 4, 24, 2, 900, [[1, 36, 40]]),
    "qwen2-vl-7b 2x850 image": ("qwen2-vl-7b", 3, 12, 2, 850, [[1, 30, 38]]),
    "llava-1.5-13b 2x1000 image": ("llava-1.5-13b", 3, 8, 2, 1000, [[1, 24, 24]]),
    "gemma-3-12b 1x1000 image": ("gemma-3-12b", 3, 8, 1, 1000, [[1, 64, 64]]),
}
