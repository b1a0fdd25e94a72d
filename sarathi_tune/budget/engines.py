"""The derived budget in the flags of each engine. They don't count the same tokens, so the numbers differ.

Two designs exist. In *mixing* engines decodes and a chunk share a step, and the budget bounds that step. In *delaying*
engines a prefill step runs between two decode steps: a gap is a decode step plus a chunk, so the chunk must be smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sarathi_tune.errors import UsageError

EngineName = Literal["vllm", "sglang", "sglang-mixed", "tensorrt-llm", "lmdeploy", "llama.cpp", "tgi"]


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """What to paste for one engine. `rule_version` says which version or source the translation was written for;
    `notes` what to know before pasting. `flags` is empty when the SLO can't be met by this engine's design."""

    engine: EngineName
    flags: tuple[tuple[str, str], ...]
    command: str
    rule_version: str
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The command line; empty when there is nothing to paste."""
        if not self.flags:
            return ""
        return " ".join([self.command, *(f"{name} {value}".strip() for name, value in self.flags)])

    def as_dict(self) -> dict[str, Any]:
        """The flags as they stand in a document."""
        return {
            "engine": self.engine,
            "flags": dict(self.flags),
            "line": self.line,
            "rule_version": self.rule_version,
            "notes": list(self.notes),
        }


ENGINES: tuple[EngineName, ...] = ("vllm", "sglang", "sglang-mixed", "tensorrt-llm", "lmdeploy", "llama.cpp", "tgi")


def translate(
    engine: str,
    *,
    budget: int,
    decodes: int,
    max_num_seqs: int | None = None,
    serial_chunk: int | None = None,
    model: str = "MODEL",
    dp_size: int = 1,
    tokens_per_block: int = 32,
) -> EngineFlags:
    """The flags of `engine` that amount to a step of `budget` tokens with `decodes` of them decodes.

    `serial_chunk` is the largest chunk that may delay a decode step (`Derivation.serial_chunk`), None when none may.
    Raises UsageError for an engine that isn't known.
    """
    seqs = max_num_seqs or decodes
    chunk = budget - decodes
    match engine:
        case "vllm":
            flags = (("--max-num-batched-tokens", str(budget)), ("--max-num-seqs", str(seqs)))
            notes = (
                "The budget counts decodes: a full step has " + f"{decodes:,} decodes and {chunk:,} prompt tokens.",
            )
            return EngineFlags("vllm", flags, f"vllm serve {model}", "vLLM 0.32.0, read in its source", notes)
        case "sglang-mixed":
            return _sglang_mixed(chunk, seqs, model, dp_size)
        case "sglang":
            return _sglang(serial_chunk, seqs, model, dp_size)
        case "tensorrt-llm":
            return _tensorrt_llm(budget, seqs, model, tokens_per_block)
        case "lmdeploy":
            return _lmdeploy(serial_chunk, seqs, model)
        case "llama.cpp":
            return _llama_cpp(budget, seqs, model)
        case "tgi":
            return _tgi(serial_chunk, model)
    raise UsageError(f"Unknown engine {engine!r}: choose one of {', '.join(ENGINES)}.")


def _sglang_mixed(chunk: int, seqs: int, model: str, dp_size: int) -> EngineFlags:
    flags = (
        ("--chunked-prefill-size", str(chunk * dp_size)),
        ("--enable-mixed-chunk", ""),
        ("--max-running-requests", str(seqs)),
    )
    notes = ["Counts prefill tokens only; decodes ride along on top, because mixed chunks are on."]
    if dp_size > 1:
        notes.append(f"With DP attention the size is divided by dp_size ({dp_size}), so it is given multiplied.")
    return EngineFlags("sglang-mixed", flags, _sglang_command(model), _SGLANG_SOURCE, tuple(notes))


def _sglang(serial_chunk: int | None, seqs: int, model: str, dp_size: int) -> EngineFlags:
    if serial_chunk is None:
        return _none("sglang", _sglang_command(model), _SGLANG_SOURCE, "add --enable-mixed-chunk (engine sglang-mixed)")
    flags = (("--chunked-prefill-size", str(serial_chunk * dp_size)), ("--max-running-requests", str(seqs)))
    note = "Without --enable-mixed-chunk a chunk delays decodes: a gap is the decode step plus the chunk's own step."
    return EngineFlags("sglang", flags, _sglang_command(model), _SGLANG_SOURCE, (note,))


def _tensorrt_llm(budget: int, seqs: int, model: str, tokens_per_block: int) -> EngineFlags:
    aligned = budget // tokens_per_block * tokens_per_block
    command, source = f"trtllm-serve {model}", "TensorRT-LLM documentation; max_num_tokens counts decodes"
    if aligned < max(seqs, 1):
        return _none("tensorrt-llm", command, source, f"use blocks smaller than {tokens_per_block} tokens")
    flags = (("--max_num_tokens", str(aligned)), ("--max_batch_size", str(seqs)))
    notes = (
        f"A multiple of tokens_per_block ({tokens_per_block}).",
        "Needs enable_chunked_prefill: true (enable_chunked_context when building); else the longest prompt must fit.",
    )
    return EngineFlags("tensorrt-llm", flags, command, source, notes)


def _lmdeploy(serial_chunk: int | None, seqs: int, model: str) -> EngineFlags:
    command, source = f"lmdeploy serve api_server {model}", "LMDeploy documentation and threads (TurboMind)"
    if serial_chunk is None or serial_chunk <= seqs:
        return _none("lmdeploy", command, source, f"the value must exceed the {seqs:,} concurrent requests")
    flags = (("--max-prefill-token-num", str(serial_chunk)), ("--max-batch-size", str(seqs)))
    note = "Priced as a chunk that delays a decode step, the careful reading; it must exceed the concurrent requests."
    return EngineFlags("lmdeploy", flags, command, source, (note,))


def _llama_cpp(budget: int, seqs: int, model: str) -> EngineFlags:
    flags = (("-b", str(budget)), ("-ub", str(min(512, budget))), ("-np", str(seqs)))
    note = "The logical batch -b bounds the stall; the physical -ub must not exceed it (default 512)."
    return EngineFlags("llama.cpp", flags, f"llama-server -m {model}", "llama.cpp server documentation", (note,))


def _tgi(serial_chunk: int | None, model: str) -> EngineFlags:
    command, source = f"text-generation-launcher --model-id {model}", "TGI documentation; prefill pauses decodes"
    if serial_chunk is None:
        return _none("tgi", command, source, "prefill always pauses decodes there")
    flags = (("--max-batch-prefill-tokens", str(serial_chunk)),)
    note = "Must be at least the longest prompt (--max-input-tokens); with longer ones this engine can't meet the SLO."
    return EngineFlags("tgi", flags, command, source, (note,))


_SGLANG_SOURCE = "SGLang documentation and threads"


def _sglang_command(model: str) -> str:
    return f"python -m sglang.launch_server --model-path {model}"


def _none(engine: EngineName, command: str, source: str, remedy: str) -> EngineFlags:
    return EngineFlags(engine, (), command, source, (f"No value of its flag meets this SLO: {remedy}.",))
