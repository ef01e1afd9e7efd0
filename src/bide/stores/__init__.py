"""The stores: one module or package per backend; no backend imports another."""
