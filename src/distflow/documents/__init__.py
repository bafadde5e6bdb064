"""Documents that people write: YAML with line marks, and findings that say where. Knows nothing of workflows or pools."""
