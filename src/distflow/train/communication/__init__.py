"""Communication of ranks: gradients, votes, and reports of their current collectives."""
