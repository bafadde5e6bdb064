"""Copy files between this machine and running tasks with rsync."""
