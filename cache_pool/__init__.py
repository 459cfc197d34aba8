"""The rows: alive, position, stop reason, random state, keys and values."""
