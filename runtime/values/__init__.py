"""Arrays and tensors that go into engines and come out of them.

Enters: conversions without copies. It imports `enginecast.errors` and no other folder of ours;
torch only for a tensor on a GPU.
"""
