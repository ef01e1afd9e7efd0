"""Recurring tasks: rules that name the instants at which a task is due again."""
