"""``lit-het benchmark-uncertainty``: methods of uncertainty side by side, on the same images."""
