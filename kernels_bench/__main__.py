"""`python -m kernels_bench`: every kernel beside its ceiling; the last line on stdout is the document as JSON.

Takes the flags of `sarathi-tune kernels`.
"""

import sys

from sarathi_tune.cli.app import app

app(["kernels", "--json-line", *sys.argv[1:]], prog_name="sarathi-tune")
