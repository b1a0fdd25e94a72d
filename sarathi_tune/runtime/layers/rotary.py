"""Rotary position embedding: the table of cosines and sines, with Llama-3 and linear scaling.

Follows Hugging Face's `modeling_rope_utils` (4.56 and later) in float32.
"""

import math
from dataclasses import dataclass

import torch

from sarathi_tune.config.model import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of position times frequency, each [positions, head_dim / 2] float32."""

    cos: torch.Tensor
    sin: torch.Tensor


def build_rotary_table(config: ModelConfig, num_positions: int, device: torch.device) -> RotaryTable:
    """The table of the first `num_positions` positions."""
    frequencies = rotary_frequencies(config)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return RotaryTable(angles.cos().to(device).contiguous(), angles.sin().to(device).contiguous())


def rotary_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position, [head_dim / 2] float32, scaled as the config asks."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    return _scale_llama3(frequencies, scaling)


def _scale_llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow waves are stretched by `factor`, fast ones kept, those in between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position / scaling.low_freq_factor
    shortest = scaling.original_max_position / scaling.high_freq_factor
    stretched = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), blended, stretched)
