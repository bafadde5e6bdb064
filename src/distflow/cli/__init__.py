"""The command line: parse, make one call, show. Thin, quick to start, and the only place that prints."""
