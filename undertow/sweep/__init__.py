"""Every configuration that the kernel is judged on: the matrix, what is asked of a cell, the file of the results."""
