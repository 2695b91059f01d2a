"""The search for a better layout: costs of layouts from a few traces, what is kept, and the manifests written."""
