"""``python -m distflow``: the command line."""

from distflow.cli.app import main

if __name__ == "__main__":
    main()
