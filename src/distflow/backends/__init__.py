"""Where plans run: one package per kind of place."""
