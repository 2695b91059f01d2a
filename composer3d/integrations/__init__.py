"""Trainers of other libraries that train under a manifest; each is imported where it is used."""
