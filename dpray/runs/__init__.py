"""Plans, and the runs of them."""
