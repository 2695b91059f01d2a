"""Steps in a loop that was not written for composer3d: its own forwards, backwards, accumulation and hooks."""
