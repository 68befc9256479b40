"""kernellib: kernels, wrappers and the instruments to develop them. Public names only."""
