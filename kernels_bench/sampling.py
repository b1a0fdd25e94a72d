"""`python -m kernels_bench.sampling`: the sampling kernels alone; the last line on stdout is the document as JSON."""

import sys

from sarathi_tune.cli.app import app

app(["kernels", "--json-line", "--only", "sampling", *sys.argv[1:]], prog_name="sarathi-tune")
