"""Arrays and tensors that are passed to engines and returned by them.

Holds: conversions without copies. It imports `enginecast.errors` and no other folder of ours;
torch only for a tensor on a GPU.
"""
