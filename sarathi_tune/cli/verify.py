"""`sarathi-tune verify`: does a live server meet the objective, and up to which rate?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from sarathi_tune.cli import options as flags
from sarathi_tune.cli.edge import edge
from sarathi_tune.cli.launch import EngineFlags, launch_config, run_launch
from sarathi_tune.cli.output import STDOUT, check_target, emit_verification
from sarathi_tune.config.verify import CriterionName, EndpointName, VerifyConfig
from sarathi_tune.errors import ExitCode, UsageError
from sarathi_tune.units import parse_duration_ms
from sarathi_tune.workload.traces.reading import FORMATS

if TYPE_CHECKING:
    from sarathi_tune.goodput.verified import Verification

_USAGE = "say what to promise, for example sarathi-tune verify --target http://127.0.0.1:8000 --slo-itl 50ms"
_ENGINE: dict[str, Any] = {"rich_help_panel": "A server that is started here"}


@edge
def verify(
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="URL", help="An OpenAI-compatible server. The API key comes from SARATHI_TUNE_API_KEY."
        ),
    ] = None,
    slo_itl: flags.SloItl = None,
    slo_ttft: flags.SloTtft = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="As the server calls it. (default: the only one)")
    ] = None,
    workload: flags.WorkloadName = None,
    rate: Annotated[
        str | None,
        typer.Option("--rate", metavar="R", help="Requests per second. (default: search the largest that meets it)"),
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", metavar="N", help="A closed loop of N streams instead of a rate.")
    ] = None,
    seconds: Annotated[
        str | None,
        typer.Option(
            "--seconds", metavar="TIME", help="Length of one run; a closed loop is filled first. (default: 30s)"
        ),
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option("--time-limit", metavar="TIME", help="Of the search. (default: 300s)")
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(
            "--arrivals",
            metavar="poisson|constant|gamma:CV|ramp:FROM:TO|trace",
            help="How they arrive; a ramp's ends are req/s. (default: poisson; a trace as recorded, without a rate)",
        ),
    ] = None,
    workload_format: Annotated[
        str | None,
        typer.Option("--workload-format", metavar="NAME", help=f"Of a trace: {', '.join(FORMATS)}. (default: seen)"),
    ] = None,
    trace_speed: Annotated[
        str | None, typer.Option("--trace-speed", metavar="X", help="Replay a trace X times as fast. (default: 1)")
    ] = None,
    trace_start: Annotated[
        str | None, typer.Option("--trace-start", metavar="TIME", help="Where in a trace to begin. (default: 0)")
    ] = None,
    max_requests: Annotated[
        str | None, typer.Option("--max-requests", metavar="N", help="Use the first N requests of a trace.")
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", metavar="auto|completions|chat", help="(default: completions where there are)"),
    ] = None,
    criterion: Annotated[
        str | None,
        typer.Option(
            "--criterion",
            metavar="every-step|pooled|per-request",
            help="What must meet the objective. (default: every-step)",
        ),
    ] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="Of one request. (default: 600s)")
    ] = None,
    stall_timeout: Annotated[
        str | None, typer.Option("--stall-timeout", metavar="TIME", help="Between two tokens. (default: 60s)")
    ] = None,
    workers: Annotated[
        str | None, typer.Option("--workers", metavar="N", help="Client processes. (default: as many as are needed)")
    ] = None,
    vocab: Annotated[
        str | None, typer.Option("--vocab", metavar="N", help="Prompt token ids stay below it. (default: 30000)")
    ] = None,
    seed: flags.Seed = None,
    save_vllm: Annotated[
        str | None,
        typer.Option("--save-vllm", metavar="FILE", help="Also write it as `vllm bench serve --save-result` does."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="vllm", help="Start the server instead, once for each budget.", **_ENGINE),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            "--budgets",
            metavar="N,N,...",
            help="'default' leaves the flag out, 'recommended' is derived at the default. (default: both of these)",
            **_ENGINE,
        ),
    ] = None,
    engine_command: Annotated[
        str | None,
        typer.Option("--engine-command", metavar="COMMAND", help="(default: 'vllm serve')", **_ENGINE),
    ] = None,
    start_timeout: Annotated[
        str | None,
        typer.Option("--start-timeout", metavar="TIME", help="To become ready. (default: 600s)", **_ENGINE),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Where the server's logs are kept.", **_ENGINE)
    ] = None,
    extra: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="More arguments for the server.")
    ] = None,
    json_target: flags.JsonTarget = None,
    quiet: flags.Quiet = False,
) -> ExitCode:
    """Load a live server at a rate, or search the largest rate that meets the objective.

    With --engine the server is started here, once for each budget: verify --engine vllm --model DIR --budgets
    256,default --slo-itl 50ms --rate 1 -- --max-num-seqs 32
    """
    typed = EngineFlags(engine, engine_command, budgets, start_timeout, out, tuple(extra or ()))
    _check_subject(target, typed, save_vllm)
    name, cv, ramp = _parse_arrivals(arrivals)
    config = VerifyConfig(
        target=target or "",
        slo=flags.parse_slo(slo_itl, slo_ttft, _USAGE),
        **flags.given(
            model=None if engine else model,
            workload=workload,
            rate_per_s=flags.parse_rate(rate),
            concurrency=flags.parse_count(concurrency, "--concurrency"),
            seconds=_seconds(seconds, "--seconds"),
            time_limit_s=_seconds(time_limit, "--time-limit"),
            arrivals=name,
            burstiness_cv=cv,
            ramp_per_s=ramp,
            workload_format=flags.parse_choice(workload_format, "--workload-format", FORMATS),
            trace_speed=_speed(trace_speed),
            trace_start_s=_seconds(trace_start, "--trace-start"),
            max_requests=flags.parse_count(max_requests, "--max-requests"),
            endpoint=flags.parse_choice(endpoint, "--endpoint", get_args(EndpointName)),
            criterion=flags.parse_choice(criterion, "--criterion", get_args(CriterionName)),
            request_timeout_s=_seconds(timeout, "--timeout"),
            stall_timeout_s=_seconds(stall_timeout, "--stall-timeout"),
            workers=flags.parse_count(workers, "--workers"),
            vocab_size=flags.parse_token_count(vocab, "--vocab"),
            seed=flags.parse_count(seed, "--seed", smallest=0),
        ),
    )
    if engine is not None:
        return run_launch(launch_config(typed, config, model), json_target, quiet=quiet)
    check_target(json_target)
    check_target(save_vllm)
    if save_vllm == STDOUT:
        raise UsageError("--save-vllm needs a file: stdout belongs to the result.")
    from sarathi_tune.cli.ui import make_ui
    from sarathi_tune.tune.target_run import run_verification

    verification = run_verification(config, make_ui(quiet=quiet))
    try:
        return emit_verification(verification, verification.as_dict(), json_target, quiet=quiet)
    finally:
        if save_vllm is not None:
            _save_as_vllm(verification, config, save_vllm)


def _check_subject(target: str | None, typed: EngineFlags, save_vllm: str | None) -> None:
    """A server that is there, or one that is started; not both, and not neither."""
    if typed.engine is None:
        if target is None:
            raise UsageError("--target is missing: name the server, for example --target http://127.0.0.1:8000")
        if typed.names:
            raise UsageError(
                f"{typed.names[0]} is for a server that is started here: add --engine vllm, or leave it out."
            )
    elif target is not None:
        raise UsageError("Give --target or --engine, not both: one names a running server, the other starts one.")
    elif save_vllm is not None:
        raise UsageError("--save-vllm is for a single run: use it with --target.")


def _save_as_vllm(verification: "Verification", config: VerifyConfig, path: str) -> None:
    point = verification.point
    if point is None:
        return
    from sarathi_tune.loadgen.vllm_format import vllm_result
    from sarathi_tune.measure.documents import write_json

    document: dict[str, Any] = vllm_result(
        point.result,
        model=str(verification.server.get("model", "")),
        endpoint=str(verification.server.get("endpoint", "")),
        rate_per_s=point.rate_per_s,
        slo=config.slo,
        max_concurrency=config.concurrency,
    )
    write_json(Path(path), document, "result")


def _seconds(text: str | None, flag: str) -> float | None:
    return None if text is None else parse_duration_ms(text, flag) / 1e3


def _speed(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise UsageError(f"--trace-speed must be a positive number, for example 2, not {text!r}.")
    return speed


def _parse_arrivals(text: str | None) -> tuple[str | None, float | None, tuple[float, float] | None]:
    """(name, coefficient of variation of gamma, ends of a ramp)."""
    if text is None or text in ("poisson", "constant", "trace"):
        return text, None, None
    name, *parts = text.split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if all(0 <= number < float("inf") for number in numbers) and any(numbers):
        if name == "gamma" and len(numbers) == 1:
            return "gamma", numbers[0], None
        if name == "ramp" and len(numbers) == 2:
            return "ramp", None, (numbers[0], numbers[1])
    raise UsageError(
        "--arrivals must be poisson, constant, trace, gamma:CV (for example gamma:2), or ramp:FROM:TO in requests per "
        f"second (for example ramp:0.5:4), not {text!r}."
    )
