"""What ranks send to each other: gradients, votes, and measurements of both."""
