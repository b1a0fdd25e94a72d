"""The same budget in the flags of other engines, each with what to know before pasting it."""

import shlex

from rich.console import Console
from rich.text import Text

from sarathi_tune.budget.engines import ENGINES, EngineFlags, translate
from sarathi_tune.report.console import print_heading, print_prose, print_unbroken
from sarathi_tune.report.result import Result


def engine_snippets(result: Result) -> tuple[EngineFlags, ...]:
    """The flags of every engine but vLLM, whose line stands at the top; nothing when no budget is advised."""
    advice = result.advice
    if advice.budget_tokens is None:
        return ()
    return tuple(
        translate(
            engine,
            budget=advice.budget_tokens,
            decodes=advice.limiting.decodes if advice.limiting else advice.max_num_seqs,
            max_num_seqs=advice.max_num_seqs,
            serial_chunk=advice.serial_chunk_tokens,
            model=shlex.quote(result.model_name),
        )
        for engine in ENGINES
        if engine != "vllm"
    )


def print_snippets(result: Result, console: Console) -> None:
    """Print a line to paste for every engine, and its notes."""
    snippets = engine_snippets(result)
    if not snippets:
        return
    print_heading("The same budget in other engines", console)
    for number, snippet in enumerate(snippets):
        if number:
            console.print()
        console.print(Text(f"  {snippet.engine} ({snippet.rule_version})", style="dim"), soft_wrap=True)
        if snippet.line:
            print_unbroken(Text(snippet.line), console)
        for note in snippet.notes:
            print_prose(Text(note), console)
