"""The form of each op in ONNX, filed by torch's namespaces.

One decorated function an op, and why it is not left to torch.onnx in its docstring.  A file of
forms needs no other line than its own: all that lie here are registered.  It imports no pass.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
