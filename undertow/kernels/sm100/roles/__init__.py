"""What the warps do: one module per role, each a loop over the plan's program of that role."""
