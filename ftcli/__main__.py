"""``python -m ftcli``: the same as the command ``ftcli``."""

import sys

from ftcli.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
