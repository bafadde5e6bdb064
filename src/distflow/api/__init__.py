"""The Python API behind ``import distflow``: specs, workflows and functions that run on nodes."""
