"""Watch or replace operators one by one, below autograd, while a mode is entered.

The class is torch's, and documented, but lives in a private module: it is imported here alone.
"""

from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = ["DispatchMode"]
