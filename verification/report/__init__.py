"""Reports: plain data, tables on a terminal, JSON and HTML pages, which are templates here.

Holds: presentation only. It makes no decisions, and must not import torch.
"""
