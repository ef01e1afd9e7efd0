"""The stores, a package each, and the modules that they share; no store imports another."""
