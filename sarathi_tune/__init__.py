"""sarathi-tune: the token budget for your LLM server, measured, derived from an SLO, and verified."""

__version__ = "0.1.0"
