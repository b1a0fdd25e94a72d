"""How every kernel is compiled."""

from typing import Any

#: Sums may be reordered and contracted to FMA; NaN and infinity keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

#: Compiled code is kept beside the package, or in the user's cache directory where that can't be written. numba
#: compiles anew when the file of a kernel changes, but not when an intrinsic in another file does: after editing
#: `intrinsics.py`, `dot.py` or `parallel.py`, delete `__pycache__/*.nb?`.
OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": _FASTMATH}
