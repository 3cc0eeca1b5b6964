"""Tests of ONNX files from elsewhere, and the files."""
