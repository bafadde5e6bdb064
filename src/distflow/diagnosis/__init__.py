"""Find cause and remedy of a failure from the output and the ends of a gang. Pure functions of values."""
