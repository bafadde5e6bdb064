"""Ways to run commands and move bytes on one node; they know nothing of workflows."""
