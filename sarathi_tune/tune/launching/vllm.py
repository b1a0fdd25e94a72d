"""The command line of `vllm serve`."""

from collections.abc import Sequence
from itertools import pairwise

from sarathi_tune.errors import UsageError

BUDGET_FLAG = "--max-num-batched-tokens"
#: What this program sets itself, and the user's own arguments must not.
_OURS = {
    "--host": "the server listens on this machine alone",
    "--port": "a free port is chosen",
    "--uds": "the server is reached over a port",
    "--model": "give it before the --",
    BUDGET_FLAG: "it is what --budgets goes through",
}


def serve_command(
    executable: Sequence[str], model: str, port: int, budget_tokens: int | None, extra: Sequence[str]
) -> tuple[str, ...]:
    """`vllm serve MODEL ...` with a budget, or without the flag for the server's own default.

    Raises UsageError for arguments that would go against ours.
    """
    for argument in extra:
        name = argument.split("=", 1)[0].replace("_", "-")
        if name in _OURS:
            raise UsageError(f"{name} can't stand behind the --: {_OURS[name]}.")
    budget = () if budget_tokens is None else (BUDGET_FLAG, str(budget_tokens))
    return (*executable, model, "--host", "127.0.0.1", "--port", str(port), *budget, *extra)


def max_num_seqs_in(extra: Sequence[str]) -> int | None:
    """What the user's own arguments say about the decodes at once; None where they say nothing that can be read."""
    words = [word for argument in extra for word in argument.replace("_", "-").split("=", 1)]
    for name, value in pairwise(words):
        if name == "--max-num-seqs" and value.isascii() and value.isdigit():
            return int(value) or None
    return None
