"""Compression passes, one file each."""

if __name__ != "tx_export.quantize":
    raise ImportError("this folder installs as tx_export.quantize; import it under that name")
