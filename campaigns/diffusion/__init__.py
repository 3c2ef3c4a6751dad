"""Whole diffusion pipelines in small: exported in fp32, and compared with eager step by step."""
