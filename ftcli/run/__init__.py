"""The run directory: everything that a run writes, in a way that survives crashes, signals and full disks."""
