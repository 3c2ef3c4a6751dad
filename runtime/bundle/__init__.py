"""The bundle on disk: manifest, files, digests, publishing.

The reader defines the format. It must not import torch or any engine's library.
"""
