"""The command line. Most commands parse their arguments, call ``distflow.client`` and print the result."""
