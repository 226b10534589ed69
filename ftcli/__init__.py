"""ftcli: fine-tune language models from YAML recipes."""

__version__ = "1.0.0"
