"""Pipeline schedules: their actions, run with given costs, and drawn."""
