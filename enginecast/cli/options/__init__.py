"""Groups of options that several commands take, and the request that they make.

Holds: dataclasses of options, and the reading of their texts. It builds requests of
`enginecast.compiler` and knows nothing of what is done with them.
"""
