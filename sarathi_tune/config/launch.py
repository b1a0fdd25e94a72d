"""What `sarathi-tune verify --engine vllm` is asked to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sarathi_tune.config.run import DEFAULT_OUT_DIR
from sarathi_tune.config.verify import VerifyConfig
from sarathi_tune.errors import UsageError

EngineName = Literal["vllm"]


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """A server to start with each of `budgets_tokens` in turn (None: without the flag, at its own default), and the
    load that each of them gets. `recommend`: also one that is derived by measuring the server at its default.
    `verify.target` is filled in with the server's address."""

    verify: VerifyConfig
    model: str
    budgets_tokens: tuple[int | None, ...]
    recommend: bool = False
    engine: EngineName = "vllm"
    executable: tuple[str, ...] = ("vllm", "serve")
    extra: tuple[str, ...] = ()
    start_timeout_s: float = 600.0
    out_dir: Path = DEFAULT_OUT_DIR

    def __post_init__(self) -> None:
        if not self.budgets_tokens and not self.recommend:
            raise UsageError("--budgets names nothing: name the budgets to compare, for example --budgets 256,default.")
        if len(set(self.budgets_tokens)) < len(self.budgets_tokens):
            raise UsageError("--budgets names a budget twice.")
