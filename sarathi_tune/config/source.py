"""A model as a run sees it: its architecture, and the directory of its weights if it has any."""

from dataclasses import dataclass
from pathlib import Path

from sarathi_tune.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a model is and where its weights come from: `directory` holds safetensors files, None means random weights
    (a step's time depends on shapes, not on values)."""

    config: ModelConfig
    directory: Path | None = None

    @property
    def serve_name(self) -> str:
        """What `vllm serve` takes for this model: the directory, else where it is published, else its name."""
        return str(self.directory) if self.directory else self.config.hub_id or self.config.name
