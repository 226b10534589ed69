"""Rules, grouped by the stage that runs them. Each takes a context and facts and yields findings; none loads torch."""
