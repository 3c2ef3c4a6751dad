"""Reading a cache: by number, ids or text, as datasets, or in the place of an encoder.

Holds: readers. They write nothing, and never encode a text. Plain reading never imports torch.
"""
