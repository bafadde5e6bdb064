"""How the processes of each framework are started and find each other: one small module each, and a table."""
