"""Every warning the tool can give: a stable code, the cause as seen on this run, and what to do about it.

A notice is a value. Whoever notices something returns it; the CLI prints it to stderr and the report puts it into the
JSON result, so that a person and a CI job read the same words. One function per notice, all in this file.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "warning"]


@dataclass(frozen=True, slots=True)
class Notice:
    """One warning. `code` is stable (for CI), `cause` says what was seen, `remedy` what to do."""

    code: str
    severity: Severity
    cause: str
    remedy: str

    def as_dict(self) -> dict[str, str]:
        """The notice as it stands in a JSON document."""
        return {"code": self.code, "severity": self.severity, "cause": self.cause, "remedy": self.remedy}


def machine_busy(load_1m: float, cores: int) -> Notice:
    """Something else was running while we measured."""
    return Notice(
        "machine-busy",
        "warning",
        f"The machine was busy while measuring: load average {load_1m:.1f} on {cores} cores.",
        "Stop the other work and measure again; step times on a shared machine are too long and too noisy.",
    )
