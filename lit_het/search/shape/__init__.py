"""``lit-het shape``: sweeps over shapes of an image tower, the law that they follow, and shapes for other budgets."""
