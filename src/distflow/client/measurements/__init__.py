"""What is measured while tasks run: their metrics and resource samples, and how they are exported."""
