"""The built-in plugins, a folder a family, a file a plugin; written on composer3d's public names only."""
