"""The one safetensors file of weights, written tensor by tensor.

Enters: the file format. It knows no target.
"""
