"""The destinations of deliveries: a Python handler, a webhook. Delivery -> Outcome."""
