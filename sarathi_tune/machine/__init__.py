"""What the machine is, and what else happened on it while steps were timed. Reads the operating system and NVML only:
no torch, so that `doctor` answers at once."""
