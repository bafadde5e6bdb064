"""``python -m distflow``: the command line."""

from distflow.cli.entry import main

if __name__ == "__main__":
    main()
