"""What this machine has and what is missing, as data.

Holds: checks of versions, providers and GPUs. It must not import torch, nor any folder but
`runtime`.
"""
