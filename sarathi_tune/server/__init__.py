"""The built-in engine behind an OpenAI-compatible HTTP API. Imports no torch and no web library at its top.

The life of a request: `app` reads it (`calls` refuses what can't be served, `text` makes tokens of it) -> `desk` gives
it a ticket, or 429 -> `engine_thread` adds it to the engine and steps; after each step one message goes back to the
event loop -> `desk` turns each token into text (`detokenise`) and counts it (`metrics`) -> `replies` writes it to the
client. A client that goes away takes its request out of the engine. `run` starts and stops all of this.
"""
