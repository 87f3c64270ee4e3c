"""Files, processes, progress, the command line and the machine: below everything else."""
