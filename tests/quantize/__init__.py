"""Tests of the compression passes."""
