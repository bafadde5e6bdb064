"""Read and export the metrics and resource samples of tasks."""
