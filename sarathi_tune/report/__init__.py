"""What came out, for a person and for a machine. Works from documents: imports no torch and nothing of `runtime`."""
