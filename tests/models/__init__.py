"""Model families against their references."""
