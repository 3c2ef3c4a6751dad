"""From a model and a request to a published bundle: the steps of an export, in their order.

    prepare (ranges) -> engines (tasks) -> publication
    export, verify, inspection call these in order

Holds: a folder for each step. The files here are what all of them use: what is asked, tried and
needed, and how a step is shown; they import no folder. `enginecast.compiler` imports every worker
folder but `cache`, and no command line.
"""
