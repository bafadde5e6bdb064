"""The placement of tasks on nodes."""
