"""`python -m kernels_bench.all_reduce`: all-reduce alone; the last line on stdout is the document as JSON."""

import sys

from sarathi_tune.cli.app import app

app(["kernels", "--json-line", "--only", "all-reduce", *sys.argv[1:]], prog_name="sarathi-tune")
