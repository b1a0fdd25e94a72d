"""`python -m kernels_bench.attention`: the attention kernels alone; the last line on stdout is the document as JSON."""

import sys

from sarathi_tune.cli.app import app

app(["kernels", "--json-line", "--only", "attention", *sys.argv[1:]], prog_name="sarathi-tune")
