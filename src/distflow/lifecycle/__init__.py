"""States, end reasons, exit codes and offsets of clocks. All pure: without I/O."""
