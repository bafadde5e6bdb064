"""How each framework's processes are started and told of each other: one small module each, and one table of them."""
