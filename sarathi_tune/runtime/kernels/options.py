"""How every kernel is compiled, and where compiled code is kept."""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Sums may be reordered and contracted to FMA; NaN and infinity keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

#: Compiled code is kept beside the package, or in the user's cache directory where that can't be written.
OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": _FASTMATH}


def forget_outdated(directory: Path) -> bool:
    """Delete what was compiled from other sources than those in `directory`; whether there was any.

    numba compiles anew when the file of a kernel changes, but not when an intrinsic in another file does.
    """
    cache = directory / "__pycache__"
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(directory.glob("*.py")))).hexdigest()
    stamp = cache / "sources"
    with suppress(OSError):
        if stamp.exists() and stamp.read_text() == sources:
            return False
    outdated = list(cache.glob("*.nb[ci]"))
    with suppress(OSError):
        for path in outdated:
            path.unlink(missing_ok=True)
        cache.mkdir(exist_ok=True)
        stamp.write_text(sources)
    return bool(outdated)


forget_outdated(Path(__file__).parent)
