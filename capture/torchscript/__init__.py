"""TorchScript of the smallest submodules that hold a data-dependent branch; the rest is traced.

All that calls torch.jit to make a program is here. It must not import `capture.tracing`.
"""
