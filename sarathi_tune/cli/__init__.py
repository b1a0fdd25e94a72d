"""The command line: the only place that reads flags, builds configurations, prints, and sets exit codes.

One file per command. Whatever takes long to import is imported inside the command that needs it, so that `--help` and
`derive` answer at once.
"""

from sarathi_tune.cli.app import main

__all__ = ["main"]
