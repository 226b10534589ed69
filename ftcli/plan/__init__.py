"""The plan of a run, made before anything is built: dtypes, what runs where, batches, graphs, policy, memory."""
