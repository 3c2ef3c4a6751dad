"""What a MODEL argument may be, and how its module and its weights are opened.

Holds: Hugging Face folders, factories, `.pt2` files, checkpoints. It must not trace a model.
"""
