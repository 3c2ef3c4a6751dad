"""A target of enginecast that saves the program as it is, and runs it with torch."""
