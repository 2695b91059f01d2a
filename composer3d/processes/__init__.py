"""Processes and their groups: forks, stores in which ranks meet, JSON between ranks, private folders."""
