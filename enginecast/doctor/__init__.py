"""What this machine has and what is missing, as data.

Enters: checks of versions, providers and GPUs. It must not import torch, nor any folder but
`runtime`.
"""
