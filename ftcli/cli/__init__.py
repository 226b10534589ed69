"""The command line. Only this package reads the environment, prints, and knows about exit statuses of processes."""
