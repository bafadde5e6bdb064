"""Gangs on nodes that a cluster engine allocates, such as the nodes of a job of Slurm."""
