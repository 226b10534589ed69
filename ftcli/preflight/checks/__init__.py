"""Rules, one file for each subject. A rule takes a context, and facts where it needs some, and yields findings."""
