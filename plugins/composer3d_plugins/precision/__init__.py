"""Built-in precision plugins, a file each."""
