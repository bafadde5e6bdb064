"""Ray as a cluster engine: placement groups, and actors that hold the resident programs."""
