"""The few signs that aren't ASCII, and what stands for them where the output can't carry them."""

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD, Box
from rich.console import Console


@dataclass(frozen=True, slots=True)
class Glyphs:
    """`eighths` are the partial blocks of a bar, from one eighth to a whole one; `table` has a rule below the head."""

    eighths: str
    line: str
    crossing: str
    more: str
    pointer: str
    at_most: str
    arrow: str
    dash: str
    table: Box


_ASCII_HEAD = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
UNICODE = Glyphs(
    eighths="▏▎▍▌▋▊▉█",
    line="│",
    crossing="┃",
    more="▶",
    pointer="▸",
    at_most="≤",
    arrow="→",
    dash="╌",
    table=SIMPLE_HEAD,
)
ASCII = Glyphs(
    eighths="#", line="|", crossing="|", more=">", pointer=">", at_most="<=", arrow="->", dash="-", table=_ASCII_HEAD
)


def glyphs_for(console: Console) -> Glyphs:
    """What the console's encoding can show."""
    return ASCII if console.options.ascii_only else UNICODE
