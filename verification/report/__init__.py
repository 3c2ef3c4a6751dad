"""Reports: plain data, tables on a terminal, JSON and one HTML page.

Holds: presentation only. It makes no decisions, and must not import torch.
"""
