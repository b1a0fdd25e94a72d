"""`sarathi-tune verify --engine vllm`: the same load on a server that is started with one budget after the other."""

import shlex
from dataclasses import dataclass
from typing import get_args

from sarathi_tune.cli import options as flags
from sarathi_tune.cli.output import check_target, emit_budgets
from sarathi_tune.config.launch import EngineName, LaunchConfig
from sarathi_tune.config.verify import VerifyConfig
from sarathi_tune.errors import ExitCode, UsageError
from sarathi_tune.units import parse_duration_ms

DEFAULT, RECOMMENDED = "default", "recommended"
_USAGE = "for example sarathi-tune verify --engine vllm --model DIR --budgets 256,default --slo-itl 50ms --rate 1"


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """The flags of a server that is to be started, as they were typed."""

    engine: str | None
    command: str | None
    budgets: str | None
    start_timeout: str | None
    out: str | None
    extra: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """Those that were given beside --engine."""
        given = {
            "--engine-command": self.command,
            "--budgets": self.budgets,
            "--start-timeout": self.start_timeout,
            "--out": self.out,
        }
        return [name for name, text in given.items() if text is not None] + [repr(text) for text in self.extra[:1]]


def launch_config(typed: EngineFlags, verify: VerifyConfig, model: str | None) -> LaunchConfig:
    """The flags as a configuration. Raises UsageError for the first one that can't be used."""
    engine = flags.parse_choice(typed.engine, "--engine", get_args(EngineName))
    if model is None:
        raise UsageError(f"--model is missing: the model that the server is to load, {_USAGE}.")
    timeout = typed.start_timeout
    budgets = flags.parse_list(typed.budgets or f"{DEFAULT},{RECOMMENDED}", _budget, "--budgets")
    return LaunchConfig(
        verify=verify,
        model=model,
        budgets_tokens=tuple(budget for budget in budgets if budget != RECOMMENDED),
        recommend=RECOMMENDED in budgets,
        extra=typed.extra,
        **flags.given(
            engine=engine,
            executable=_executable(typed.command),
            start_timeout_s=None if timeout is None else parse_duration_ms(timeout, "--start-timeout") / 1e3,
            out_dir=flags.parse_path(typed.out, "--out"),
        ),
    )


def run_launch(config: LaunchConfig, json_target: str | None, *, quiet: bool) -> ExitCode:
    """Compare the budgets and show them."""
    check_target(json_target, config.out_dir)
    from sarathi_tune.cli.ui import make_ui
    from sarathi_tune.tune.launching.budgets import compare_budgets

    comparison = compare_budgets(config, make_ui(quiet=quiet))
    return emit_budgets(comparison, comparison.as_dict(config.verify.as_dict()), json_target, quiet=quiet)


def _budget(text: str, flag: str) -> int | str | None:
    """A number of tokens, None for the server's default, or the word for the one that is derived."""
    if text in (DEFAULT, RECOMMENDED):
        return None if text == DEFAULT else RECOMMENDED
    return flags.parse_token_count(text, flag)


def _executable(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    try:
        parts = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--engine-command {text!r} can't be split into words: {error}.") from None
    if not parts:
        raise UsageError("--engine-command is empty: name the executable, for example '/opt/vllm/bin/vllm serve'.")
    return parts
