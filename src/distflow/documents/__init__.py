"""Documents that people write: YAML with line numbers, problems with their places, durations, URLs and requirements files."""
