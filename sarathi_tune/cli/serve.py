"""`sarathi-tune serve`: the built-in engine behind an OpenAI-compatible API."""

import os
from typing import Annotated

import typer

from sarathi_tune.cli import options as flags
from sarathi_tune.cli.edge import edge
from sarathi_tune.cli.output import STDOUT, check_target
from sarathi_tune.config.run import DEFAULT_BUDGET_TOKENS
from sarathi_tune.errors import ExitCode, UsageError
from sarathi_tune.server.settings import API_KEY_VARIABLE, ServeConfig
from sarathi_tune.units import parse_duration_ms

_DEFAULTS = ServeConfig()
_HTTP, _LOAD, _SCHEDULING = "HTTP", "Model and load", "Scheduling"


@edge
def serve(
    model: flags.Model = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="What clients call the model. (default: as given)",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="HOST", help=f"(default: {_DEFAULTS.host})", rich_help_panel=_HTTP),
    ] = None,
    port: Annotated[
        str | None,
        typer.Option(
            "--port", metavar="N", help=f"0 takes a free one. (default: {_DEFAULTS.port})", rich_help_panel=_HTTP
        ),
    ] = None,
    max_queue: Annotated[
        str | None,
        typer.Option(
            "--max-queue",
            metavar="N",
            help=f"Requests that may wait; the next one gets 429. (default: {_DEFAULTS.max_queue})",
            rich_help_panel=_HTTP,
        ),
    ] = None,
    stop_timeout: Annotated[
        str | None,
        typer.Option(
            "--stop-timeout",
            metavar="TIME",
            help=f"What running requests get when the server stops. (default: {_DEFAULTS.stop_timeout_s:g}s)",
            rich_help_panel=_HTTP,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        str | None,
        typer.Option(
            "--max-num-batched-tokens",
            metavar="N",
            help=f"Tokens per step: the budget. (default: {DEFAULT_BUDGET_TOKENS})",
            rich_help_panel=_SCHEDULING,
        ),
    ] = None,
    max_num_seqs: Annotated[
        str | None,
        typer.Option(
            "--max-num-seqs",
            metavar="N",
            help=f"Requests that run at once. (default: {_DEFAULTS.max_num_seqs})",
            rich_help_panel=_SCHEDULING,
        ),
    ] = None,
    scheduler: flags.Scheduler = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            metavar="",
            help="Compute what prompts share once. (default: on)",
            show_default=False,
            rich_help_panel=_SCHEDULING,
        ),
    ] = None,
    preemption: flags.Preemption = None,
    max_model_len: Annotated[
        str | None,
        typer.Option(
            "--max-model-len", metavar="N", help="Prompt and answer. (default: the model's)", rich_help_panel=_LOAD
        ),
    ] = None,
    kv_tokens: Annotated[
        str | None,
        typer.Option(
            "--kv-tokens",
            metavar="N",
            help="KV cache. (default: all sequences at full length, as far as a part of the memory allows)",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(
            "--record",
            metavar="FILE",
            help="Write the steps of the traffic there at the end, as a profile that `derive` takes.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    device: flags.Device = None,
    attention: flags.Attention = None,
    dtype: flags.Dtype = None,
    threads: flags.Threads = None,
    seed: flags.Seed = None,
) -> ExitCode:
    """Serve the built-in engine over HTTP as OpenAI's API: completions, chat, models, health, metrics."""
    scheduling = flags.parse_scheduling(scheduler, True if prefix_cache is None else prefix_cache, preemption)
    _check_record(record)
    config = ServeConfig(
        device=flags.parse_device(device, attention, dtype, threads),
        scheduling=scheduling,
        api_key=os.environ.get(API_KEY_VARIABLE) or None,
        **flags.given(
            model=model,
            served_name=served_model_name,
            host=host,
            port=flags.parse_count(port, "--port", smallest=0),
            token_budget=flags.parse_token_count(max_num_batched_tokens, "--max-num-batched-tokens"),
            max_num_seqs=flags.parse_count(max_num_seqs, "--max-num-seqs"),
            max_model_len=flags.parse_token_count(max_model_len, "--max-model-len"),
            kv_tokens=flags.parse_token_count(kv_tokens, "--kv-tokens"),
            max_queue=flags.parse_count(max_queue, "--max-queue", smallest=0),
            stop_timeout_s=parse_duration_ms(stop_timeout, "--stop-timeout") / 1e3 if stop_timeout else None,
            seed=flags.parse_seed(seed),
            record=flags.parse_path(record, "--record"),
        ),
    )
    from rich.text import Text

    from sarathi_tune.cli.consoles import talk_console
    from sarathi_tune.server.run import serve as run_server

    console = talk_console()
    return run_server(config, lambda line: console.print(Text(line), soft_wrap=True))


def _check_record(record: str | None) -> None:
    """Prove that the file can be written when the server ends. stdout stays empty."""
    if record == STDOUT:
        raise UsageError("--record needs a file: stdout stays empty.")
    check_target(record)
