"""Runner and keeper: the two processes (the pair) that start, watch and stop the command of one attempt."""
