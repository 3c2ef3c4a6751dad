"""What every kind of MODEL answers: the base class of sources, and of those that wrap another."""
