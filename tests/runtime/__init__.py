"""Tests of the runtime; they share the tiny artifacts of `artifact.py`."""
