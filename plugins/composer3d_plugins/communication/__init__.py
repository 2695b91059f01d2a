"""Built-in communication plugins, a file each."""
