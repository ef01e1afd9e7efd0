"""Where deliveries go: a Python handler, a webhook, a broker. Delivery -> Outcome."""
