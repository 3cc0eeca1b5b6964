"""Runs an artifact with numpy, onnxruntime and (for text) tokenizers; copied into each artifact as run.py."""

__all__ = ["ArtifactError", "ProviderError", "TxExportError"]


class TxExportError(Exception):
    """Anything that tx-export refuses or fails to do; the message is one line for people."""

    exit_code = 1


class ArtifactError(TxExportError):
    """An artifact that is missing, damaged or not ours."""


class ProviderError(TxExportError):
    """An execution provider that isn't there, or fails."""
