"""ftcli: fine-tune language models from YAML recipes."""

__version__ = "0.2.0"
