"""Tests of the passes that keep the meaning."""
