"""Everything that is known of the kernels on one page, every number with where it comes from."""
