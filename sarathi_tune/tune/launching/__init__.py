"""Starting the server that is measured, with one budget after the other.

keeper    a small process of its own that starts the server, and ends it whatever becomes of us
server    the keeper's other end: start, wait until it answers, stop
vllm      the command line of `vllm serve`
budgets   the same load on the server with each budget
"""
