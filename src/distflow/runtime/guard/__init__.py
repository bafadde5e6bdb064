"""Runner and keeper: the two processes that start, watch and stop the command of one attempt."""
