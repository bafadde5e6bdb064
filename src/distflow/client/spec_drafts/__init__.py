"""Write specs for users: from command lines, from scripts for Slurm, and as copies of samples."""
