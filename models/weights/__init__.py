"""Weights and tokenizers of the small built-in models."""
