"""Diagnosis of finished, failed and hanging runs, from the files in their folders."""
