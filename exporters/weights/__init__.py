"""The one safetensors file of weights, written tensor by tensor.

Holds: the file format. It knows no target.
"""
