"""Aggregators: functions that combine the uploads of a round into one."""
