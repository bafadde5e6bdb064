"""Samples for each rank: shares, batches and loaders that resume exactly."""
