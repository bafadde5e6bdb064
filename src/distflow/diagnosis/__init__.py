"""Find the cause and the remedy of a failure from the output of tasks and the way they ended. Pure functions of values."""
