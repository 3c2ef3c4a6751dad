"""What `enginecast inspect` measures: the plan of an export, without building it.

Holds: data and what fills them. It prints nothing; `enginecast.cli.inspect` has the pages.
"""
