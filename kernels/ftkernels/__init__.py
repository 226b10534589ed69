"""Triton kernels of ftcli, each beside a plain-torch reference. Imports torch and triton only."""
