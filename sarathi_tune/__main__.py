"""`python -m sarathi_tune` is `sarathi-tune`."""

from sarathi_tune.cli import main

if __name__ == "__main__":
    try:
        main()
    finally:
        # Under `-m` Python kills itself with SIGINT in the end, whatever the exit code, when the interruption that was
        # answered came up inside an `exec` of text (a dataclass being made, say). The next such `exec` takes that back.
        exec("")
