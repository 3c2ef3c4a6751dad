"""What a MODEL argument may be, and how its module and its weights are opened.

Holds: `open_source`, and what it opens: factories, `.pt2` programs and TorchScript here, folders in
`huggingface`, steps of a decoder in `generation`; each answers what its inputs are. It must not
trace a model.
"""
