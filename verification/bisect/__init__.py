"""Find the pass, the site and the module where accuracy is lost.

Called when a comparison failed; it imports no exporter, and publishes nothing.
"""
