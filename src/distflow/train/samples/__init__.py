"""Programs to try strategies with."""
