"""How a model is spread over processes: tensor-parallel ranks inside a pipeline stage, stages one behind the other."""

from dataclasses import dataclass

from sarathi_tune.config.model import ModelConfig
from sarathi_tune.errors import UsageError


@dataclass(frozen=True, slots=True)
class Layout:
    """`tensor` ranks share each layer, `pipeline` stages share the layers. Rank = stage * tensor + tensor rank."""

    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for flag, value in (("--tensor-parallel", self.tensor), ("--pipeline-parallel", self.pipeline)):
            if value < 1:
                raise UsageError(f"{flag} must be at least 1, not {value}.")

    @property
    def num_ranks(self) -> int:
        """Processes in all."""
        return self.tensor * self.pipeline

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self.tensor

    def tensor_rank(self, rank: int) -> int:
        """Which part of its stage's layers a rank computes."""
        return rank % self.tensor

    def __str__(self) -> str:
        return f"TP={self.tensor} PP={self.pipeline}"


def check_layout(config: ModelConfig, layout: Layout) -> None:
    """Raise UsageError when the model can't be cut up like that, with the sizes that it can be cut into."""
    if not _is_divisible(config, layout.tensor):
        possible = ", ".join(str(size) for size in tensor_sizes(config))
        raise UsageError(
            f"--tensor-parallel {layout.tensor} can't be used: the {config.num_heads} query heads, "
            f"{config.num_kv_heads} key heads and {config.intermediate_size} MLP columns of {config.name} don't divide "
            f"among {layout.tensor} ranks; use one of {possible}."
        )
    if layout.pipeline > config.num_layers:
        raise UsageError(
            f"--pipeline-parallel {layout.pipeline} can't be used: {config.name} has {config.num_layers} layers and "
            f"every stage needs one; use at most {config.num_layers}."
        )


def tensor_sizes(config: ModelConfig) -> tuple[int, ...]:
    """The tensor-parallel sizes that a model can be cut into."""
    return tuple(size for size in range(1, config.num_heads + 1) if _is_divisible(config, size))


def _is_divisible(config: ModelConfig, size: int) -> bool:
    """Query heads and MLP columns are split; key heads are too, or each is kept by as many ranks as share it."""
    if config.num_heads % size or config.intermediate_size % size:
        return False
    return config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0
