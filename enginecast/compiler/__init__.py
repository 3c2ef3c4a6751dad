"""From a model and a request to a published bundle: the steps of an export, in their order.

Enters: what is asked, the steps, inputs and cases, build, publish. It imports every worker folder
but `cache`, and no command line.
"""
