"""Triton kernels of ftcli, each beside a plain-torch reference. Imports torch and triton only."""

from ftkernels.device import Choice, choose_backend
from ftkernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

__all__ = ["Choice", "choose_backend", "linear_cross_entropy", "linear_cross_entropy_reference"]
