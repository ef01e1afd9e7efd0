"""Brokers.

A broker holds a message for a while and then passes it on. Most can hold it for a few fixed lengths only, and none lets
a message that is under way be moved.
"""
