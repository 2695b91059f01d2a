"""The search for a better layout: what it tries, what it keeps, and the manifest that it writes."""
