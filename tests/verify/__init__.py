"""Tests of verify, and the lines that they judge on."""
