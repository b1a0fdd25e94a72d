"""`python -m sarathi_tune` is `sarathi-tune`."""

from sarathi_tune.cli import main

if __name__ == "__main__":
    main()
