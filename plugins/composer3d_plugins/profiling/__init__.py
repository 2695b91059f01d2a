"""Built-in profiling plugins, a file each."""
