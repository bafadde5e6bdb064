"""Questions to nodes about running tasks: their stacks, their leases, a command inside them."""
