"""An embedding cache on disk: shards, their index, specs, locks.

Holds: file formats, and how they are committed. It knows neither texts nor encoders, and must not
import torch.
"""
