"""Where tasks rest: one module or package per backend; none imports another."""
