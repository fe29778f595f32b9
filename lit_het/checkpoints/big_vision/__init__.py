"""big_vision's `.npz` files: read and written."""
