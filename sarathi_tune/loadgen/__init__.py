"""Sending a workload to an engine and counting what came back. `latency` defines every metric."""
