"""Triton kernels for training, each beside a plain-torch reference; imports torch and triton only.

Import from the modules: this package has no names of its own, and ``ftkernels.limits`` needs neither torch nor triton.
"""
