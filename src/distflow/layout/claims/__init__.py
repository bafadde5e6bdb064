"""Read the ranks that tasks claim in their ``ranks`` field, their commands and their scripts."""
