"""Find the cause and the remedy of a failure from the output of tasks and the way they ended. All functions are pure."""
