"""``python -m ftcli``: the same as the command ``ftcli``."""

from ftcli.cli.app import main

if __name__ == "__main__":
    main()
