"""Script the smallest submodules that contain a data-dependent branch; trace the rest.

All that calls torch.jit to make a program is here. It must not import `capture.tracing`.
"""
