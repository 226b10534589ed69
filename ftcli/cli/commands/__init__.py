"""One file for each command. A command parses its options and returns a :class:`ftcli.cli.options.Invocation`."""
