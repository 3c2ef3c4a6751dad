"""Reports: plain data, tables on a terminal, JSON and one HTML page.

Enters: what is shown. It decides nothing, and must not import torch.
"""
