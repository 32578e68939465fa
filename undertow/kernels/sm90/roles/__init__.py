"""What the warps do: one module per role."""
