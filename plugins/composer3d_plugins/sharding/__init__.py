"""Built-in sharding plugins, a file each."""
