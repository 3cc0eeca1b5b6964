"""Transformer families, one file each."""

if __name__ != "tx_export.models":
    raise ImportError("this folder installs as tx_export.models; import it under that name")
