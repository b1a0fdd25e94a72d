"""Large pages are asked for: the kernel's own list of mappings says so."""

import re
from pathlib import Path

import pytest
import torch

from sarathi_tune.runtime.hugepages import ask_for_huge_pages

SMAPS = Path("/proc/self/smaps")
needs_linux = pytest.mark.skipif(
    not (SMAPS.exists() and Path("/sys/kernel/mm/transparent_hugepage").exists()),
    reason="no huge pages on request here",
)


def flags_at(address: int) -> list[str]:
    """The flags of the mapping that holds an address."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@needs_linux
def test_a_large_tensor_is_marked_and_stays_as_it_is() -> None:
    tensor = torch.empty(16 << 20, dtype=torch.uint8)
    ask_for_huge_pages(tensor)
    assert "hg" in flags_at(tensor.data_ptr() + (8 << 20))
    assert int(tensor.zero_().sum()) == 0


@needs_linux
def test_a_small_tensor_is_left_alone() -> None:
    tensor = torch.empty(3 << 20, dtype=torch.uint8)
    before = flags_at(tensor.data_ptr() + (1 << 20))  # memory that was freed may have been marked
    ask_for_huge_pages(tensor)
    assert flags_at(tensor.data_ptr() + (1 << 20)) == before
