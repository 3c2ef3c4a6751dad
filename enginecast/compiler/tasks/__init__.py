"""What engines are called in turn for: the generation of text, or a state that goes from call to
call.

Holds: the base class, a file per task, and the table of them. An engine is compared over such
calls, besides single ones.
"""
