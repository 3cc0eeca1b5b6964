"""Graph passes that keep the meaning, one file each."""
