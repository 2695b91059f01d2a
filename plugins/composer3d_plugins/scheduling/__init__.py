"""Built-in scheduling plugins, a file each."""
