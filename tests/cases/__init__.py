"""Faults that people met on the way from PyTorch to a running artifact; a test's name begins with the case's number."""
