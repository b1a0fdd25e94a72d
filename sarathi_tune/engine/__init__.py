"""What to compute in a step. Imports no torch: the same scheduler drives a real device and a virtual clock."""
