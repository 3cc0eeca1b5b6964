"""Parts that families are built from: attention, masks, positions, layers."""
