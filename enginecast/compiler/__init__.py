"""From a model and a request to a published bundle: the steps of an export, in their order.

Holds: requests, steps, inputs and cases, building and publishing. It imports every worker
folder but `cache`, and no command line.
"""
