"""What a run will do, decided before anything is built: dtypes, what runs where, batches, graphs, policy, memory."""
