"""``lit-het benchmark``: one run on all sets of a suite, and the page of its figures."""
