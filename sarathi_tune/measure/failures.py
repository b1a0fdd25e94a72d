"""Which exceptions mean "this step is too large for the device" and end one shape, and not the run."""

from sarathi_tune.errors import OutOfMemoryError

#: How torch's allocators say it: CUDA and HIP, the CPU allocator on Linux, and the same on Windows.
_PHRASES = ("out of memory", "can't allocate memory", "not enough memory")


def out_of_memory_reason(error: BaseException) -> str | None:
    """The first line of what the allocator said, or None when `error` is something else.

    `torch.OutOfMemoryError` is a RuntimeError and the CPU allocator raises a plain one, so that both are known by their
    words, without torch.
    """
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, OutOfMemoryError | MemoryError):
        return text
    if isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _PHRASES):
        return text
    return None
