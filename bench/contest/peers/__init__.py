"""The programs of the contestants, a module each: its worker's settings and why, and how a user of it schedules.

Each is imported in its contestant's own environment alone. Those of node.js stand beside them.
"""
