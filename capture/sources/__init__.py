"""What a MODEL argument may be, and how its module and its weights are opened.

Holds: Hugging Face folders, factories, `.pt2` files, checkpoints; each answers what its inputs are.
It must not trace a model.
"""
