"""The command line. Each command parses its arguments, calls ``distflow.client`` and prints the result."""
