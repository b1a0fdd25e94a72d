"""What is asked of an engine, and when: length distributions, named workloads, arrivals. Imports no torch."""
