"""Serving a bundle with servers of others: model repositories for Triton Inference Server.

Holds: a bundle. It copies files and writes configuration; it must not import torch, nor any
folder but `runtime`.
"""
