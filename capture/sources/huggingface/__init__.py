"""Folders of transformers, diffusers and sentence-transformers, and how the hub downloads them.

Holds: what a config and its files say of a class, its weights and its layers.
"""
