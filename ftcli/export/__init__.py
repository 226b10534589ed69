"""Takes a run's result out of its run directory, in formats of others, each loaded again and compared."""
