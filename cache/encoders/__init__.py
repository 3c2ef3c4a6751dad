"""The encoder that fills a cache: what it takes and gives, and its tokenizer.

Holds: encoders (an engine, a model run eagerly) and what is asked of them. It imports
`cache.store`, `runtime`, and of `capture` what opens a model; torch only to run one eagerly.
"""
